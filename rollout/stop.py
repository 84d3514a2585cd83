"""SIGTERM and Ctrl-C for a program that ends in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The program was told to stop. Not an Exception: nothing on the way may take it for a failure of its own."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopSignal:
    """SIGTERM and SIGINT as something to ask for between pieces of work; the second one ends the process at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._listening = False
        self._at_once = False

    def listen(self) -> None:
        """Take the signals over."""
        self._listening = True
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._received)

    def listen_again(self) -> None:
        """After something that installs handlers of its own, as Ray does."""
        if self._listening and self.signum is None:
            self.listen()

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.signum is not None:
            raise Stopped(self.signum)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within: raise Stopped wherever the main thread is. For waits that have no place to ask in."""
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _received(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL)
        if self._at_once:
            self._at_once = False
            raise Stopped(signum)
