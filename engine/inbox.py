"""What other threads hand to a running step: requests, the wish to park, and aborts. No vLLM here."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from moebius.engine.types import SampleKey, SampleRequest


@dataclass(frozen=True, slots=True)
class Taken:
    """What was in an inbox."""

    requests: list[SampleRequest]
    is_open: bool  # more may come
    is_filling: bool  # the burst that the step is for has not come in whole
    is_parking: bool = False  # the step is to end with its samples unfinished


class Inbox:
    """Requests for a step that is open: they may come while it runs, until it is closed or parked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[SampleRequest] = []
        self._seen: set[SampleKey] = set()  # of requests handed in since the last `open`
        self._open = self._filling = self._parking = False

    def open(self) -> None:
        """Take requests from now on."""
        with self._lock:
            self._seen.clear()
            self._open = self._filling = True

    def submit(self, requests: Iterable[SampleRequest]) -> None:
        """Hand in requests. Raises RuntimeError when no step takes any."""
        with self._lock:
            if not self._open:
                raise RuntimeError("no step is open: open one before submitting requests")
            requests = list(requests)
            self._requests.extend(requests)
            self._seen.update(request.key for request in requests)

    def filled(self) -> None:
        """The burst is in; what may still come follows from it. Few live samples mean its tail from now on."""
        with self._lock:
            self._filling = False

    def close(self) -> None:
        """No more requests will come; the step ends when all are finished."""
        with self._lock:
            self._open = self._filling = False

    def park(self) -> None:
        """The step is to end soon, on all ranks, and to keep what is unfinished for the next one."""
        with self._lock:
            self._parking = True

    def clear(self) -> None:
        """Close, and forget what was handed in: the step it was for is over or will not be."""
        with self._lock:
            self._requests = []
            self._seen.clear()
            self._open = self._filling = self._parking = False

    def take(self) -> Taken:
        """What was handed in since the last call."""
        with self._lock:
            taken, self._requests = self._requests, []
            return Taken(taken, self._open, self._filling, self._parking)

    def seen(self) -> set[SampleKey]:
        """Keys of everything that was handed in since the inbox was opened."""
        with self._lock:
            return set(self._seen)


class AbortBox:
    """Aborts asked for by any thread, until the step takes them."""

    def __init__(self, inbox: Inbox) -> None:
        self._lock = threading.Lock()
        self._inbox = inbox
        self._keys: set[SampleKey] = set()
        self._first: set[SampleKey] | None = None  # what the running step began with; None before it has begun
        self._all_first = False  # an abort of everything came before that

    def add(self, keys: Iterable[SampleKey] | None) -> None:
        """Ask to abort these samples; None: all that the step has been given by now, not those that come later."""
        with self._lock:
            if keys is not None:
                self._keys.update(SampleKey(*key) for key in keys)
                return
            self._keys |= self._inbox.seen()
            if self._first is None:
                self._all_first = True
            else:
                self._keys |= self._first

    def begin(self, keys: Iterable[SampleKey]) -> None:
        """The step begins with these samples."""
        with self._lock:
            self._first = set(keys)
            if self._all_first:
                self._keys |= self._first
                self._all_first = False

    def clear(self) -> None:
        """Forget what was asked for, and the step that has begun."""
        with self._lock:
            self._keys.clear()
            self._first, self._all_first = None, False

    def among(self, keys: dict[str, SampleKey]) -> list[str]:
        """Request ids in `keys` that are to be aborted. Each is told once: a key may be used again afterwards."""
        with self._lock:
            if not self._keys:
                return []
            found = [i for i, key in keys.items() if key in self._keys]
            self._keys.difference_update(keys[i] for i in found)
            return found
