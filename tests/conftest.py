"""Settings of all tests: no network, no usage statistics, and tests marked `gpu` only where there are CUDA devices."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # it is 15 otherwise, and tests that run beside these would get nearly all of the cores
}.items():
    os.environ.setdefault(name, value)


def pytest_collection_finish() -> None:
    """What was imported stays: full collections that look through all of it take longer than many a test."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))
