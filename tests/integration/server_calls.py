"""What tests of a server do to it: wait, count, and send weights as a trainer does."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from moebius.rollout.service import RolloutService
from moebius.rollout.transports import trainer


def idle(service: RolloutService, seconds: float = 20) -> None:
    """Wait until nothing is live."""
    deadline = time.monotonic() + seconds
    while (stats := service.stats()).live or stats.waiting:
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)


def count_of_switches(service: RolloutService) -> int:
    """Of all steps; waits for the open one to close."""
    deadline = time.monotonic() + 20
    while service.stats().step is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return sum(service.stats().switches.values())


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a storm."""

    body: int  # which
    at: float  # seconds
    fate: str  # stays | leaves (the client hangs up) | aborts (by its id)
    patience: float  # seconds until then


def storm(url: str, bodies: list[dict[str, Any]], arrivals: list[Arrival], name: str) -> list[list[Any] | None]:
    """All answers' choices, whatever the order; None of clients that hung up before theirs came.

    Raises httpx.ReadTimeout for an answer that does not come.
    """

    async def one(client: httpx.AsyncClient, number: int, arrival: Arrival) -> list[Any] | None:
        await asyncio.sleep(arrival.at)
        own = f"{name}-{number}"
        timeout = httpx.Timeout(60, read=arrival.patience if arrival.fate == "leaves" else 60)
        asked = asyncio.create_task(
            client.post("/v1/completions", json=bodies[arrival.body] | {"request_id": own}, timeout=timeout)
        )
        if arrival.fate == "aborts":
            await asyncio.sleep(arrival.patience)
            await client.post("/abort_requests", json={"request_ids": [own]})
        try:
            answer = await asked
        except httpx.ReadTimeout:
            if arrival.fate != "leaves":
                raise
            return None
        assert answer.status_code == 200, answer.text
        choices: list[Any] = answer.json()["choices"]
        return choices

    async def everyone() -> list[list[Any] | None]:
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(one(client, *each) for each in enumerate(arrivals)))

    return asyncio.run(everyone())


def by_broadcast(url: str, tensors: dict[str, torch.Tensor], packed: bool, together: Any) -> list[httpx.Response]:
    """Send tensors as a trainer does, in two requests; returns the answers."""
    answers = []
    names = list(tensors)
    for part in (names[::2], names[1::2]):
        info = {
            "names": part,
            "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in part],
            "shapes": [list(tensors[name].shape) for name in part],
            "packed": packed,
            "packed_buffer_size_bytes": 50_000,
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{url}/update_weights", json={"update_info": info}, timeout=120)
            trainer.send(together, [(name, tensors[name]) for name in part], packed=packed, buffer_bytes=50_000)
            answers.append(answer.result())
        if answers[-1].status_code != 200:
            break  # nobody would listen
    return answers
