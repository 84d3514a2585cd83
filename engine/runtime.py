"""The two runtimes of a rank over one unified buffer, and which of them is active."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import vllm.distributed.parallel_state as parallel_state
import vllm.v1.worker.workspace as workspace
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from moebius.engine import (
    all2all,
    cpu_support,
    deepep_patches,
    sampler,
    speculation,
    steady,
    steady_runner,
    tail_graphs,
    tail_modes,
    vllm_patches,
)
from moebius.engine.attention import SharedAttention
from moebius.engine.backing import make_backing
from moebius.engine.capture import capture_sizes, draft_sizes, tp_batched_tokens
from moebius.engine.config import EngineConfig
from moebius.engine.dense import DenseWeights
from moebius.engine.families import warn_if_unchecked
from moebius.engine.layout import Layout, ModelShape, ShardMap
from moebius.engine.memory import SlotSizes, UnifiedBuffer
from moebius.engine.startup import StartupClock

# Swapped at a switch; _WORLD, _INNER_DP_WORLD and _NODE_COUNT are shared by both runtimes.
PARALLEL_GROUPS = ("_TP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")


class RuntimeBuildError(RuntimeError):
    """A runtime came out other than the switch needs it."""


@dataclass
class Runtime:
    """Everything of one layout on one rank that is dear to build."""

    layout: Layout
    core: EngineCore
    groups: dict[str, Any]
    workspace: Any
    expert_modules: list[Any]  # in layer order; each has w13_weight and w2_weight
    kv: list[torch.Tensor]  # in layer order; [pages, kv heads, page size, 2 * head_dim]
    steady: steady.SteadyScheduling | None = None  # None: all iterations are scheduled by vLLM's code

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def page_size(self) -> int:
        """Tokens per KV page."""
        return self.core.vllm_config.cache_config.block_size

    @property
    def usable_pages(self) -> int:
        """Pages requests can hold; vLLM keeps one null block."""
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    @property
    def free_pages(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def install_groups(self) -> None:
        """Make this runtime's process groups and workspace the ones vLLM looks up."""
        for name, group in self.groups.items():
            setattr(parallel_state, name, group)
        workspace._manager = self.workspace

    def addresses(self) -> list[int]:
        """Data pointers of every parameter and KV tensor; constant from start to shutdown."""
        return [p.data_ptr() for p in self.runner.model.parameters()] + [k.data_ptr() for k in self.kv]


class RuntimePair:
    """The EP and TP runtimes of this rank. `front` does input and output processing for the requests of this rank."""

    def __init__(self, config: EngineConfig, shape: ModelShape, world_size: int) -> None:
        self.clock = StartupClock()
        self.shape = shape
        with self.clock.part("config"):
            self.all2all = all2all.choose(config, shape, world_size)
            all2all.prepare_environment(self.all2all.backend)
            vllm_patches.apply(deepep_patches.targets() if self.all2all.backend == all2all.DEEPEP_V2 else ())
            ep_config = _vllm_config(config, world_size, Layout.EP, self.all2all.backend)
            tp_config = _vllm_config(config, world_size, Layout.TP)
            _check_model(self.all2all.backend, ep_config, config, shape)
        if os.environ.get("RANK", "0") == "0":
            warn_if_unchecked(ep_config.model_config.hf_text_config.model_type)
        device = torch.device(ep_config.device_config.device_type)
        with self.clock.part("buffer"):
            self.buffer = _make_buffer(_slot_sizes(ep_config, shape, config, world_size), device, config, world_size)

        # TP first: its groups are set aside, then the front is built around the EP core, whose experts (loaded last)
        # are the ones that stand in the buffer afterwards.
        embeddings: dict[int, torch.Tensor] = {}
        self.dense = DenseWeights.beside(self.buffer.backing, self.buffer.storage.device)
        self.attention = SharedAttention(self.dense) if config.attention_weights == "shared" else None
        shared = (embeddings, self.attention, self.dense)
        with self.clock.runtime(Layout.TP), vllm_patches.binding(self.buffer, Layout.TP, *shared) as bound:
            core = EngineCore(tp_config, Executor.get_class(tp_config), log_stats=False)
        self.tp = _finish(Layout.TP, core, bound, config)
        if config.ep.all2all == "auto" and device.type == "cuda":
            _check_same_choice(self.all2all.backend)
        self.drafter = speculation.install(core, self.tp.runner, config.tail, draft_sizes(config), self.tp.steady)
        for name in PARALLEL_GROUPS:
            setattr(parallel_state, name, None)
        with self.clock.runtime(Layout.EP), vllm_patches.binding(self.buffer, Layout.EP, *shared) as bound:
            self.front = LLMEngine(
                vllm_config=ep_config,
                executor_class=Executor.get_class(ep_config),
                log_stats=False,
                multiprocess_mode=False,
            )
        client: Any = self.front.engine_core
        self.ep = _finish(Layout.EP, client.engine_core, bound, config)
        self._dp_group = self.front.dp_group
        self._check_aliasing()
        self.dense.keep(p for runtime in (self.ep, self.tp) for p in runtime.runner.model.parameters())
        if self.drafter is not None:
            self.drafter.reserve()
        self.active = self.ep
        self.activate(Layout.EP)

    @property
    def layout(self) -> Layout:
        return self.active.layout

    def activate(self, layout: Layout) -> None:
        """Swap the pointers that make `layout` the one the next iteration runs in."""
        self.active = self.ep if layout is Layout.EP else self.tp
        client: Any = self.front.engine_core
        client.engine_core = self.active.core
        self.front.dp_group = self._dp_group if layout is Layout.EP else None
        self.front.should_execute_dummy_batch = False
        self.active.install_groups()

    def shape_attention(self, layout: Layout) -> None:
        """Bring attention that both layouts share into the form of `layout`, in order with the current stream."""
        if self.attention is not None:
            self.attention.to(layout)

    def _check_aliasing(self) -> None:
        for runtime in (self.ep, self.tp):
            found = tuple(vllm_patches.layer_index(module.layer_name) for module in runtime.expert_modules)
            if found != self.shape.moe_layers:
                raise RuntimeBuildError(
                    f"{runtime.layout.value} has experts in layers {list(found)}, where its config was read as having "
                    f"them in {list(self.shape.moe_layers)}: this model family is not supported"
                )
            for ordinal, module in enumerate(runtime.expert_modules):
                slot = self.buffer.expert_slot(runtime.layout, ordinal)
                if module.w13_weight.data_ptr() != slot.data_ptr() or not self.buffer.owns(module.w2_weight):
                    raise RuntimeBuildError(f"{runtime.layout.value} experts of MoE layer {ordinal} left their slot")
            for ordinal, kv in enumerate(runtime.kv):
                if kv.data_ptr() != self.buffer.kv_slot(runtime.layout, ordinal).data_ptr():
                    raise RuntimeBuildError(f"{runtime.layout.value} KV of layer {ordinal} left its slot")
        if len(self.ep.expert_modules) != len(self.tp.expert_modules) or len(self.ep.kv) != len(self.tp.kv):
            raise RuntimeBuildError("the two runtimes have different numbers of layers")
        if self.attention is not None:
            self.attention.check(len(self.ep.kv))


def _make_buffer(sizes: SlotSizes, device: torch.device, config: EngineConfig, world_size: int) -> UnifiedBuffer:
    device = _rank_device(device)
    shared = world_size if config.mover != "collective" else 1  # ranks that write into each other's buffers
    rank = int(os.environ.get("RANK", "0")) if shared > 1 else 0
    return UnifiedBuffer(sizes, device, make_backing(config.memory, sizes, device, rank, shared))


def _rank_device(device: torch.device) -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device.type == "cuda" else device


def _check_model(backend: all2all.Backend, ep_config: VllmConfig, config: EngineConfig, shape: ModelShape) -> None:
    dtype = str(ep_config.model_config.dtype)
    reason = all2all.model_refusal(backend, dtype=dtype, hidden=shape.hidden, eager=config.enforce_eager)
    if reason:
        raise all2all.All2AllUnavailable(f"engine.ep.all2all: {backend} cannot run this model: {reason}")


def _check_same_choice(backend: str) -> None:
    """Each rank chose by what it found; they must agree before EP's groups are built."""
    group = parallel_state.get_world_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, backend, group=group.cpu_group)
    if problem := all2all.problem_of_choices(dict(enumerate(found))):
        raise RuntimeBuildError(problem)


def _vllm_config(
    config: EngineConfig, world_size: int, layout: Layout, backend: all2all.Backend = all2all.ALLGATHER
) -> VllmConfig:
    has_tokenizer = os.path.exists(os.path.join(config.model, "tokenizer.json")) or not os.path.isdir(config.model)
    layout_args: dict[str, Any] = (
        {"data_parallel_size": world_size, "enable_expert_parallel": True, "all2all_backend": backend}
        if layout is Layout.EP
        else {"tensor_parallel_size": world_size}
    )
    cuda = torch.cuda.is_available()
    drafts = layout is Layout.TP and config.tail.on
    sizes = capture_sizes(layout, config) if cuda and not config.enforce_eager else None
    if drafts:
        layout_args["speculative_config"] = {
            "method": "custom_class",
            "model": speculation.DRAFTER,
            "num_speculative_tokens": config.tail.drafted,
        }
        if sizes is not None:
            graphs = {"decode": sizes, "drafts": draft_sizes(config)}
            layout_args["additional_config"] = {tail_graphs.CONFIG_KEY: graphs}
            sizes = sorted({*sizes, *graphs["drafts"]})
    if config.attention_weights == "shared":
        # Compiled code knows the strides of weights, but the keys of vLLM's cache do not.
        layout_args.setdefault("additional_config", {})["moebius_attention_weights"] = "shared"
    arguments = EngineArgs(
        model=config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        skip_tokenizer_init=not has_tokenizer,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens if layout is Layout.EP else tp_batched_tokens(config),
        hf_overrides=config.hf_overrides,
        cudagraph_capture_sizes=sizes,
        block_size=config.block_size,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_return_routed_experts=config.routed_experts,
        # On CPU compilation only costs start-up time.
        enforce_eager=config.enforce_eager or not cuda,
        attention_backend=config.attention_backend,
        seed=config.seed,
        logprobs_mode=config.logprobs_mode,
        disable_log_stats=True,
        # vLLM refuses it with drafters that do not run on the device; here no iteration has both (`tail_modes`).
        async_scheduling=config.async_scheduling and cuda and not drafts,
        disable_custom_all_reduce=not config.custom_all_reduce,
        distributed_executor_backend="external_launcher",
        distributed_timeout_seconds=config.collective_timeout_s,
        cpu_distributed_timeout_seconds=config.collective_timeout_s,
        **({"moe_backend": "triton", "gpu_memory_utilization": 0.02} if cuda else {}),
        **layout_args,
    )
    vllm_config = arguments.create_engine_config()
    # vLLM's CPU platform turns it off as not worth while; here it is wanted so that one code path serves both.
    vllm_config.scheduler_config.async_scheduling = config.async_scheduling
    if drafts:
        scheduling: Any = vllm_config.scheduler_config
        scheduling.scheduler_cls = tail_modes.AheadScheduler
    return vllm_config


def _slot_sizes(vllm_config: VllmConfig, shape: ModelShape, config: EngineConfig, world_size: int) -> SlotSizes:
    element = torch.empty(0, dtype=vllm_config.model_config.dtype).element_size()
    return SlotSizes(
        expert_layers=len(shape.moe_layers),
        expert_bytes=ShardMap(shape, world_size).expert_slot_bytes(element),
        kv_layers=shape.num_layers,
        kv_bytes=config.kv_cache_bytes // shape.num_layers,
    )


def _finish(layout: Layout, core: EngineCore, bound: vllm_patches.Binding, config: EngineConfig) -> Runtime:
    context = core.vllm_config.compilation_config.static_forward_context
    runtime = Runtime(
        layout=layout,
        core=core,
        groups={name: getattr(parallel_state, name) for name in PARALLEL_GROUPS},
        workspace=workspace._manager,
        expert_modules=bound.expert_modules,
        kv=[context[name].kv_cache for name in bound.kv_layer_names],
    )
    runner_class = type(runtime.runner)
    if runner_class.__module__ not in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.cpu_model_runner"):
        raise RuntimeBuildError(
            f"{layout.value} runs on {runner_class.__module__}, the engine needs vLLM's V1 model runner: "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if not bound.expert_modules or not bound.kv_layer_names:
        raise RuntimeBuildError(f"{layout.value}: no experts or no KV were placed in the unified buffer")
    if not torch.cuda.is_available():
        runtime.runner.prepare_inputs_event = None  # an event of a device there is not
        cpu_support.note_routes(runtime.runner.model)
    sampler.install(runtime.runner)
    if config.steady_decode and (scheduling := steady.attach(runtime.scheduler)) is not None:
        runtime.steady = scheduling
        steady_runner.SteadyRunner(runtime.runner, scheduling)
    return runtime
