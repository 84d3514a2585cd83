"""What tests of running groups share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.warm import Warm, warm_workers


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """For `ray.init`: workers that need not import vLLM."""
    with warm_workers() as warm:
        yield warm
