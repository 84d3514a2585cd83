"""Maps the virtual memory of every rank of one host into this process, and lets go of it while its memory is away.

Peers' addresses are reserved once and stay: what holds them (tables of the movers, plans) goes on after a sleep. What
travels between the ranks are file descriptors of the chunks, closed as soon as they were imported, so that memory is
free again when its own rank and all peers have unmapped it, or have died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moebius.kernels.cuda_calls import CudaError
from moebius.kernels.fd_links import BATCH, FdLinks, LinkLost, close_all
from moebius.kernels.peers import Export, Gather, PeerError, host_id, obstacle
from moebius.kernels.virtual import Chunk, Piece, VirtualMemory, map_pieces, unmap


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others when they meet."""

    export: Export
    chunks: tuple[Chunk, ...]


class VirtualPeers:
    """Addresses of all ranks' memory in this process, the same from `open` to `close`. Make it with `open`."""

    def __init__(self, memory: VirtualMemory, rank: int, gather: Gather, addresses: Sequence[int]) -> None:
        self.memory = memory
        self.addresses = tuple(addresses)
        self._rank = rank
        self._gather = gather
        self._mapped: dict[int, list[Piece]] = {}  # by peer

    @classmethod
    def open(cls, memory: VirtualMemory, rank: int, gather: Gather) -> VirtualPeers:
        """Reserve addresses for the memory of all ranks, which must have like chunks, and map it; a collective.

        What was written to the memory before is visible to all ranks afterwards. Raises PeerError on every rank if
        any rank cannot map another.
        """
        told = gather(_Told(Export(host_id(), memory.calls.name(), memory.nbytes), memory.chunks))
        problem = obstacle([each.export for each in told])
        if problem is None and any(each.chunks != told[0].chunks for each in told):
            problem = "the ranks have divided their memory into different chunks"
        if problem is not None:
            raise PeerError(problem)
        addresses: list[int] = []
        failure = None
        try:
            for peer in range(len(told)):
                addresses.append(memory.address if peer == rank else memory.calls.reserve(memory.nbytes))
        except CudaError as error:
            failure = f"rank {rank} has no addresses left for its peers' memory: {error}"
        peers = cls(memory, rank, gather, addresses)
        try:
            peers._agree([failure])
            peers.map()
        except BaseException:
            peers._unreserve()
            raise
        return peers

    def map(self) -> None:
        """Map what memory the peers have at present, all the same chunks; a collective.

        Raises PeerError on every rank if any cannot; nothing is mapped then.
        """
        if any(self._mapped.values()):
            raise PeerError("the peers' memory is mapped already")
        chunks = self.memory.resident
        if any(told != chunks for told in self._gather(chunks)):
            raise PeerError("some ranks have memory behind parts of their buffers where others have none")
        if len(self.addresses) == 1:
            return
        links = FdLinks.open(self._rank, self._gather)
        failures: list[str | None] = []
        lost = False
        imported: dict[int, list[Piece]] = {}
        try:
            with self.memory.calls.idle():
                for first in range(0, len(chunks), BATCH):
                    self._swap(links, chunks[first : first + BATCH], imported)
                for peer in list(imported):
                    # What fails from here on drops the handles of this peer itself.
                    pieces = imported.pop(peer)
                    map_pieces(self.memory.calls, self.addresses[peer], pieces)
                    self._mapped[peer] = pieces
        except (CudaError, OSError) as error:
            failures.append(self._cannot_map(error))
            lost = isinstance(error, (LinkLost, ConnectionError))
        finally:
            links.close()
            for pieces in imported.values():
                for _, handle in pieces:
                    self.memory.calls.drop(handle)
        try:
            self._agree(failures, lost)
        except PeerError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Let go of the peers' memory; on this rank alone. All work on it must have been enqueued before."""
        if self._mapped:
            with self.memory.calls.idle():
                while self._mapped:
                    peer, pieces = self._mapped.popitem()
                    unmap(self.memory.calls, self.addresses[peer], pieces)

    def barrier(self) -> None:
        """Wait until all ranks have come here; a collective."""
        self._gather(None)

    def close(self, group: dist.ProcessGroup | None = None) -> None:
        """Unmap everything and free the addresses; a collective, after which every rank may free its memory."""
        del group  # the ranks meet as they did in `open`
        self._unreserve()
        self.barrier()

    def _unreserve(self) -> None:
        self.unmap()
        for peer, address in enumerate(self.addresses):
            if peer != self._rank:
                self.memory.calls.unreserve(address, self.memory.nbytes)
        self.addresses = ()

    def _swap(self, links: FdLinks, chunks: Sequence[Chunk], imported: dict[int, list[Piece]]) -> None:
        """Add handles of all peers' `chunks` to `imported`; no file descriptor stays open."""
        calls = self.memory.calls
        own: list[int] = []
        try:
            for chunk in chunks:
                own.append(calls.export(self.memory.handle(chunk)))
            received = links.swap(own)
        finally:
            close_all(own)
        try:
            for peer, fds in received.items():
                for chunk, fd in zip(chunks, fds, strict=True):
                    imported.setdefault(peer, []).append((chunk, calls.take(fd)))
        finally:
            close_all(fd for fds in received.values() for fd in fds)

    def _cannot_map(self, error: Exception) -> str:
        return (
            f"rank {self._rank} on {self.memory.calls.name()} cannot map its peers' memory ({error}): the GPUs need "
            "peer access to each other (nvidia-smi topo -p2p r)"
        )

    def _agree(self, failures: Sequence[str | None], lost: bool = False) -> None:
        """Raise PeerError on all ranks if one has a failure. One that only tells of a lost peer gives way to others."""
        found = [(failure, gone) for told, gone in self._gather((list(failures), lost)) for failure in told if failure]
        causes = [failure for failure, gone in found if not gone] or [failure for failure, _ in found]
        if causes:
            raise PeerError("; ".join(causes))


def sharing_obstacle(device: torch.device, rank: int, gather: Gather, nbytes: int) -> str | None:
    """Try with `nbytes` whether all ranks can have virtual memory and map each other's; a collective, one answer."""
    memory, problem = None, None
    try:
        memory = VirtualMemory([nbytes], device)
    except CudaError as error:
        problem = f"rank {rank}: {error}"
    problems = [told for told in gather(problem) if told]
    try:
        if not problems and memory is not None:
            VirtualPeers.open(memory, rank, gather).close()
    except PeerError as error:
        problems = [str(error)]
    finally:
        if memory is not None:
            memory.close()
    return "; ".join(problems) or None
