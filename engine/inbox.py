"""What other threads hand to a running step: requests, and aborts. No vLLM here."""

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


class Inbox:
    """Requests for a step that is open: they may come while it runs, until it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[SampleRequest] = []
        self._open = self._filling = False

    def open(self) -> None:
        """Take requests from now on."""
        with self._lock:
            self._open = self._filling = True

    def submit(self, requests: Iterable[SampleRequest]) -> None:
        """Hand in requests. Raises RuntimeError when no step takes any."""
        with self._lock:
            if not self._open:
                raise RuntimeError("no step is open: open one before submitting requests")
            self._requests.extend(requests)

    def filled(self) -> None:
        """The burst is in; what may still come follows from it. Few live samples mean its tail from now on."""
        with self._lock:
            self._filling = False

    def close(self) -> None:
        """No more requests will come; the step ends when all are finished."""
        with self._lock:
            self._open = self._filling = False

    def clear(self) -> None:
        """Close, and forget what was handed in: the step it was for will not be."""
        with self._lock:
            self._requests = []
            self._open = self._filling = False

    def take(self) -> Taken:
        """What was handed in since the last call."""
        with self._lock:
            taken, self._requests = self._requests, []
            return Taken(taken, self._open, self._filling)


class AbortBox:
    """Aborts asked for by any thread, until the step takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[SampleKey] = set()
        self._all = False

    def add(self, keys: Iterable[SampleKey] | None) -> None:
        """Ask to abort these samples; None: all."""
        with self._lock:
            if keys is None:
                self._all = True
            else:
                self._keys.update(SampleKey(*key) for key in keys)

    def clear(self) -> None:
        """Forget what was asked for."""
        with self._lock:
            self._keys.clear()
            self._all = False

    def among(self, keys: dict[str, SampleKey]) -> list[str]:
        """Request ids in `keys` that are to be aborted."""
        with self._lock:
            if self._all:
                return list(keys)
            return [i for i, key in keys.items() if key in self._keys] if self._keys else []
