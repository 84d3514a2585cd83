"""Errors a user meets, and the wording of validation errors (with the nearest known key for a misspelt one)."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


class MoebiusError(RuntimeError):
    """Base of every error this package raises on purpose."""


class BadInput(ValueError, MoebiusError):
    """A setting, file or argument is wrong. The message names it and says what to do."""


class GroupNotReady(MoebiusError):
    """The group cannot serve: not started, shut down, a rank died or a weight update failed. The message says which."""


class RankDied(MoebiusError):
    """A rank's process ended or stopped answering. `rank` and, if one was running, `step` say which.

    `phase`: what the rank did last (see moebius.engine.phases), where that is known.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, step: int | None = None, phase: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.phase = phase


class QueueFull(MoebiusError):
    """A service holds as many unfinished samples as it may. Nothing was taken in: try again when some have ended."""


class IncompleteStep(MoebiusError):
    """A step ended without every sample it was asked for."""


class CallersError(Exception):
    """On its way through our own handlers: `error` came from a function or stream that the caller has given.

    Whatever its type, it says nothing about ranks. `callers` makes it; who was given the function unwraps it.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def callers() -> Iterator[None]:
    """Around a call of what the caller has given."""
    try:
        yield
    except Exception as error:
        raise CallersError(error) from error


@contextmanager
def as_the_caller_raised() -> Iterator[None]:
    """Raises the error within a CallersError, as if nothing had been in between."""
    found: BaseException | None = None
    try:
        yield
    except CallersError as error:
        found = error.error
    if found is not None:
        raise found


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key most like `key`, or None when none is alike."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(key.lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a key nobody knows: the nearest known one, or all of them when none is alike."""
    names = list(known)
    near = nearest_key(key, names)
    if near is not None:
        return f"unknown key '{key}'; did you mean '{near}'?"
    return f"unknown key '{key}'; known keys: {', '.join(sorted(names))}" if names else f"unknown key '{key}'"


def validate(model: type[M], value: Any, what: str) -> M:
    """`model` built from the mapping `value`. Raises BadInput: first `what`, then one line per fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadInput(describe(model, error, what)) from error


def describe(model: type[BaseModel], error: ValidationError, what: str) -> str:
    """A validation error in words: `what`, then one line per fault with the path of the key."""
    lines = []
    for fault in error.errors(include_url=False):
        loc = fault["loc"]
        path = ".".join(str(part) for part in loc)
        if fault["type"] == "extra_forbidden":
            parent = ".".join(str(part) for part in loc[:-1])
            text = unknown_key(str(loc[-1]), _fields_at(model, loc[:-1]))
            lines.append(f"in '{parent}': {text}" if parent else text)
        elif fault["type"] == "missing":
            lines.append(f"{path}: required, but not set")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            got = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            lines.append(f"{path}: {message}{got}" if path else message)
    return f"{what}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{what}:", *lines])


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the model that `loc`, a path of keys and list indices, leads to; empty if it leads to none."""
    here: list[type[BaseModel]] = [model]
    for part in loc:
        fields = [m.model_fields[part].annotation for m in here if isinstance(part, str) and part in m.model_fields]
        # An index, a key of a dict or the tag of a union stays at the models already found.
        here = [found for annotation in fields for found in _models_in(annotation)] if fields else here
    return [name for m in here for name in m.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models named anywhere in a type annotation such as `list[A] | B | None`."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [found for part in typing.get_args(annotation) for found in _models_in(part)]
