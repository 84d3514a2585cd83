"""How a group comes back after losses; no Ray, no engine."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout import group_life, recovery
from moebius.rollout.backlog import Backlog, PromptGroup, homeless_requests
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied
from moebius.rollout.failure_types import FailureSettings, pause_s
from moebius.rollout.group import RolloutGroup
from moebius.rollout.ranks import RankError

DIED = RankDied("rank 1 ended during step 4\n  | last words", rank=1, step=4, phase="prefill")


class FakeRanks:
    def __init__(self) -> None:
        self.closed = False
        self.pulled: list[Any] = []
        self.failing: Exception | None = None

    def call(self, method: str, args: Any = None, **how: Any) -> list[Any]:
        assert method == "pull_update"
        if self.failing:
            raise self.failing
        self.pulled.append(args[0])
        return [None, None]

    def close(self, *, gently: bool) -> None:
        self.closed = True


class Group(RolloutGroup):
    """Ranks start in no time, or not at all."""

    def __init__(self, **failures: Any) -> None:
        self.config: Any = SimpleNamespace(ranks=2, failures=FailureSettings(**failures))
        self.policy_version, self.backlog = 3, Backlog()
        self.ranks = [FakeRanks()]
        self._ranks: Any = self.ranks[0]
        self._problem, self._updated, self._shut_down = None, False, False
        self._one_call = threading.Lock()
        self.losses, self.gave_up, self._asleep = [], False, set()
        self.refusing: list[Exception] = []  # of starts

    def _start(self) -> None:
        if self.refusing:
            raise self.refusing.pop(0)
        self.ranks.append(FakeRanks())
        self._ranks, self._problem = self.ranks[-1], None


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "connect", lambda config: None)
    monkeypatch.setattr(recovery, "pause_s", lambda failed: 0.01 * failed)


def test_new_ranks_with_the_checkpoint() -> None:
    group = Group()
    assert group.recover(group.ranks[0], DIED, "step 4") is group.ranks[1]
    assert group.ranks[0].closed and group._ready() is group.ranks[1]
    [loss] = group.losses
    assert (loss.during, loss.rank, loss.phase) == ("step 4", 1, "prefill")
    assert loss.why == "rank 1 ended during step 4" and loss.seconds >= 0


def test_with_raise_the_group_waits_for_restart() -> None:
    group = Group(on_failure="raise")
    with pytest.raises(RankDied) as death:
        group.recover(group.ranks[0], DIED, "step 4")
    assert death.value is DIED and group.ranks[0].closed and not group.running
    with pytest.raises(GroupNotReady, match=r"rank 1 ended during step 4; call restart\(\)"):
        group._ready()
    group.restart()
    assert group._ready() is group.ranks[1]


def test_weights_that_nobody_kept_are_asked_for() -> None:
    group = Group()
    group._updated = True
    with pytest.raises(RankDied, match=r"policy version 3 is lost with the ranks: call restart.*keep_weights") as death:
        group.recover(group.ranks[0], DIED, "step 4")
    assert (death.value.rank, death.value.step, death.value.phase) == (1, 4, "prefill")
    assert "last words" in str(death.value) and len(group.ranks) == 1, "no start for nothing"
    group.restart()
    with pytest.raises(GroupNotReady, match="holds the checkpoint's weights, not policy version 3"):
        group._ready()


def test_kept_weights_are_read_by_the_new_ranks() -> None:
    group = Group()
    group._updated, group._kept = True, "/dev/shm/kept-1"
    group.recover(group.ranks[0], DIED, "step 4")
    assert group.ranks[1].pulled == [(3, "moebius.rollout.kept:read_kept", ("/dev/shm/kept-1", 2), "in_place")]
    group.restart()
    assert group._ready() is group.ranks[2] and group.ranks[2].pulled


def test_kept_weights_that_are_gone() -> None:
    """The error says what is missing; the ranks are there, and an update mends them."""
    group = Group()
    group._updated, group._kept = True, "/dev/shm/kept-1"
    start = group._start

    def start_and_fail() -> None:
        start()
        group.ranks[-1].failing = RankError("rank 0 failed", ValueError("cannot be read"), by_all=True)

    group._start = start_and_fail  # type: ignore[method-assign]
    with pytest.raises(RankDied, match="holds the checkpoint's weights, not policy version 3; send them"):
        group.recover(group.ranks[0], DIED, "step 4")
    assert group.running and group._kept is None


def test_a_callback_sends_weights() -> None:
    group = Group()
    group._updated = True
    calls: list[int] = []

    def on_restart() -> None:
        with group._exclusively("update_weights"):  # as it does, though a call is running
            calls.append(group.policy_version)
            group._problem = None

    group.on_restart = on_restart
    with group._exclusively("generate"):
        group.recover(group.ranks[0], DIED, "step 4")
        with pytest.raises(MoebiusError, match="another call is running"), group._exclusively("sleep"):
            pass
    assert calls == [3]
    group.on_restart = lambda: None
    with pytest.raises(RankDied, match="send them with update_weights"):
        group.recover(group.ranks[1], DIED, "step 4")


def test_an_error_of_the_callback_is_the_callers() -> None:
    group = Group()

    def on_restart() -> None:
        raise ZeroDivisionError

    group.on_restart = on_restart
    with pytest.raises(ZeroDivisionError):
        group.recover(group.ranks[0], DIED, "step 4")


def test_ranks_that_live_are_not_started_again_because_the_callback_fails() -> None:
    group = Group()

    def on_restart() -> None:
        raise MoebiusError("weights were not sent")

    group.on_restart = on_restart
    with pytest.raises(MoebiusError, match="weights were not sent"):
        group.recover(group.ranks[0], DIED, "step 4")
    assert len(group.ranks) == 2 and group.running


def test_starts_are_tried_again_and_not_for_ever() -> None:
    group = Group(max_restarts=3)
    group.refusing = [MoebiusError("no room"), MoebiusError("no room")]
    assert group.recover(group.ranks[0], DIED, "step 4") is group.ranks[1]
    with pytest.raises(RankDied, match=r"3 restarts without a step that ended well .*; call restart\(\)"):
        group.recover(group.ranks[1], DIED, "step 4")
    assert group.gave_up and not group.running
    group.restart()
    assert not group.gave_up
    group.refusing = [MoebiusError(f"no room {i}; its log is x\n  | y") for i in range(3)]
    with pytest.raises(RankDied, match=r"max_restarts\), the last start failed: no room 2; call restart\(\)"):
        group.recover(group.ranks[2], DIED, "step 4")


def test_what_this_process_finds_wrong_is_final_and_what_ranks_find_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's ValueError is bad input at the first start; later the same settings have started ranks before."""
    group = Group()
    group.refusing = [BadInput("ray_address: nobody there")]
    with pytest.raises(BadInput, match="nobody there"):
        group.recover(group.ranks[0], DIED, "step 4")

    refused = RankError("rank 0 failed", ValueError("memory is not free yet"), by_all=True)
    started: list[Any] = []

    def start(config: Any, device: str) -> Any:
        started.append(config)
        raise refused

    monkeypatch.setattr(group_life.Ranks, "start", start)
    fresh: Any = object.__new__(RolloutGroup)
    fresh.config, fresh.device, fresh.startup = group.config, "cpu", []
    with pytest.raises(BadInput, match="rank 0 failed"):
        RolloutGroup._start(fresh)
    fresh.startup = [object()]
    with pytest.raises(RankError):
        RolloutGroup._start(fresh)

    again = Group(max_restarts=3)
    again.refusing = [refused, refused]
    assert again.recover(again.ranks[0], DIED, "step 4") is again.ranks[1]


def test_a_shutdown_ends_the_pause_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "pause_s", lambda failed: 60.0 * failed)
    group = Group()
    group.refusing = [MoebiusError("no room")] * 5
    threading.Timer(0.2, group.shutdown).start()
    begun = time.monotonic()
    with pytest.raises(GroupNotReady, match="shut down"):
        group.recover(group.ranks[0], DIED, "step 4")
    assert time.monotonic() - begun < 20


def test_pauses_grow_and_end() -> None:
    assert [pause_s(failed) for failed in (0, 1, 2, 3, 9)] == [0, 1, 2, 4, 30]


def test_a_group_that_was_shut_down_does_not_come_back() -> None:
    group = Group()
    group._ranks, group._problem = None, "the group was shut down; restart() it or make a new one"
    with pytest.raises(GroupNotReady, match="shut down"):
        group.recover(group.ranks[0], DIED, "step 4")
    assert len(group.ranks) == 1


def test_a_shutdown_while_ranks_start_ends_them_too() -> None:
    group = Group()
    start = group._start

    def start_slowly() -> None:
        other = threading.Thread(target=group.shutdown)
        other.start()
        other.join()
        start()

    group._start = start_slowly  # type: ignore[method-assign]
    with pytest.raises(GroupNotReady, match="shut down"):
        group.recover(group.ranks[0], DIED, "step 4")
    assert [ranks.closed for ranks in group.ranks] == [True, True] and not group.running and group.closed
    group._start = start  # type: ignore[method-assign]
    group.restart()
    assert group.running and not group.closed


def test_what_was_parked_is_drawn_anew_after_a_shutdown_and_a_restart() -> None:
    group = Group()
    request = SampleRequest(SampleKey(0, 0, 2), [1], {}, 5)
    parked = PromptGroup(2, 0, [1], {0: request})
    group.backlog.keep([parked], {request.key: 1})
    group.shutdown()
    group.restart()
    assert homeless_requests(group.backlog.take()) == [request]


def test_kept_weights_move_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that owns them is on the ranks' machine."""
    made: list[str] = []
    ended: list[str] = []

    class Actor:
        def __init__(self, node: str) -> None:
            made.append(node)
            self.new_set = SimpleNamespace(remote=lambda kept: f"{node}-1")
            self.close = SimpleNamespace(remote=lambda: ended.append(node))

    def remote(kind: type) -> Any:
        return SimpleNamespace(options=lambda **o: SimpleNamespace(remote=lambda: Actor(o["scheduling_strategy"])))

    fake = SimpleNamespace(
        remote=remote, get=lambda found, timeout: found, wait=lambda refs, timeout: None, is_initialized=lambda: True,
        kill=lambda actor, no_restart: None, exceptions=SimpleNamespace(RayError=RuntimeError),
    )  # fmt: skip
    monkeypatch.setattr(recovery, "ray", fake)
    monkeypatch.setattr(recovery, "on_node", lambda node: node)
    group = Group(keep_weights="host")
    on = [SimpleNamespace(hosts=[SimpleNamespace(node=node)]) for node in "aab"]
    assert [group._new_set(ranks) for ranks in on] == ["a-1", "a-1", "b-1"]  # type: ignore[arg-type]
    assert made == ["a", "b"] and ended == ["a"]


def test_a_call_that_does_not_go_on() -> None:
    group = Group()
    told = group.after_loss(group.ranks[0], DIED, "the update to version 4")
    assert "the ranks were started again and hold policy version 3" in str(told) and isinstance(told, RankDied)
    assert group._ready() is group.ranks[1]
    group._updated = True
    told = group.after_loss(group.ranks[1], DIED, "the update to version 4")
    assert "holds the checkpoint's weights, not policy version 3; send them" in str(told) and group.running
    group = Group(on_failure="raise")
    assert group.after_loss(group.ranks[0], DIED, "x") is DIED and not group.running
