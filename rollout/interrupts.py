"""Ctrl-C during a call: it comes where the call waits, or when what the call has begun is finished, not in between.

A call on a group changes several things that belong together: what the ranks were asked, what the group knows of it,
and who holds its lock. A KeyboardInterrupt may come between any two instructions of them, also while an earlier one is
being cleaned up, so no order of the instructions is safe. Calls therefore hold it back (`held_back`) but for places
where they wait for ranks, time or the caller's own code (`waiting`), each of which is prepared for an error.

    with held_back():
        refs = submit()              # never without the next line
        self.refs = refs
        try:
            with waiting():
                wait(refs)           # Ctrl-C is raised here
        except BaseException:
            clean_up()               # whole, although Ctrl-C is pressed again
            raise

Only the main thread gets signals; in others both do nothing. Who presses Ctrl-C `INSISTS` times during one call gets it
at once, wherever the call is.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INSISTS = 4


class _Signals:
    """SIGINT in this process. Only the main thread reads or writes it."""

    def __init__(self) -> None:
        self.depth = 0  # of `held_back` blocks
        self.may_come = True  # at once
        self.came = 0  # and were held back
        self.before: Any = None  # the handler outside

    def received(self, signum: int, frame: FrameType | None) -> None:
        """The handler within a block."""
        self.came += 1
        if self.may_come or self.came >= INSISTS:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Do what SIGINT does outside: in general, raise KeyboardInterrupt."""
        self.came, may_come, self.may_come = 0, self.may_come, False  # another one waits until this one is dealt with
        self.before(signal.SIGINT, frame)
        self.may_come = may_come  # the handler has only taken note


_signals = _Signals()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class held_back:  # noqa: N801  (reads as a statement)
    """A block in which Ctrl-C waits; may be within another one, and within `waiting`."""

    def __enter__(self) -> held_back:
        self._depth = _signals.depth
        self._holds = _is_main() and (self._depth > 0 or callable(signal.getsignal(signal.SIGINT)))
        if self._holds:
            self._might = _signals.may_come and self._depth > 0
            if self._depth == 0:
                _signals.before, _signals.came, _signals.may_come = signal.getsignal(signal.SIGINT), 0, False
                signal.signal(signal.SIGINT, _signals.received)
            _signals.may_come = False
            _signals.depth = self._depth + 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._holds:
            return
        _signals.depth = self._depth  # whatever became of blocks within
        _signals.may_come = self._might and error is None
        if _signals.depth == 0 and signal.getsignal(signal.SIGINT) == _signals.received:
            signal.signal(signal.SIGINT, _signals.before)
        if _signals.came and (_signals.depth == 0 or _signals.may_come):
            if isinstance(error, KeyboardInterrupt):  # once is enough
                _signals.came = 0
            else:
                _signals.deliver()

    @property
    def asked(self) -> bool:
        """Whether Ctrl-C came and is held back: what follows will be raised at the end of the block."""
        return self._holds and _signals.came > 0


class waiting:  # noqa: N801
    """A block within `held_back` in which Ctrl-C is raised at once, as one that came before it is."""

    def __enter__(self) -> waiting:
        self._opens = _is_main() and _signals.depth > 0
        if self._opens:
            self._might, _signals.may_come = _signals.may_come, True
            if _signals.came:
                _signals.may_come = self._might
                _signals.deliver()
                _signals.may_come = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._opens:
            _signals.may_come = self._might and error is None


def pause(seconds: float) -> None:
    """Sleep; Ctrl-C ends it."""
    with waiting():
        time.sleep(seconds)


def uninterrupted(call: Callable[P, T]) -> Callable[P, T]:
    """A function that is a `held_back` block."""

    @functools.wraps(call)
    def within(*arguments: P.args, **more: P.kwargs) -> T:
        with held_back():
            return call(*arguments, **more)

    return within


def handed_over(take_back: Callable[[Any], object]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that is a `held_back` block, and whose result is taken back if Ctrl-C comes before its caller has it.

    What it returns goes to the caller straight from here: another call in between could be interrupted as it returns.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def within(*arguments: P.args, **more: P.kwargs) -> T:
            made: T | None = None
            try:
                with held_back():
                    made = call(*arguments, **more)
                return made  # noqa: RET504  (the name is for what follows)
            except BaseException:
                if made is not None:
                    take_back(made)
                raise

        return within

    return decorate
