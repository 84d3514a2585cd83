"""A copy of the last committed weights in the host's shared memory, from which new ranks are filled after a failure.

Every rank writes a share of the tensors that an update brings, chosen by name, to a file of its own, so that a group
holds one copy. The files belong to a process that outlives the ranks, the `Keeper`; when it is gone, too, they count as
left over (moebius.rollout.shm). A file is a sequence of records: 8 bytes of length, a header as JSON, the tensor's
bytes; the last has an empty name.
"""

from __future__ import annotations

import json
import mmap
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from moebius.rollout.shm import SHM_DIR, make_ident, parse_ident, remove_own
from moebius.rollout.weights import DEFAULT_BUCKET_BYTES, Entry, views

SOURCE = f"{__name__}:read_kept"
Pair = tuple[str, torch.Tensor]
_ALIGN = 64
_REMEDY = "give it more room, or set failures.keep_weights: none"


class Keeper:
    """An actor on the ranks' machine that owns the files: kept weights live as long as it does."""

    def __init__(self) -> None:
        self._ident = make_ident()
        self._sets = 0

    def new_set(self, kept: str | None) -> str:
        """A name for the files of one update. All others but those of `kept` are removed, such as of failed ones."""
        self.keep_only(kept)
        self._sets += 1
        return str(SHM_DIR / f"{self._ident}-kept-{self._sets}")

    def keep_only(self, files: str | None) -> None:
        """Remove all sets but this one."""
        for path in SHM_DIR.glob(f"{self._ident}-kept-*"):
            if files is None or not path.name.startswith(f"{Path(files).name}-"):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        ident = parse_ident(str(self._ident))
        assert ident is not None
        remove_own(ident)


class KeptWriter:
    """Writes this rank's share of an update. Raises ValueError, in words, when there is no room."""

    def __init__(self, files: str, rank: int, ranks: int) -> None:
        self._path, self._rank, self._ranks = Path(f"{files}-{rank}"), rank, ranks
        self._file = self._path.open("wb")

    def take(self, tensors: Iterable[Pair]) -> None:
        """Keep those tensors that are this rank's to keep."""
        for name, tensor in tensors:
            if zlib.crc32(name.encode()) % self._ranks == self._rank:
                flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
                entry = Entry(name, tensor.dtype, tuple(tensor.shape), 0, flat.numel())
                self._write(json.dumps(entry.to_json()).encode(), memoryview(flat.numpy()))  # type: ignore[arg-type]

    def end(self) -> None:
        """All tensors have come."""
        self._write(json.dumps(["", "uint8", [0], 0, 0]).encode(), memoryview(b""))
        try:
            self._file.close()  # writes what is buffered
        except OSError as error:
            raise self._no_room(error) from error

    def along(self, source: Callable[..., Iterable[list[Pair]]]) -> Callable[..., Iterator[list[Pair]]]:
        """`source`, with what it yields kept on the way. It is read to its end even where nothing can be kept."""

        def pass_on(*arguments: Any) -> Iterator[list[Pair]]:
            failure: ValueError | None = None
            for tensors in source(*arguments):
                pairs = list(tensors)
                if failure is None:
                    try:
                        self.take(pairs)
                    except ValueError as error:
                        failure = error
                yield pairs
            if failure is not None:
                raise failure
            self.end()

        return pass_on

    def _write(self, header: bytes, data: memoryview) -> None:
        pad = -(8 + len(header)) % _ALIGN
        try:
            self._file.write((len(header) + pad).to_bytes(8, "little") + header + b" " * pad)
            self._file.write(data)
            self._file.write(b"\0" * (-len(data) % _ALIGN))
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> ValueError:
        return ValueError(f"weights cannot be kept in {self._path.parent} ({error.strerror}): {_REMEDY}")


def read_kept(files: str, ranks: int) -> Iterator[list[Pair]]:
    """The tensors of a set, some at a time, as views of the files; a source for `RolloutGroup.pull_update`.

    Raises ValueError for a set that is not whole.
    """
    for rank in range(ranks):
        batch: list[Pair] = []
        nbytes = 0
        for name, tensor in _read(Path(f"{files}-{rank}")):
            batch.append((name, tensor))
            nbytes += tensor.numel() * tensor.element_size()
            if nbytes >= DEFAULT_BUCKET_BYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch


def _read(path: Path) -> Iterator[Pair]:
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ValueError(f"kept weights cannot be read from {path}: {error}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(content, dtype=torch.uint8)
    at = 0
    while at + 8 <= flat.numel():
        start = at + 8 + int.from_bytes(content[at : at + 8], "little")
        entry = Entry.from_json(json.loads(content[at + 8 : start]))
        if not entry.name:
            return
        [pair] = views(flat[start : start + entry.nbytes], [entry])
        yield pair
        at = start + entry.nbytes + -entry.nbytes % _ALIGN
    raise ValueError(f"kept weights in {path} are not whole: the update they are of did not end")
