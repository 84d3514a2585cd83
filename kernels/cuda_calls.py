"""CUDA calls that torch does not offer, through cuda.bindings (a dependency of torch's CUDA builds since 2.11).

Loaded at first use, so that hosts without CUDA can import the modules that use it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


class CudaError(RuntimeError):
    """A CUDA call failed."""


@functools.cache
def runtime() -> Any:
    """The module `cuda.bindings.runtime`. Raises CudaError if it is not installed."""
    return _load("runtime")


@functools.cache
def driver() -> Any:
    """The module `cuda.bindings.driver`. Raises CudaError if it is not installed."""
    return _load("driver")


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda.bindings call (None, one value, or a tuple). Raises CudaError if its status is an error."""
    status, *values = result
    if int(status):
        raise CudaError(f"{what}: {getattr(status, 'name', status)}")
    return tuple(values) if len(values) > 1 else values[0] if values else None


def _load(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CudaError(
            "cuda.bindings is missing: install cuda-bindings of the CUDA version of your torch build, "
            "for example pip install 'cuda-bindings>=13.0.3,<14'"
        ) from error
