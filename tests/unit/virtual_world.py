"""What tests of virtual memory share: sizes, and the driver of the rank that a thread plays."""

from __future__ import annotations

import os
import threading

import torch

from moebius.kernels.virtual import GRANULE

CUDA = torch.device("cuda", 0)
SIZES = [2 * GRANULE, GRANULE, 3 * GRANULE]  # the first two are "experts", the last is "kv"
EXPERTS, KV = (0, 3 * GRANULE), (3 * GRANULE, 3 * GRANULE)
current = threading.local()  # .driver: of the rank that this thread plays


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mib(number: int) -> int:
    return number << 20
