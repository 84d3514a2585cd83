"""Groups that sample without an engine, for the logic of several replicas: every look draws a token of each sample.

Tokens are a function of the sample's seed and their position, as a real group's; a sample gets `max_tokens` of them.
What it leaves out: ranks, switches, memory. A group can be made to lose its ranks at a look.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moebius.engine.config import EngineConfig
from moebius.engine.types import Iteration, SampleKey, SamplePiece, SampleResult, StepOutcome, StepStats
from moebius.rollout.backlog import Backlog, PromptGroup
from moebius.rollout.batch import Limits, build_requests, to_sample, to_token_ids
from moebius.rollout.config import Place, RolloutConfig
from moebius.rollout.errors import GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import FailureSettings
from moebius.rollout.group_memory import MemoryReport
from moebius.rollout.group_weights import UpdateReport
from moebius.rollout.report import build_report
from moebius.rollout.types import Sample, Sampling
from moebius.rollout.worker import Progress

RANKS = 2
LIMITS = Limits(256, 100, False)


def settings(replicas: int, **changes: Any) -> RolloutConfig:
    engine = EngineConfig(model="fake", max_num_seqs=changes.pop("seqs", 64))
    failures = FailureSettings(**changes.pop("failures", {}))
    sampling = Sampling(max_tokens=4)
    return RolloutConfig(ranks=RANKS, replicas=replicas, engine=engine, sampling=sampling, failures=failures, **changes)


def token(seed: int, position: int) -> int:
    return (seed // 7 + 31 * position) % 97


class FakeHomes:
    """Node "node-R" for replica R, until it is said to be lost."""

    def __init__(self, config: RolloutConfig, device: str) -> None:
        self.nodes = [f"node-{i}" for i in range(config.replicas)]
        self.closed = False

    def place(self, replica: int) -> Place:
        if self.closed:
            raise MoebiusError("shut down")
        return Place(node=self.nodes[replica])

    def close(self) -> None:
        self.closed = True


class FakeGroup:
    def __init__(self, config: RolloutConfig) -> None:
        assert config.replicas == 1 and config.place is not None
        self.config, self.node = config, config.place.node
        self.backlog = Backlog()
        self.running, self.closed = True, False
        self.max_model_len, self.vocab_size, self.has_tokenizer = 256, 100, False
        self.policy_version, self.problem = 0, None  # type: int, str | None
        self.startup: list[Any] = []
        self.costs, self.costs_from, self.last_report = None, "", None
        self.step: FakeStep | None = None
        self.fail_at: int | None = None  # look at which the ranks are lost
        self.poison: int | None = None  # prompt with which they are lost
        self.fail_update: MoebiusError | None = None
        self.log: list[str] = []
        self.open_update: int | None = None
        self.tensors: list[str] = []

    def requests_of(
        self, prompts: Any, n: int, sampling: Any, step: int, first: int, lengths: Any = None
    ) -> tuple[list[Any], list[Any]]:
        own = self.config.sampling if sampling is None else Sampling.parse(sampling)
        ids = [to_token_ids(p, i, LIMITS, lambda: None) for i, p in enumerate(prompts)]
        how: dict[str, Any] = {"seed": 5, "step": step, "limits": LIMITS, "lengths": lengths, "first": first}
        return build_requests(ids, n, own, **how), ids

    def open_step(self, step: int, expected: int | None, groups: Any = ()) -> FakeStep:
        if not self.running:
            raise GroupNotReady("a rank died")
        if self.problem is not None:
            raise GroupNotReady(self.problem)
        assert self.step is None, "another call is running"
        self.step = FakeStep(self, step, [*self.backlog.take(), *groups])
        return self.step

    @property
    def parked(self) -> list[SampleKey]:
        return self.backlog.keys

    @property
    def incomplete(self) -> list[Any]:
        return [group.rollout() for group in self.backlog.groups.values() if not group.complete]

    def abort(self, keys: list[SampleKey]) -> None:
        assert self.step is not None
        self.step.aborted |= set(keys)

    def abort_parked(self, keys: Any) -> list[tuple[SampleKey, Sample]]:
        ended = [(k, Sample(k.sample, [], None, None, None, "abort", None, 0, 1)) for k in sorted(keys)]
        self.backlog.end(ended)
        return ended

    def restart(self) -> None:
        self.log.append("restart")
        self.running, self.closed, self.fail_at = True, False, None
        self.problem = "it holds the checkpoint's weights" if self.policy_version else None

    def shutdown(self) -> None:
        self.running, self.closed = False, True

    def reset_prefix_cache(self) -> None:
        if not self.running:
            raise RankDied("rank 0 died")

    def sleep(self, tags: Any, keep_weights: bool = False) -> MemoryReport:
        self.log.append(f"sleep {' '.join(sorted(tags))} {keep_weights}")
        if not keep_weights:
            self.problem = "the weights were given back by sleep"
        return MemoryReport([], 0.1)

    def wake_up(self, tags: Any) -> MemoryReport:
        self.log.append("wake_up")
        return MemoryReport([], 0.1)

    def begin_update(self, version: int, *, mode: Any = None) -> None:
        self.open_update = version
        self.tensors = []

    def pull_tensors(self, source: str, args: Any, *, timeout_s: float) -> None:
        if not self.running or self.open_update is None:
            raise GroupNotReady("no weight update is open")
        assert len(args) == RANKS
        if isinstance(self.fail_update, RankDied):
            self.running, self.open_update = False, None
        if self.fail_update is not None:
            raise self.fail_update
        self.log.append(f"pull {args}")

    def commit_update(self) -> UpdateReport:
        if not self.running or self.open_update is None:
            raise GroupNotReady("no weight update is open")
        self.policy_version, self.open_update, self.problem = self.open_update, None, None
        return UpdateReport(self.policy_version, "in_place", "x", 8, 0.1)

    def drop_update(self) -> None:
        if self.open_update is not None:
            self.open_update, self.problem = None, "send a full update"


class FakeStep:
    def __init__(self, group: FakeGroup, step: int, groups: list[PromptGroup]) -> None:
        self.group, self.step = group, step
        self.own: list[PromptGroup] = []
        self.all: dict[tuple[int, int], PromptGroup] = {}
        self.tokens: dict[SampleKey, list[int]] = {}
        self.requests: dict[SampleKey, Any] = {}
        self.aborted: set[SampleKey] = set()
        self.most, self.looks, self.told = 0, 0, False
        self.results: list[SampleResult] = []
        self.fresh: list[tuple[SampleKey, Sample]] = []
        self.report_numbers: Any = None
        self.drawn = 0
        self.submit_groups(groups)

    def submit_groups(self, groups: Any) -> None:
        for group in groups:
            self.all[(group.step, group.prompt)] = group
            for key in group.missing:
                self.requests[key] = group.requests[key.sample]
                self.tokens[key] = []
        self.most = max(self.most, len(self.tokens))
        if self.group.step is self:  # a running step looks at its ranks
            self._draw()

    def groups(self) -> list[PromptGroup]:
        return list(self.all.values())

    def finished(self) -> list[tuple[SampleKey, Sample]]:
        if self.group.step is self:
            self._draw()
        fresh, self.fresh = self.fresh, []
        return fresh

    def _draw(self) -> None:
        self.looks += 1
        poisoned = self.looks > 1 and self.group.poison in {key.prompt for key in self.tokens}
        if poisoned or (self.group.fail_at is not None and self.looks >= self.group.fail_at):
            self.group.running, self.group.step = False, None
            self.group.backlog.keep([g for g in self.all.values() if g.step != self.step], {})
            raise RankDied(f"rank 1 of {self.group.node} died", rank=1)
        for key, tokens in list(self.tokens.items()):
            request = self.requests[key]
            if key not in self.aborted:
                tokens.append(token(request.seed, len(tokens)))
                self.drawn += 1
            if key in self.aborted or len(tokens) >= request.sampling["max_tokens"]:
                del self.tokens[key]
                reason = "abort" if key in self.aborted else "length"
                ended = SampleResult(key, tokens, None, None, reason, None, self.group.policy_version, key.sample % 2)
                ended.ended_s, ended.ended_iteration = float(self.looks), self.looks
                self.all[(key.step, key.prompt)].samples[key.sample] = sample = to_sample(ended)
                self.results.append(ended)
                self.fresh.append((key, sample))

    def pieces(self) -> list[Any]:
        streamed = [key for key in self.tokens if self.requests[key].stream]
        return [SamplePiece(key, 0, self.tokens[key], None, None, 0, None) for key in streamed]

    def filled(self) -> None:
        self.told = True
        self.group.log.append(f"filled at {self.looks}")

    def progress(self) -> list[Progress]:
        return [Progress(0, len(self.tokens), "EP", self.drawn, 1.0, 0.1)] * RANKS

    def abort(self) -> None:
        self.aborted |= set(self.tokens)

    def close(self) -> None:
        while self.tokens:
            self._draw()
        self._over()

    def park(self) -> None:
        self.group.backlog.keep([g for g in self.all.values() if g.missing], dict.fromkeys(self.tokens, 0))
        self._over()

    def _over(self) -> None:
        assert self.group.step is self
        self.group.step = None
        numbers = self.report_numbers or {}
        for result in self.results:
            key = result.key
            result.key = key._replace(prompt=numbers.get((key.step, key.prompt), key.prompt))
        iterations = [Iteration(float(i + 1), "EP", 0, 0, 1e3) for i in range(self.looks)]
        parts: list[StepOutcome] = []
        for rank in range(RANKS):
            own = [r for r in self.results if r.rank == rank]
            stats = StepStats(
                rank, RANKS, total_s=float(self.looks), burst_s=float(self.looks), iterations=iterations,
                parked=len(self.tokens) if rank == 0 else 0,
            )  # fmt: skip
            parts.append(StepOutcome(own, stats))
        lengths = {numbers.get((g.step, g.prompt), g.prompt): len(g.ids) for g in self.all.values()}
        self.group.last_report = build_report(
            parts, step=self.step, policy_version=0, model="fake", device="cpu", prompt_tokens=lengths
        )


def folder_of(config: Any, ranks: int) -> Path:
    return Path(config.model)
