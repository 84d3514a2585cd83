"""A process that uses a GPU for a moment and goes: run as `python visitor.py ORDINAL`. Needs no torch.

Why an engine wants that: once some tens of CUDA graphs have been captured, the kernels of all graphs of the process
follow each other more slowly (H200, driver 580: 1.11 instead of 0.93 us per small kernel), until another context comes
to the GPU. After that they are fast again, also when the other context has gone. benchmarks/graph_gaps.py shows it.
What the driver or the GPU does there is not known; no documentation of it was found.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NBYTES = 2 << 20


def visit(cuda: Any, ordinal: int) -> None:
    """Make the primary context of device `ordinal` through libcuda, and write to some memory there.

    Raises RuntimeError with the number of the CUresult when a call fails.
    """

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")

    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_NBYTES))
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(0), ctypes.c_size_t(_NBYTES))
    call("cuCtxSynchronize")


def send_visitor(ordinal: int, timeout_s: float = 60.0, run: Callable[..., Any] = subprocess.run) -> str | None:
    """Let another process use device `ordinal` for a moment; None, or in words why it could not.

    It costs about a second and changes nothing else: a GPU in exclusive mode, say, leaves things as they were.
    """
    if not sys.executable:
        return "this Python does not know its own executable"
    command = [sys.executable, "-S", str(Path(__file__).resolve()), str(ordinal)]
    try:
        done = run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with status {done.returncode}"


if __name__ == "__main__":
    visit(ctypes.CDLL("libcuda.so.1"), int(sys.argv[1]))
