"""A group that samples without an engine, for the service's own logic: every look at it draws a token of each sample.

Tokens are a function of the sample's seed and their position, as a real group's. What it leaves out: ranks, switches,
weights. Samples can be held (no tokens) and the group can be made to lose its step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moebius.engine.config import EngineConfig
from moebius.engine.types import SampleKey, SamplePiece
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import Loss
from moebius.rollout.types import Sample, Sampling
from moebius.rollout.worker import Progress


def token(seed: int, position: int) -> int:
    return (seed // 7 + 31 * position) % 1_000_003


class FakeGroup:
    def __init__(self) -> None:
        engine = EngineConfig(model="fake")
        self.config = RolloutConfig(ranks=2, engine=engine, sampling=Sampling(max_tokens=4))
        self.policy_version = 0
        self.max_model_len, self.has_tokenizer, self.device = 256, False, "cpu"
        self.running, self.closed, self.gave_up = True, False, False
        self.last_report: Any = None
        self.problem: str | None = None  # why steps cannot be opened
        self.hold = False  # nothing is sampled
        self.fail_next: Exception | None = None
        self.parked: dict[SampleKey, list[Any]] = {}  # [seed, tokens so far, most tokens, stream]
        self.log: list[str] = []
        self.step: FakeStep | None = None
        self.next_step = 0
        self.open_update: int | None = None

    def requests_of(
        self, prompts: Any, n: int, sampling: Sampling, step: int, first: int
    ) -> tuple[list[Any], list[Any]]:
        for prompt in prompts:
            if not prompt:
                raise BadInput("prompt 0 is empty")
            if isinstance(prompt, str):
                raise BadInput("texts need a tokenizer")
        return [], [list(prompt) for prompt in prompts]

    def open_step(self, step: int | None = None, expected: int | None = None, replay: bool | None = None) -> FakeStep:
        if self.problem is not None:
            raise GroupNotReady(self.problem)
        if not self.running:
            raise GroupNotReady("a rank died; call restart()")
        assert self.step is None, "another call is running"
        self.step = FakeStep(self, self.next_step if step is None else step, expected)
        self.log.append(f"open {self.step.step} expected {expected}")
        self.log += ["no replay"] if replay is False else []
        return self.step

    @property
    def tokenizer(self) -> Any:
        raise BadInput("there is no tokenizer")

    def abort(self, keys: list[SampleKey]) -> None:
        assert self.step is not None
        self.step.aborted |= set(keys)

    def abort_parked(self, keys: list[SampleKey] | None = None) -> list[tuple[SampleKey, Sample]]:
        assert self.step is None
        wanted = list(self.parked) if keys is None else [key for key in keys if key in self.parked]
        return [(key, sample_of(key, self.parked.pop(key)[1], "abort", self.policy_version)) for key in wanted]

    def update_weights(self, tensors: Any, version: int) -> Any:
        assert self.step is None, "between steps only"
        self.log.append(f"update {version}")
        self.policy_version, self.problem = version, None
        return SimpleNamespace(version=version, seconds=0.1)

    def reset_prefix_cache(self) -> None:
        assert self.step is None, "between steps only"
        self.log.append("reset")

    def sleep(self, tags: Any, keep_weights: bool) -> None:
        assert self.step is None, "between steps only"
        self.log.append(f"sleep {' '.join(tags)} keep {keep_weights}")

    def wake_up(self, tags: Any) -> None:
        self.log.append("wake")

    def on_ranks(self, source: str, args: Any) -> list[Any]:
        assert self.step is None, "between steps only"
        self.log.append(f"call {source} {args}")
        return [None] * len(args)

    def begin_update(self, version: int) -> None:
        assert self.step is None, "between steps only"
        self.open_update = version

    def pull_tensors(self, source: str, args: Any) -> None:
        self._opened()
        self.log.append(f"pull {args}")

    def commit_update(self) -> Any:
        self.policy_version, self.open_update = self._opened(), None
        return SimpleNamespace(version=self.policy_version, seconds=0.1)

    def drop_update(self) -> None:
        self.open_update = None

    def _opened(self) -> int:
        if self.open_update is None:
            raise GroupNotReady("no weight update is open")
        return self.open_update

    def restart(self) -> None:
        assert self.step is None
        self.log.append("restart")
        self.running = True

    def lose(self) -> None:
        self.fail_next = RankDied("rank 1 died", rank=1)


def sample_of(key: SampleKey, tokens: list[int], reason: str, version: int) -> Sample:
    logprobs = [-0.5] * len(tokens)
    return Sample(key.sample, tokens, logprobs, None, "".join(f"{t}," for t in tokens), reason, None, version, 0)


class FakeStep:
    def __init__(self, group: FakeGroup, step: int, expected: int | None) -> None:
        self.group, self.step, self.expected = group, step, expected
        self.live: dict[SampleKey, list[Any]] = dict(group.parked)
        group.parked.clear()
        self.prompts = self.submitted = 0
        self.aborted: set[SampleKey] = set()
        self.told: list[SamplePiece] = []
        self.ready: list[tuple[SampleKey, Sample]] = []
        self.losses: list[Loss] = []

    def submit(self, prompts: Any, n: int, sampling: Sampling, *, seeds: Any, stream: bool) -> list[int]:
        self._check()
        numbers = []
        for prompt, own in zip(prompts, seeds, strict=True):
            assert prompt and len(own) == n
            for sample in range(n):
                self.live[SampleKey(self.prompts, sample, self.step)] = [own[sample], [], sampling.max_tokens, stream]
            numbers.append(self.prompts)
            self.prompts += 1
            self.submitted += n
        if self.expected is not None and self.submitted >= self.expected:
            self.filled()
        return numbers

    def _check(self) -> None:
        if self.group.fail_next is not None:
            error, self.group.fail_next = self.group.fail_next, None
            self.group.running, self.group.step = False, None
            raise error

    def finished(self) -> list[tuple[SampleKey, Sample]]:
        ready, self.ready = self.ready, []
        if self.group.step is not self:
            return ready
        self._check()
        for key, (seed, tokens, most, stream) in list(self.live.items()):
            if not self.group.hold and key not in self.aborted:
                tokens.append(token(seed, len(tokens)))
                if stream:
                    # From its first character on, as after a move to another rank.
                    text = "".join(f"{t}," for t in tokens)
                    self.told.append(SamplePiece(key, len(tokens) - 1, tokens[-1:], [-0.5], None, 0, text))
            if key in self.aborted or len(tokens) >= most:
                del self.live[key]
                reason = "abort" if key in self.aborted else "length"
                ready.append((key, sample_of(key, tokens, reason, self.group.policy_version)))
        return ready

    def pieces(self) -> list[SamplePiece]:
        told, self.told = self.told, []
        return told

    def expect(self, more: int | None) -> None:
        self.expected = None if more is None else self.submitted + more
        self.group.log.append(f"expect {more}")

    def filled(self) -> None:
        self.expected = None
        self.group.log.append("filled")

    def progress(self) -> list[Progress]:
        return [Progress(0, len(self.live), "TP", 0, 2.0, 0.25)]

    def park(self) -> None:
        self._check()
        self.group.parked = dict(self.live)
        self._over("park")

    def close(self) -> None:
        self._check()
        if self.live:
            raise MoebiusError("closed with live samples")
        self._over("close")

    def _over(self, how: str) -> None:
        self.live.clear()
        self.group.step = None
        self.group.next_step = self.step + 1
        self.group.log.append(f"{how} {self.step}")
        switch = SimpleNamespace(
            to="TP", pause_ms=3.0, phases_ms=SimpleNamespace(model_dump=lambda by_alias: {"kv": 1.0})
        )
        self.group.last_report = SimpleNamespace(
            step=self.step, samples=self.submitted, switches=[switch], cancelled=[]
        )
