"""What a failed weight update means for a group, with stand-ins for the ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius.engine.types import MemoryChange, UpdateStats
from moebius.rollout import group_weights, recovery
from moebius.rollout.backlog import Backlog
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import FailureSettings
from moebius.rollout.group import RolloutGroup
from moebius.rollout.ranks import RankError

SOURCE, ARGS = "a.module:function", [("rank 0",), ("rank 1",)]


class FakeRanks:
    """Answers calls, or raises what it is told to."""

    def __init__(self) -> None:
        self.handles = [object(), object()]
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.closed = False

    def call(self, method: str, args: Any = None, **how: Any) -> list[Any]:
        self.calls.append(method)
        if method in self.failing:
            raise self.failing[method]
        if method in ("pull_update", "commit_update"):
            return [UpdateStats(9, "in_place", 2_000_000_000, 1.0)] * 2
        if method in ("sleep", "wake_up"):
            return [MemoryChange(rank, 100, 90, 0.1) for rank in range(2)]
        return [None, None]

    def submit(self, method: str, args: Any = None) -> dict[Any, int]:
        self.calls.append(method)
        return {}

    def gather(self, refs: Any, **how: Any) -> list[Any]:
        return []

    def close(self, *, gently: bool) -> None:
        self.closed = True


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake = SimpleNamespace(put=lambda bucket: bucket, wait=lambda refs, num_returns, timeout: None)
    monkeypatch.setattr(group_weights, "ray", fake)
    return FakeRanks()


@pytest.fixture
def group(ranks: FakeRanks) -> RolloutGroup:
    group = object.__new__(RolloutGroup)
    vars(group).update(
        config=SimpleNamespace(ranks=2, update_mode="in_place", failures=FailureSettings(on_failure="raise")),
        policy_version=3,
        backlog=Backlog(),
        _ranks=ranks,
        _problem=None,
        _asleep=set(),
        _one_call=threading.Lock(),
        _updated=False,
        _shut_down=False,
    )
    return group


def refused() -> RankError:
    return RankError("rank 1 failed", ValueError("expected shape [3]"), by_all=True)


def test_a_pulled_update(group: RolloutGroup, ranks: FakeRanks) -> None:
    report = group.pull_update(9, SOURCE, ARGS)
    assert ranks.calls == ["pull_update"] and group.policy_version == 9
    assert report is group.last_update and report.nbytes == 2_000_000_000 and report.transport == SOURCE
    assert report.gbps == pytest.approx(2.0 / report.seconds)


@pytest.mark.parametrize("mode", ["in_place", "staged"])
def test_a_failed_update_leaves_the_old_weights_or_asks_for_a_full_one(
    group: RolloutGroup, ranks: FakeRanks, mode: Any
) -> None:
    ranks.failing["pull_update"] = refused()
    with pytest.raises(BadInput, match=r"version 9: expected shape"):
        group.pull_update(9, SOURCE, ARGS, mode=mode)
    assert group.policy_version == 3 and not ranks.closed
    if mode == "staged":
        assert ranks.calls == ["pull_update", "drop_update"]
        assert group._ready() is ranks
    else:
        with pytest.raises(GroupNotReady, match="send a full update"):
            group._ready()
        group._problem = "an older problem"
        with pytest.raises(BadInput):
            group.pull_update(9, SOURCE, ARGS, mode="staged")
        assert group._problem == "an older problem", "a staged update that fails mends nothing"
    ranks.failing.clear()
    group.pull_update(9, SOURCE, ARGS, mode=mode)
    assert group._ready() is ranks


@pytest.mark.parametrize("error", [RankDied("gone", rank=1), RankError("one hangs", ValueError("x"), by_all=False)])
def test_an_update_that_some_ranks_did_not_answer_ends_the_group(
    group: RolloutGroup, ranks: FakeRanks, error: MoebiusError
) -> None:
    ranks.failing["pull_update"] = error
    with pytest.raises(type(error)):
        group.pull_update(9, SOURCE, ARGS, mode="staged")
    assert ranks.closed
    with pytest.raises(GroupNotReady, match=r"restart\(\)"):
        group._ready()


def test_ctrl_c_in_an_update_waits_for_no_new_ranks(
    group: RolloutGroup, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.config.failures = FailureSettings(on_failure="replay")  # type: ignore[misc]
    ranks.failing["drop_update"] = RankDied("gone, too", rank=1)
    recovered: list[Any] = []
    monkeypatch.setattr(group, "recover", lambda *arguments: recovered.append(arguments))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.update_weights(tensors(), 9, mode="staged")
    assert not recovered and ranks.closed and not group.running
    with pytest.raises(GroupNotReady, match=r"gone, too; call restart\(\)"):
        group._ready()


@pytest.mark.parametrize("mode", ["in_place", "staged"])
@pytest.mark.parametrize("error", [RankDied("of another group", rank=0), ZeroDivisionError()])
def test_an_error_of_the_callers_stream_is_no_loss(
    group: RolloutGroup, ranks: FakeRanks, mode: Any, error: Exception
) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise error

    with pytest.raises(type(error)) as raised:
        group.update_weights(tensors(), 9, mode=mode)
    assert raised.value is error and not ranks.closed and group.running
    if mode == "staged":
        assert group._ready() is ranks
    else:
        with pytest.raises(GroupNotReady, match=f"failed .{type(error).__name__}"):
            group._ready()


@pytest.mark.parametrize("transport", ["pigeon", "ipc"])
def test_a_transport_that_there_is_not_changes_nothing(
    group: RolloutGroup, ranks: FakeRanks, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="transport"):
        group.update_weights({"a": torch.ones(2)}, 9, transport=transport)
    assert not ranks.calls and group._ready() is ranks


def test_ranks_that_are_lost_while_an_update_is_given_up_are_replaced(
    group: RolloutGroup, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update's own error is raised all the same; without replacement, the loss is."""
    monkeypatch.setattr(recovery, "connect", lambda config: None)
    fresh = FakeRanks()
    group.losses = []

    def start() -> None:
        group._ranks, group._problem = fresh, None  # type: ignore[assignment]

    group._start = start  # type: ignore[method-assign]
    group.config = SimpleNamespace(ranks=2, update_mode="staged", failures=FailureSettings())  # type: ignore[assignment]
    ranks.failing = {"pull_update": refused(), "drop_update": RankDied("rank 0 ended", rank=0)}
    with pytest.raises(BadInput, match="version 9: expected shape"):
        group.pull_update(9, SOURCE, ARGS)
    assert ranks.closed and group._ready() is fresh and [loss.why for loss in group.losses] == ["rank 0 ended"]
    fresh.failing = {"drop_update": RankDied("rank 0 ended", rank=0)}
    group.config.failures = FailureSettings(on_failure="raise")  # type: ignore[misc]
    group.begin_update(10)
    with pytest.raises(RankDied, match="rank 0 ended"):
        group.drop_update()
    assert fresh.closed and not group.running


def test_an_update_in_parts(group: RolloutGroup, ranks: FakeRanks) -> None:
    with pytest.raises(GroupNotReady, match="no weight update is open"):
        group.pull_tensors(SOURCE, ARGS)
    group.begin_update(9)
    with pytest.raises(GroupNotReady, match="did not complete"):
        group._ready()
    group.pull_tensors(SOURCE, ARGS)
    group.pull_tensors(SOURCE, ARGS)
    assert group.commit_update().version == 9 and group._ready() is ranks
    assert ranks.calls == ["begin_update", "pull_tensors", "pull_tensors", "commit_update"]
    group.begin_update(10, mode="staged")
    ranks.failing["pull_tensors"] = refused()
    with pytest.raises(BadInput):
        group.pull_tensors(SOURCE, ARGS)
    with pytest.raises(GroupNotReady, match="no weight update is open"):
        group.commit_update()
    assert group._ready() is ranks and group.policy_version == 9
    group.begin_update(11)
    group.drop_update()
    with pytest.raises(GroupNotReady, match=r"version 11 failed .*given up"):
        group._ready()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, SOURCE, ARGS), "at least 3, the present"),
        ((True, SOURCE, ARGS), "at least 3"),
        ((4, SOURCE, ARGS[:1]), "one tuple per rank, 2, got 1"),
    ],
)
def test_arguments_that_are_wrong_change_nothing(
    group: RolloutGroup, ranks: FakeRanks, arguments: Any, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        group.pull_update(*arguments)
    with pytest.raises(BadInput, match="'in_place' or 'staged'"):
        group.pull_update(4, SOURCE, ARGS, mode="both")  # type: ignore[arg-type]
    assert not ranks.calls and group._ready() is ranks


def test_functions_on_ranks(group: RolloutGroup, ranks: FakeRanks) -> None:
    assert group.on_ranks(SOURCE, ARGS) == [None, None]
    ranks.failing["call_function"] = refused()
    with pytest.raises(BadInput, match=r"a\.module:function: expected shape"):
        group.on_ranks(SOURCE, ARGS)
    assert group._ready() is ranks


def test_asleep(group: RolloutGroup, ranks: FakeRanks) -> None:
    report = group.sleep()
    assert (report.nbytes, report.freed) == (200, 180)
    with pytest.raises(GroupNotReady, match="memory of kv_cache and weights was given back"):
        group._ready()
    with pytest.raises(GroupNotReady, match="memory of weights was given back"):
        group.pull_update(9, SOURCE, ARGS)
    group.wake_up(["weights"])
    with pytest.raises(GroupNotReady, match="memory of kv_cache was given back"):
        group._ready()
    group.pull_update(9, SOURCE, ARGS)
    group.wake_up()
    assert group._ready() is ranks
    group.sleep(["weights"], keep_weights=True)
    group.wake_up()
    assert group._ready() is ranks, "kept weights are whole"
    group.sleep("weights")  # type: ignore[arg-type]
    group.wake_up()
    with pytest.raises(GroupNotReady, match="send them with update_weights"):
        group._ready()
    with pytest.raises(BadInput, match="unknown tag 'kv'"):
        group.sleep(["kv"])  # type: ignore[list-item]


def test_memory_that_cannot_be_given_back_is_no_loss(group: RolloutGroup, ranks: FakeRanks) -> None:
    ranks.failing["sleep"] = RankError("rank 0 failed", RuntimeError("BackingError: it stays"), by_all=True)
    with pytest.raises(RankError):
        group.sleep()
    assert group._ready() is ranks
    ranks.failing["sleep"] = RankError("rank 0 failed", RuntimeError("CudaError: odd"), by_all=True)
    with pytest.raises(RankError):
        group.sleep()
    assert ranks.closed


@pytest.mark.parametrize("kind", ["RequestRefused", "PolicyRefused"])
def test_a_step_that_all_ranks_refuse_is_bad_input(group: RolloutGroup, kind: str) -> None:
    told = RuntimeError(f"{kind}: the predictive policy needs calibrated costs")
    found = group.refusal(RankError("x", told, by_all=True), 5)
    assert isinstance(found, BadInput) and "step 5" in str(found) and "costs" in str(found)
    assert group.refusal(RankError("x", told, by_all=False), 5) is None
    assert group.refusal(RankError("x", RuntimeError("SwitchError: lost"), by_all=True), 5) is None
