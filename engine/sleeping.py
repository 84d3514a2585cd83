"""Giving a rank's memory back between steps, and taking it again at the same addresses.

Weights (tag `weights`: experts, and what `moebius.engine.dense` holds) and KV (`kv_cache`) go apart. Norms and routers
of both layouts stay, and whatever graphs and workspaces hold.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moebius.engine.account import used_bytes
from moebius.engine.layout import Layout
from moebius.engine.memory import BackingError, RegionName
from moebius.engine.runtime import RuntimePair
from moebius.engine.switch import Switcher
from moebius.engine.types import MemoryChange, MemoryTag
from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.peers import gather_of

_REGIONS: dict[MemoryTag, RegionName] = {"weights": "experts", "kv_cache": "kv"}


class Sleeper:
    """What of a rank's memory is away. `sleep` and `wake_up` are collectives; repeating one does nothing."""

    def __init__(self, pair: RuntimePair, switcher: Switcher, group: dist.ProcessGroup) -> None:
        self.pair, self.switcher, self._group = pair, switcher, group
        self.asleep: set[MemoryTag] = set()
        self._kept: list[torch.Tensor] | None = None  # in host memory, as `_weights` names them

    def _weights(self) -> list[torch.Tensor]:
        """What is lost by sleep: the expert tensors that count, in the layout they stand in, and dense weights."""
        runtime = self.pair.ep if self.switcher.experts_in is Layout.EP else self.pair.tp
        experts = [p.data for module in runtime.expert_modules for p in (module.w13_weight, module.w2_weight)]
        return experts + self.pair.dense.tensors()

    def sleep(self, tags: Sequence[MemoryTag], *, keep_weights: bool) -> MemoryChange:
        """Give memory back. With `keep_weights` weights are copied to host memory before.

        Nothing may be live, and no page in use. Raises BackingError where memory cannot be given back.
        """
        before, started = self._measure(), time.perf_counter()
        new = [tag for tag in dict.fromkeys(tags) if tag not in self.asleep]
        if "weights" in new and keep_weights:
            self._kept = [_host_copy(tensor) for tensor in self._weights()]
        if new and not self.asleep:
            self.switcher.mover.before_release()
        dist.barrier(self._group)  # no peer writes into this rank's memory any more
        nbytes = self._release(new)
        self.asleep.update(new)
        return self._change(nbytes, before, started)

    @torch.inference_mode()
    def wake_up(self, tags: Sequence[MemoryTag]) -> MemoryChange:
        """Take memory again: KV is zeros, weights are as they were if they were kept and else zeros.

        Raises BackingError on all ranks, all asleep as before, where one lacks the memory.
        """
        before, started = self._measure(), time.perf_counter()
        back = [tag for tag in dict.fromkeys(tags) if tag in self.asleep]
        nbytes = self._restore(back)
        self.asleep.difference_update(back)
        if "weights" in back and self._kept is not None:
            for tensor, kept in zip(self._weights(), self._kept, strict=True):
                tensor.copy_(kept, non_blocking=True)
            self._synchronize()
            self._kept = None
        dist.barrier(self._group)
        if back and not self.asleep:
            self.switcher.mover.after_restore()
        return self._change(nbytes, before, started)

    def _release(self, tags: Sequence[MemoryTag]) -> int:
        nbytes = self.pair.buffer.release([_REGIONS[tag] for tag in tags])
        return nbytes + (self.pair.dense.release() if "weights" in tags else 0)

    def _restore(self, tags: Sequence[MemoryTag]) -> int:
        """Restore on all ranks or on none."""
        nbytes, failure = 0, None
        try:
            nbytes = self.pair.buffer.restore([_REGIONS[tag] for tag in tags])
            nbytes += self.pair.dense.restore() if "weights" in tags else 0
        except (BackingError, CudaError) as error:
            failure = f"rank {dist.get_rank(self._group)}: {error}"
        failures = [told for told in gather_of(self._group)(failure) if told]
        if failures:
            self._release(tags)
            raise BackingError("; ".join(failures))
        return nbytes

    def _measure(self) -> int:
        self._synchronize()
        return used_bytes(self.pair.buffer.storage.device)

    def _change(self, nbytes: int, before: int, started: float) -> MemoryChange:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        after = self._measure()
        return MemoryChange(dist.get_rank(self._group), nbytes, before - after, time.perf_counter() - started)

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
