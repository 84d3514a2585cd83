"""Cross-rank flags: the only synchronisation of a move, in stream order, without the host.

The rule they enforce: rank r may write step k into rank p's slot only when p has finished sending its own source out
of that slot, and with N+1 slots for N layers the target slot of step k is the source slot of step k-1. So every step
ends with `Barrier.barrier`: rank r raises its flag on each peer to the number of steps it has finished, then its stream
waits until every peer's flag stands as high. That also means that all peers' bytes of the step have arrived.

Flag r of a rank is written by rank r alone and only ever grows (modulo 2**32), so nothing is reset between moves, and a
rank is at most one step ahead of another.
"""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from moebius.kernels.cuda_calls import CudaError, checked, driver
from moebius.kernels.peers import PeerMap

How = Literal["stream", "kernel"]
_STRIDE = 32  # int32 per flag: one 128-byte line each, so that no two ranks write to one line
_TEST_S = 5.0


class PeerTimeout(RuntimeError):
    """A peer did not finish its step: it has died, or its device does other work."""


class Barrier(Protocol):
    """What ends a step."""

    def barrier(self) -> None:
        """In stream order: tell all peers that this rank finished a step, then wait until all of them did."""
        ...


class Signals:
    """Flags in peer memory. Make it with `Signals.connect`.

    `how` is "stream" for the device's own stream operations, which take no SM, or "kernel" for a kernel that spins;
    the kernel raises flags by atomics, which between GPUs need NVLink.
    """

    def __init__(self, peers: PeerMap, rank: int, how: How) -> None:
        self.how = how
        self.step = 0
        self._peers = peers
        self._flags = peers.tensor
        self._rank = rank
        self._table = torch.tensor(peers.addresses, dtype=torch.int64, device=self._flags.device)
        self._watch: torch.cuda.Stream | None = None

    @classmethod
    def connect(cls, group: dist.ProcessGroup, device: torch.device, how: How | None = None) -> Signals:
        """Map the flags of all ranks; a collective. `how` None takes stream operations if they work on peer memory.

        Raises PeerError on every rank if the ranks cannot map each other, CudaError if `how` asks for stream
        operations and they do not work.
        """
        flags = torch.zeros(dist.get_world_size(group) * _STRIDE, dtype=torch.int32, device=device)
        signals = cls(PeerMap.open(flags, group), dist.get_rank(group), "stream")
        if how != "kernel":
            problem = signals._try_streams(group)
            if problem is not None and how == "stream":
                signals.close(group)
                raise CudaError(f"stream operations cannot signal between the ranks: {problem}")
            how = "stream" if problem is None else "kernel"
        signals.how = how
        return signals

    @property
    def ranks(self) -> int:
        """Ranks that signal each other."""
        return len(self._peers.addresses)

    def barrier(self) -> None:
        """See `Barrier.barrier`; on the current stream."""
        self.step += 1
        if self.ranks == 1:
            return
        with torch.cuda.device_of(self._flags):
            if self.how == "stream":
                stream = torch.cuda.current_stream(self._flags.device).cuda_stream
                self._raise(stream, self.step)
                self._wait(stream, self.step)
            else:
                launch_signal(self._table, self._flags, self._rank, self.step)

    def wait_on_host(self, timeout_s: float) -> None:
        """Block until the current stream is done. Raises PeerTimeout if that takes longer, naming who is behind.

        After a timeout this rank's flags are raised so that its device does not wait for ever, so what it moved is
        worthless and nothing may be moved any more.
        """
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._flags.device))
        if not _within(done, timeout_s):
            behind = {rank: value for rank, value in enumerate(self._standing()) if self._short_of(value, self.step)}
            self._release()
            raise PeerTimeout(
                f"rank {self._rank} waited {timeout_s:.0f} s for its peers at step {self.step}; ranks and the steps "
                f"they have finished: {behind}"
            )

    def close(self, group: dist.ProcessGroup) -> None:
        """Unmap the peers' flags; a collective."""
        self._peers.close(group)

    def _raise(self, stream: int, value: int) -> None:
        """Write `value` to my flag on each peer once all earlier work of the stream is visible everywhere."""
        cuda = driver()
        for peer, flags in enumerate(self._peers.addresses):
            if peer != self._rank:
                address = flags + self._rank * _STRIDE * 4
                checked(cuda.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0), "raising a flag")

    def _wait(self, stream: int, value: int) -> None:
        """Hold the stream until every peer's flag here is at `value` or, modulo 2**32, beyond."""
        cuda = driver()
        reached = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        own = self._peers.addresses[self._rank]
        for peer in range(self.ranks):
            if peer != self._rank:
                address = own + peer * _STRIDE * 4
                checked(cuda.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, reached), "waiting for a flag")

    def _try_streams(self, group: dist.ProcessGroup) -> str | None:
        """Take one step by stream operations, such that nothing can hang; a collective with one answer for all."""
        self.step += 1
        problem = None
        with torch.cuda.device_of(self._flags):
            stream = torch.cuda.Stream(self._flags.device)
            try:
                self._raise(stream.cuda_stream, self.step)
                stream.synchronize()
            except CudaError as error:
                problem = str(error)
            problem = _first(problem, group)
            if problem is None:
                standing = self._standing()
                if any(self._short_of(value, self.step) for value in standing):
                    problem = f"rank {self._rank} sees flags {standing} after step {self.step}"
                problem = _first(problem, group)
            if problem is None:  # what is waited for is there, so the wait ends or does not work
                try:
                    self._wait(stream.cuda_stream, self.step)
                    done = torch.cuda.Event()
                    done.record(stream)
                    if not _within(done, _TEST_S):
                        problem = f"rank {self._rank} still waits for a flag that is raised"
                        self._release()
                except CudaError as error:
                    problem = str(error)
                problem = _first(problem, group)
        return problem

    def _short_of(self, value: int, step: int) -> bool:
        return (step - value) % (1 << 32) in range(1, 1 << 31)

    def _standing(self) -> list[int]:
        """Every rank's flag here, my own as the step I am in; does not wait for the current stream."""
        with torch.cuda.stream(self._watch_stream()):
            values = self._flags.cpu()[::_STRIDE].tolist()
        values[self._rank] = self.step
        return values

    def _release(self) -> None:
        """Raise all flags here. A copy and no kernel: loading one may have to wait for the kernel that spins."""
        with torch.cuda.stream(self._watch_stream()):
            self._flags.copy_(torch.full(self._flags.shape, _int32(self.step), dtype=torch.int32))

    def _watch_stream(self) -> torch.cuda.Stream:
        if self._watch is None:
            self._watch = torch.cuda.Stream(self._flags.device)
        return self._watch


def launch_signal(table: torch.Tensor, flags: torch.Tensor, rank: int, step: int) -> None:
    """Raise flag `rank` to `step` on all ranks of `table` (int64 addresses of their flags), then wait for all here."""
    import triton

    from moebius.kernels.peer_triton import signal_kernel

    ranks = table.numel()
    signal_kernel[(1,)](
        table,
        flags,
        rank,
        _int32(step),
        ranks=ranks,
        stride=_STRIDE,
        lanes=max(32, triton.next_power_of_2(ranks)),
        num_warps=1,
    )


def _within(event: torch.cuda.Event, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0)
    return True


def _first(problem: str | None, group: dist.ProcessGroup) -> str | None:
    """The first rank's problem, if any has one."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, problem, group=group)
    return next(filter(None, found), None)


def _int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
