"""File descriptors between the processes of one host, over Unix sockets with names that only the group knows.

Names are abstract: no file is left behind by a process that is killed, and processes of another network namespace
cannot connect. Each pair of ranks has one connection; all ranks make the same calls in the same order.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Any

from moebius.kernels.peers import Gather, PeerError

BATCH = 64  # file descriptors of a message; the kernel takes 253, and a process may often have only 1024 open
TIMEOUT_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_RANK = struct.Struct("i")


class LinkLost(OSError):
    """A peer has closed its connection, most likely since something failed there."""


class FdLinks:
    """Connections of this rank to all others. Make it with `FdLinks.open`."""

    def __init__(self, rank: int, links: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._links = links

    @classmethod
    def open(cls, rank: int, gather: Gather, timeout_s: float = TIMEOUT_S) -> FdLinks:
        """Connect all ranks with each other. Raises PeerError on every rank alike if two cannot connect."""
        server: socket.socket | None = None
        links: dict[int, socket.socket] = {}
        try:
            name, failure = b"\0moebius-" + secrets.token_hex(16).encode(), None
            try:
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                server.settimeout(timeout_s)
                server.bind(name)
                server.listen(1024)
            except OSError as error:
                failure = f"rank {rank} cannot open a Unix socket: {error}"
            names = [told for told, _ in _agreed(gather, (name, failure))]
            try:  # the higher rank calls
                for peer in range(rank):
                    links[peer] = link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    link.settimeout(timeout_s)
                    link.connect(names[peer])
                    link.sendall(_RANK.pack(rank))
            except OSError as error:
                failure = (
                    f"rank {rank} cannot reach rank {len(links) - 1} over a Unix socket ({error}): containers need a "
                    "shared network namespace (--network=host)"
                )
            _agreed(gather, (None, failure))
            try:
                assert server is not None
                while len(links) < len(names) - 1:
                    link, _ = server.accept()
                    if _same_user(link):
                        link.settimeout(timeout_s)
                        links[_RANK.unpack(_exactly(link, _RANK.size))[0]] = link
                    else:
                        link.close()
            except OSError as error:
                failure = f"rank {rank} was not called by all other ranks: {error}"
            _agreed(gather, (None, failure))
            return cls(rank, links)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            if server is not None:
                server.close()

    def swap(self, fds: Sequence[int]) -> dict[int, list[int]]:
        """Send up to BATCH file descriptors to every peer, and get as many of each: new ones, for the caller to close.

        Raises LinkLost if a peer has gone, OSError if this process may not open so many files or a peer is too slow.
        """
        received: dict[int, list[int]] = {}
        try:
            for link in self._links.values():
                socket.send_fds(link, [b"f"], fds)
            for peer, link in self._links.items():
                received[peer] = _receive(link, len(fds), peer)
        except BaseException:
            close_all(fd for got in received.values() for fd in got)
            raise
        return received

    def close(self) -> None:
        """Close all connections; who waits at their other end gets LinkLost."""
        for link in self._links.values():
            link.close()


def close_all(fds: Any) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def _receive(link: socket.socket, count: int, peer: int) -> list[int]:
    found = array.array("i")
    data, ancillary, flags, _ = link.recvmsg(1, socket.CMSG_LEN(count * found.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    if data and len(found) == count and not flags & socket.MSG_CTRUNC:
        return found.tolist()
    close_all(found)
    if not data:
        raise LinkLost(f"rank {peer} has closed its connection")
    raise OSError(
        f"{len(found)} of {count} file descriptors of rank {peer} arrived: raise the limit of open files (ulimit -n)"
    )


def _same_user(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _exactly(link: socket.socket, count: int) -> bytes:
    data = link.recv(count, socket.MSG_WAITALL)
    if len(data) != count:
        raise LinkLost("a peer closed its connection at once")
    return data


def _agreed(gather: Gather, told: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
    """What all ranks tell. Raises PeerError on all of them if one tells of a failure."""
    found = gather(told)
    failures = [failure for _, failure in found if failure]
    if failures:
        raise PeerError("; ".join(failures))
    return found
