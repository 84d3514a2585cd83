"""The part of a step report that tells how the ranks started and where their memory goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.account import Held, MemoryAccount
from moebius.engine.startup import Startup
from moebius.rollout.errors import validate


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RuntimeStart(_Part):
    """Seconds of building one runtime on one rank. The parts but compile_s add up to total_s."""

    layout: Literal["EP", "TP"] = Field(description="Layout of the runtime.")
    groups_s: float = Field(ge=0, description="Device and process groups.")
    load_s: float = Field(ge=0, description="Weights.")
    profile_s: float = Field(ge=0, description="The first forward pass, in which the model is compiled.")
    kv_s: float = Field(ge=0, description="KV tensors and attention backends.")
    warmup_s: float = Field(ge=0, description="Warming up kernels, without graph capture.")
    capture_s: float = Field(ge=0, description="CUDA graph capture.")
    other_s: float = Field(ge=0, description="The rest.")
    total_s: float = Field(ge=0, description="The whole runtime.")
    compile_s: float = Field(ge=0, description="Compilation as vLLM counts it, within profile_s and warmup_s.")
    graph_bytes: int = Field(ge=0, description="Device memory that graph capture took.")
    grown_bytes: int = Field(ge=0, description="Device memory in use after less before; 0 on CPU.")


class HeldBytes(_Part):
    """Bytes by the runtimes that need them."""

    ep: int = Field(ge=0, description="EP alone.")
    tp: int = Field(ge=0, description="TP alone.")
    shared: int = Field(ge=0, description="Both, counted once.")


class Memory(_Part):
    """Memory of one rank after its start."""

    rank: int = Field(ge=0, description="The rank.")
    device: str = Field(description="cpu or cuda.")
    device_bytes: int = Field(ge=0, description="Memory the device has; on CPU, the host.")
    used_bytes: int = Field(ge=0, description="Of it in use, by whatever process; on CPU, this process's resident set.")
    torch_allocated_bytes: int | None = Field(ge=0, description="Held by tensors; null on CPU.")
    torch_reserved_bytes: int | None = Field(ge=0, description="Held by torch's allocator; null on CPU.")
    expert_bytes: int = Field(ge=0, description="Expert slots of one layout.")
    expert_spare_bytes: int = Field(ge=0, description="The spare expert slot.")
    kv_bytes: int = Field(ge=0, description="KV slots of one layout.")
    kv_spare_bytes: int = Field(ge=0, description="The spare KV slot.")
    parameter_bytes: dict[str, HeldBytes] = Field(description="All other parameters and buffers, by kind.")
    workspace_bytes: HeldBytes = Field(description="Scratch memory of the MoE kernels.")
    graph_bytes: HeldBytes = Field(description="CUDA graphs, as vLLM measured at capture.")
    all2all_bytes: HeldBytes = Field(
        HeldBytes(ep=0, tp=0, shared=0), description="Buffers of EP's all-to-all, where deep_ep does it."
    )
    verify_bytes: int = Field(0, ge=0, description="For the logits of an iteration with drafts.")
    rest_bytes: int = Field(ge=0, description="In use and in none of the above.")
    overhead_ep_bytes: int = Field(ge=0, description="What a static EP engine would not need: TP's own, spare slots.")
    overhead_tp_bytes: int = Field(ge=0, description="What a static TP engine would not need: EP's own, spare slots.")

    def account(self) -> MemoryAccount:
        """The same as the engine's type, which makes table rows."""
        values = self.model_dump(exclude={"rest_bytes", "overhead_ep_bytes", "overhead_tp_bytes"})
        for name in ("workspace_bytes", "graph_bytes", "all2all_bytes"):
            values[name] = Held(**values[name])
        values["parameter_bytes"] = {kind: Held(**held) for kind, held in values["parameter_bytes"].items()}
        return MemoryAccount(**values)


class RankStart(_Part):
    """How one rank started."""

    rank: int = Field(ge=0, description="The rank.")
    import_s: float = Field(ge=0, description="Seconds of importing vLLM.")
    config_s: float = Field(ge=0, description="Seconds of making vLLM's configuration of both layouts.")
    buffer_s: float = Field(ge=0, description="Seconds of allocating the unified buffer.")
    other_s: float = Field(ge=0, description="Seconds of everything between.")
    total_s: float = Field(ge=0, description="Seconds of building the engine, which import_s is not part of.")
    calibration_s: float = Field(0.0, ge=0, description="Within other_s: measuring what the policy needs to know.")
    costs: str = Field("", description="Where the costs of iterations and switches come from.")
    kernel_us: list[float] = Field(
        default_factory=list,
        description="Microseconds per small kernel of a CUDA graph, before and after another process used the GPU for "
        "a moment at the end of the start; empty without CUDA graphs.",
    )
    runtimes: list[RuntimeStart] = Field(description="The runtimes in the order they were built.")
    memory: Memory = Field(description="Where the memory goes.")


def rank_start(startup: Startup, memory: MemoryAccount) -> RankStart:
    """The entry of one rank from what its engine measured."""
    more = {
        "rest_bytes": memory.rest_bytes,
        "overhead_ep_bytes": memory.overhead("EP"),
        "overhead_tp_bytes": memory.overhead("TP"),
    }
    values = asdict(startup) | {"memory": asdict(memory) | more}
    return validate(RankStart, values, f"start of rank {startup.rank}")


def startup_line(starts: Sequence[RankStart]) -> str:
    """One line about a start: the slowest rank's seconds, and the fullest rank's price of two runtimes."""
    slowest = max(starts, key=lambda start: start.import_s + start.total_s)
    parts = [f"import {slowest.import_s:.1f}", f"buffer {slowest.buffer_s:.1f}"]
    for built in slowest.runtimes:
        parts.append(
            f"{built.layout} {built.total_s:.1f} (load {built.load_s:.1f}, profile {built.profile_s:.1f}, "
            f"warm-up {built.warmup_s:.1f}, capture {built.capture_s:.1f})"
        )
    if slowest.calibration_s:
        parts.append(f"calibration {slowest.calibration_s:.1f}")
    fullest = max((start.memory for start in starts), key=lambda memory: memory.used_bytes)
    costs = [
        f"{nbytes / 1e9:.2f} GB ({100 * nbytes / (fullest.device_bytes or 1):.1f} %) over static {layout}"
        for layout, nbytes in (("EP", fullest.overhead_ep_bytes), ("TP", fullest.overhead_tp_bytes))
    ]
    total = slowest.import_s + slowest.total_s
    return f"ready after {total:.1f} s: {', '.join(parts)} | memory per rank: {', '.join(costs)}"
