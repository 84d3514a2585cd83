"""A step as a block: `with group.open_step(...) as step:` ends it on leaving, however the block is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

from moebius.rollout.interrupts import uninterrupted


class StepBlock(ABC):
    """What steps of one group and of several replicas have in common."""

    _closed: bool

    @abstractmethod
    def abort(self) -> None:
        """End all samples."""

    @abstractmethod
    def close(self) -> Any:
        """Wait for the end of all samples, and end the step."""

    @abstractmethod
    def break_off(self) -> None:
        """End the step if it still runs, without its results."""

    def __enter__(self) -> Self:
        return self

    @uninterrupted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is not None and not self._closed:
                self.abort()
            self.close()
        except BaseException:
            self.break_off()
            raise
