"""Where a rank's memory goes, and what holding two runtimes costs over one. Figures in bytes; 1 GB = 10^9 bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from moebius.engine.runtime import Runtime, RuntimePair
    from moebius.engine.startup import Startup

Interval = tuple[int, int]  # addresses [first, behind the last)

# Names of parameters and buffers, by the first of these words that they contain.
_WORDS = (
    ("embeddings", ("embed_tokens", "wte")),
    ("lm_head", ("lm_head",)),
    ("rotary", ("rotary", "cos_sin")),
    ("norms", ("norm", "ln_")),
    ("router", (".gate.", "router", "correction_bias")),
    ("attention", ("attn", "attention")),
)
KINDS = (*(kind for kind, _ in _WORDS), "other")


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one kind, by the runtimes that need them. Memory that both use is counted once, in `shared`."""

    ep: int = 0
    tp: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.ep + self.tp + self.shared


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Memory of one rank. On CPU, `device_*` are the host's memory and this process's resident set."""

    rank: int
    device: str  # "cpu" | "cuda"
    device_bytes: int  # the device has
    used_bytes: int  # of them are in use, on CUDA by whatever process
    torch_allocated_bytes: int | None  # by torch's tensors, without a buffer in virtual memory; None on CPU
    torch_reserved_bytes: int | None  # by torch's allocator, likewise; None on CPU
    expert_bytes: int  # slots of one layout's experts
    expert_spare_bytes: int  # the slot that lets layers shift, and what rounds the region up
    kv_bytes: int
    kv_spare_bytes: int
    parameter_bytes: dict[str, Held] = field(default_factory=dict)  # by KINDS; all but the experts, and buffers
    workspace_bytes: Held = Held()  # scratch memory of the MoE kernels
    graph_bytes: Held = Held()  # as vLLM measured at capture
    verify_bytes: int = 0  # for the logits of an iteration with drafts; torch holds it, and lends it to other tensors
    all2all_bytes: Held = Held()  # buffers that deep_ep sends tokens through; 0 with the all-gather

    @property
    def attributed(self) -> int:
        """Bytes that have a name above."""
        slots = self.expert_bytes + self.expert_spare_bytes + self.kv_bytes + self.kv_spare_bytes
        return slots + self.verify_bytes + sum(held.total for held in self._held().values())

    @property
    def rest_bytes(self) -> int:
        """In use without a name: device context, communicators, the runners' own tensors, allocator slack."""
        return max(0, self.used_bytes - self.attributed)

    def overhead(self, over: str) -> int:
        """Bytes that only the other runtime, or the shift of slots, needs: over a static `over`, "EP" or "TP"."""
        other = sum(held.tp if over == "EP" else held.ep for held in self._held().values())
        other += self.verify_bytes if over == "EP" else 0
        return other + self.expert_spare_bytes + self.kv_spare_bytes

    def overhead_share(self, over: str) -> float:
        """`overhead` as a share of the device's memory, 0 to 1."""
        return self.overhead(over) / self.device_bytes if self.device_bytes else 0.0

    def rows(self) -> list[tuple[str, int]]:
        """Names and bytes for a table; all but the overheads at the end add up to what is in use."""
        rows = [
            ("expert slots", self.expert_bytes),
            ("expert spare slot", self.expert_spare_bytes),
            ("KV slots", self.kv_bytes),
            ("KV spare slot", self.kv_spare_bytes),
        ]
        for kind, held in self._held().items():
            parts = (("EP", held.ep), ("TP", held.tp), ("both", held.shared))
            rows += [(f"{kind}, {who}", nbytes) for who, nbytes in parts if nbytes]
        if self.verify_bytes:
            rows.append(("logits of drafts, TP", self.verify_bytes))
        rows.append(("everything else", self.rest_bytes))
        return [
            *rows,
            ("overhead over static EP", self.overhead("EP")),
            ("overhead over static TP", self.overhead("TP")),
        ]

    def _held(self) -> dict[str, Held]:
        return self.parameter_bytes | {
            "MoE workspace": self.workspace_bytes,
            "CUDA graphs": self.graph_bytes,
            "all-to-all buffers": self.all2all_bytes,
        }


def table(account: MemoryAccount) -> str:
    """`account` as lines of text: name, GB, per cent of the device's memory."""
    whole = account.device_bytes or 1
    lines = [f"{name:<26}{nbytes / 1e9:>10.3f} GB{100 * nbytes / whole:>8.2f} %" for name, nbytes in account.rows()]
    return "\n".join([f"rank {account.rank}, {account.device}, {account.device_bytes / 1e9:.1f} GB", *lines])


def memory_account(pair: RuntimePair, startup: Startup, rank: int) -> MemoryAccount:
    """The account of this rank's memory now. Graphs are those of `startup`, which vLLM measures at capture."""
    sizes = pair.buffer.sizes
    expert, kv = sizes.expert_layers * sizes.expert_stride, sizes.kv_layers * sizes.kv_stride
    graphs = {built.layout: built.graph_bytes for built in startup.runtimes}
    total, used, allocated, reserved = _device(pair.buffer.storage.device)
    ep, tp = (_parameters(runtime, pair) for runtime in (pair.ep, pair.tp))
    return MemoryAccount(
        rank=rank,
        device=pair.buffer.storage.device.type,
        device_bytes=total,
        used_bytes=used,
        torch_allocated_bytes=allocated,
        torch_reserved_bytes=reserved,
        expert_bytes=expert,
        expert_spare_bytes=sizes.expert_region - expert,
        kv_bytes=kv,
        kv_spare_bytes=sizes.kv_region - kv,
        parameter_bytes={kind: split(ep[kind], tp[kind]) for kind in KINDS if ep[kind] or tp[kind]},
        workspace_bytes=split(_workspace(pair.ep), _workspace(pair.tp)),
        graph_bytes=Held(ep=graphs.get("EP", 0), tp=graphs.get("TP", 0)),
        verify_bytes=0 if pair.drafter is None else pair.drafter.verify_bytes,
        all2all_bytes=Held(ep=_all2all(pair.ep)),
    )


def split(ep: Iterable[Interval], tp: Iterable[Interval]) -> Held:
    """What two sets of address intervals cover: each alone, and together."""
    ep, tp = list(ep), list(tp)
    ep_bytes, tp_bytes, both = covered(ep), covered(tp), covered([*ep, *tp])
    return Held(ep=both - tp_bytes, tp=both - ep_bytes, shared=ep_bytes + tp_bytes - both)


def covered(intervals: Iterable[Interval]) -> int:
    """Bytes in the union of intervals: parameters that are views of one another count once."""
    total, end = 0, 0
    for first, behind in sorted(intervals):
        total += max(0, behind - max(first, end))
        end = max(end, behind)
    return total


def kind_of(name: str) -> str:
    """The one of KINDS that a parameter or buffer belongs to, by its name."""
    return next((kind for kind, words in _WORDS if any(word in name for word in words)), "other")


def _parameters(runtime: Runtime, pair: RuntimePair) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    model = runtime.runner.model
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel() and not pair.buffer.owns(tensor):
            found[kind_of(name)].append(_interval(tensor))
    return found


def _interval(tensor: torch.Tensor) -> Interval:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # A run of columns lies scattered over a matrix, from whose memory it takes no more than its own bytes.
    return tensor.data_ptr(), tensor.data_ptr() + min(last + 1, tensor.numel()) * tensor.element_size()


def _workspace(runtime: Runtime) -> list[Interval]:
    # None on CPU, which has no workspace manager; a manager holds None where nothing was asked for yet.
    held: list[Any] = getattr(runtime.workspace, "_current_workspaces", [])
    return [_interval(tensor) for tensor in held if tensor is not None]


def _all2all(ep: Runtime) -> int:
    """Bytes of the buffers of EP's all-to-all; vLLM keeps them by what they were made with."""
    manager = getattr(getattr(ep.groups.get("_EP"), "device_communicator", None), "all2all_manager", None)
    buffers = getattr(getattr(manager, "handle_cache", None), "_cache", {}).values()
    # Of deep_ep: ElasticBuffer has the first, Buffer the other two.
    sizes = ("num_bytes", "num_nvl_bytes", "num_rdma_bytes")
    return sum(int(getattr(buffer, size, 0)) for buffer in buffers for size in sizes)


def used_bytes(device: torch.device) -> int:
    """Memory in use: of a GPU by whatever process, on CPU by this one."""
    return _device(device)[1]


def _device(device: torch.device) -> tuple[int, int, int | None, int | None]:
    """Bytes the device has, in use, and allocated and reserved by torch."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * page
    return os.sysconf("SC_PHYS_PAGES") * page, resident, None, None
