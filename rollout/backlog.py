"""Prompts whose samples have not all ended: within a step, and from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.errors import BadInput
from moebius.rollout.types import Rollout, Sample


@dataclass(slots=True)
class PromptGroup:
    """One prompt and its samples so far, by sample index."""

    step: int  # that it was submitted to
    prompt: int  # its number there
    ids: list[int]
    requests: dict[int, SampleRequest]
    samples: dict[int, Sample] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)  # of samples that a rank has: which one

    @property
    def missing(self) -> list[SampleKey]:
        """Its samples that have not ended."""
        return [request.key for index, request in self.requests.items() if index not in self.samples]

    @property
    def complete(self) -> bool:
        """Whether all its samples have ended."""
        return len(self.samples) == len(self.requests)

    def rollout(self) -> Rollout:
        """The samples that have ended."""
        samples = [self.samples[index] for index in sorted(self.samples)]
        return Rollout(self.prompt, self.ids, samples, self.step)


def groups_of(requests: Sequence[SampleRequest], ids: Sequence[list[int]], step: int, first: int) -> list[PromptGroup]:
    """One group per prompt; prompts are numbered from `first`."""
    groups = [PromptGroup(step, first + i, prompt, {}) for i, prompt in enumerate(ids)]
    for request in requests:
        groups[request.key.prompt - first].requests[request.key.sample] = request
    return groups


class Backlog:
    """What steps have left: groups with parked samples, and complete ones that nobody has been given.

    After the ranks have died, parked samples are `homeless`: the next step draws them anew, with the same seeds.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], PromptGroup] = {}  # by step and prompt

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def keys(self) -> list[SampleKey]:
        """Samples that have not ended."""
        return [key for group in self.groups.values() for key in group.missing]

    def check_step(self, step: int) -> None:
        """Raise BadInput if `step` has left samples: two samples must not have one key."""
        if any(group.step == step and group.missing for group in self.groups.values()):
            raise BadInput(
                f"step {step} has parked samples, which would be mixed up with those of another step of that number; "
                "number the step otherwise, or end them with abort_parked"
            )

    def keep(self, groups: Iterable[PromptGroup], where: Mapping[SampleKey, int]) -> None:
        """Groups that a step has left; `where` are the ranks of its parked samples."""
        for group in groups:
            group.ranks = {key.sample: where[key] for key in group.missing if key in where}
            self.groups[(group.step, group.prompt)] = group

    def leave(self, groups: Iterable[PromptGroup]) -> None:
        """Complete groups that nobody has been given."""
        self.groups.update({(group.step, group.prompt): group for group in groups})

    def take(self) -> list[PromptGroup]:
        """The groups with parked samples, for the next step."""
        return self._take(complete=False)

    def take_complete(self) -> list[PromptGroup]:
        """The groups that only wait for someone to take them."""
        return self._take(complete=True)

    def _take(self, *, complete: bool) -> list[PromptGroup]:
        taken = [group for group in self.groups.values() if group.complete == complete]
        for group in taken:
            del self.groups[(group.step, group.prompt)]
        return taken

    def end(self, ended: Iterable[tuple[SampleKey, Sample]]) -> None:
        """Parked samples that will not go on; a group without others is dropped."""
        for key, sample in ended:
            group = self.groups[(key.step, key.prompt)]
            group.samples[key.sample] = sample
            group.ranks.pop(key.sample, None)
            if group.complete:
                del self.groups[(key.step, key.prompt)]

    def lost(self) -> None:
        """The ranks are gone, and with them what they had parked."""
        for group in self.groups.values():
            group.ranks = {}


def homeless_requests(groups: Iterable[PromptGroup]) -> list[SampleRequest]:
    """Requests of the samples that no rank has."""
    return [group.requests[k.sample] for group in groups for k in group.missing if k.sample not in group.ranks]
