"""How a step begins: all ranks check what they were given, and admit it together or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from vllm.v1.engine import EngineCoreRequest

from moebius.engine.exchange import LostRequest
from moebius.engine.front import RequestFront
from moebius.engine.front_requests import ParkedSample
from moebius.engine.layout import Layout
from moebius.engine.length_news import merged, prompt_id
from moebius.engine.policy import StepStart, SwitchPolicy
from moebius.engine.types import SampleRequest


class RequestRefused(ValueError):
    """vLLM refuses a request of the step, on this or another rank; no request of the step was started."""


class PolicyRefused(ValueError):
    """The policy lacks what it needs, and says what; no request of the step was started."""


@dataclass(slots=True)
class Admitted:
    """What this rank's core is to be given, in order, and in TP which rank answers for each."""

    prepared: list[EngineCoreRequest]
    owners: dict[str, int]


@dataclass(slots=True)
class _Admission:
    """What a rank brings to a step."""

    problem: str | None
    prepared: list[EngineCoreRequest]  # in TP only: for all cores
    samples: int
    prompt_tokens: int
    max_tokens: int
    resumed: int
    groups: dict[int, int] | None  # samples by prompt, where the policy learns lengths


def admit(
    front: RequestFront,
    group: dist.ProcessGroup,
    policy: SwitchPolicy,
    requests: Sequence[SampleRequest],
    parked: Sequence[ParkedSample],
    layout: Layout,
    max_model_len: int,
) -> Admitted:
    """Check this rank's requests, see what the others bring, and begin the policy's step; a collective.

    `parked` are samples of earlier steps that this rank will go on with. Raises as `Step.admit`, on all ranks.
    """
    problem, prepared = None, []
    front.reserve(sample.asked.key for sample in parked)
    try:
        for request in requests:
            prepared.append(front.prepare(request))
            front.register(request, prepared[-1])
    except (ValueError, TypeError) as error:
        problem = f"{request.key}: {error}"
    in_tp = layout is Layout.TP  # where every core has all requests
    resumed = [sample.request for sample in parked]
    limits = [r.sampling_params.max_tokens or 0 for r in [*prepared, *resumed] if r.sampling_params]
    mine = _Admission(
        problem,
        prepared if in_tp else [],
        len(requests) + len(resumed),
        sum(len(r.prompt_token_ids) for r in requests) + sum(r.num_tokens for r in resumed),
        max(limits, default=0),
        len(resumed),
        _groups(requests, parked) if policy.learns_lengths else None,
    )
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    problems = [part.problem for part in gathered if part.problem]
    if problems:
        front.forget_all()
        raise RequestRefused(problems[0])
    samples = sum(part.samples for part in gathered)
    mean = sum(part.prompt_tokens for part in gathered) / max(1, samples)
    longest = max(part.max_tokens for part in gathered) or max_model_len
    try:
        policy.begin_step(StepStart(samples, mean, longest, merged(part.groups for part in gathered)))
    except ValueError as error:  # on all ranks alike
        front.forget_all()
        raise PolicyRefused(str(error)) from error
    if in_tp and any(part.resumed for part in gathered):
        raise LostRequest("samples are parked, and the step did not begin in EP")
    owners = {request.request_id: rank for rank, part in enumerate(gathered) for request in part.prepared}
    return Admitted([r for part in gathered for r in part.prepared] if in_tp else prepared, owners)


def _groups(requests: Sequence[SampleRequest], parked: Sequence[ParkedSample]) -> dict[int, int]:
    keys = [request.key for request in requests] + [sample.asked.key for sample in parked]
    return dict(Counter(prompt_id(key) for key in keys))
