"""A call on a thread of its own, whose answer or error is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from moebius.rollout.interrupts import waiting


class Task(threading.Thread):
    """A call on a thread of its own, which does not keep the process from ending."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self._found, self._error = call, None, None  # type: Callable[[], Any], Any, BaseException | None
        self.start()

    def run(self) -> None:
        """See Thread."""
        try:
            self._found = self._call()
        except BaseException as error:  # noqa: BLE001  (raised by `result`)
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        """See Thread; Ctrl-C ends the wait."""
        with waiting():
            super().join(timeout)

    def result(self) -> Any:
        """What the call gave, when it has ended; raises its error."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._found
