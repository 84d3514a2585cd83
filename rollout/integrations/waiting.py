"""Waiting for an answer that may never come: trainers that send weights only after the rollouts they wait for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from moebius.rollout.errors import MoebiusError
from moebius.rollout.types import Rollout

if TYPE_CHECKING:
    from moebius.rollout.service import RolloutService

LOOK_S = 5.0  # between looks at whether a request can be answered at all


async def unless_blocked(service: RolloutService, answer: asyncio.Future[Rollout]) -> Rollout:
    """The answer of a service. After the loss of a rank requests would wait for an update of the weights, and the
    trainer, which sends one only after the step, for the requests: they fail instead, with MoebiusError.
    """
    while not answer.done():
        await asyncio.wait({answer}, timeout=LOOK_S)
        blocked = service.stats().blocked
        if blocked and not answer.done():
            answer.cancel()
            raise MoebiusError(f"requests cannot be answered before the next weights: {blocked}")
    return await answer
