"""Replicas from their start to new weights: all of them, or none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, RankDied, validate
from moebius.rollout.replicas import RolloutReplicas
from tests.unit.replica_group import FakeGroup, FakeHomes, settings
from tests.unit.replica_world import PROMPTS, Make, fake, tensors, until


def test_one_replica_that_cannot_start_ends_the_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FakeGroup] = []

    class Some(FakeGroup):
        def __init__(self, config: RolloutConfig) -> None:
            super().__init__(config)
            if self.node == "node-1":
                raise MoebiusError("out of memory")
            started.append(self)

    group: Any = Some
    with pytest.raises(MoebiusError, match="out of memory"):
        RolloutReplicas(settings(3), FakeHomes, group)
    assert len(started) == 2 and all(group.closed for group in started)


def test_place_is_for_one_group() -> None:
    values = {"ranks": 2, "replicas": 2, "engine": {"model": "m"}, "place": {"devices": ["0", "1"]}}
    with pytest.raises(BadInput, match="leave it out with replicas > 1"):
        validate(RolloutConfig, values, "settings")


def test_weights_go_to_all_replicas(make: Make) -> None:
    replicas = make(3)
    report = replicas.update_weights(tensors(), 7, bucket_bytes=8)
    assert report.version == replicas.policy_version == 7
    for index in range(3):
        assert fake(replicas, index).policy_version == 7
        assert sum(line.startswith("pull") for line in fake(replicas, index).log) == 3
    with pytest.raises(BadInput, match="at least 7"):
        replicas.update_weights(tensors(), 6)
    with pytest.raises(BadInput, match="reaches only ranks of its own host"):
        replicas.update_weights(tensors(), 8, transport="ipc")


def test_a_failed_update_is_given_up_everywhere(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 1).fail_update = BadInput("unknown weight 'x'")
    with pytest.raises(BadInput, match="unknown weight"):
        replicas.update_weights(tensors(), 1)
    assert replicas.policy_version == 0
    with pytest.raises(GroupNotReady, match="send a full update"):
        replicas.generate(PROMPTS, 2)
    fake(replicas, 1).fail_update = None
    replicas.update_weights(tensors(), 1)
    assert replicas.generate(PROMPTS, 2)


def test_a_replica_lost_in_an_update_waits_for_the_next(make: Make) -> None:
    replicas = make(2)
    replicas.update_weights(tensors(), 1)
    fake(replicas, 1).fail_update = RankDied("rank 0 died")
    replicas.update_weights(tensors(), 2)
    fake(replicas, 1).fail_update = None
    until(lambda: replicas._members[1].reviving is None)
    assert replicas.in_service == [0]
    assert "waits for a weight update" in replicas._members[1].why_not
    assert len(replicas.generate(PROMPTS, 2)) == 12
    replicas.update_weights(tensors(), 3)
    assert replicas.in_service == [0, 1]


@pytest.mark.parametrize("told", [True, False])
def test_an_update_in_parts_goes_on_without_a_replica_that_is_back_by_now(make: Make, told: bool) -> None:
    replicas = make(2)
    args: list[Any] = [()] * 4
    replicas.begin_update(1)
    replicas.pull_tensors("a:b", args)
    group = fake(replicas, 1)
    group.running, group.open_update = False, None  # between two calls
    if told:
        replicas.reset_prefix_cache()  # which finds the loss
        until(lambda: replicas._members[1].reviving is None and group.running)
    replicas.pull_tensors("a:b", args)
    assert replicas.commit_update().version == 1
    until(lambda: replicas._members[1].reviving is None)
    assert group.policy_version == 0 and replicas.in_service == [0] and group.running
    replicas.update_weights(tensors(), 2)
    assert replicas.in_service == [0, 1]


def test_an_update_in_parts_whose_replicas_are_all_lost(make: Make) -> None:
    replicas = make(1)
    replicas.begin_update(1)
    fake(replicas, 0).running, fake(replicas, 0).open_update = False, None
    replicas._revive_lost()
    until(lambda: replicas._members[0].reviving is None)
    with pytest.raises(GroupNotReady, match="are all lost: send it again"):
        replicas.pull_tensors("a:b", [()] * 2)
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0]


@pytest.mark.parametrize("keep", [False, True])
def test_a_replica_that_comes_back_sleeps_as_the_others_do(make: Make, keep: bool) -> None:
    replicas = make(2)
    replicas.sleep(keep_weights=keep)
    fake(replicas, 1).running = False
    replicas.reset_prefix_cache()
    until(lambda: replicas._members[1].reviving is None and fake(replicas, 1).running)
    assert fake(replicas, 1).log == [f"sleep kv_cache weights {keep}", "restart", f"sleep kv_cache weights {keep}"]
    replicas.wake_up()
    assert fake(replicas, 1).log[-1] == "wake_up"
    assert (fake(replicas, 1).problem is None) == keep, "kept weights are whole"


@pytest.mark.parametrize("kept", [False, True])
def test_a_replica_that_is_back_before_the_commit_holds_older_weights(make: Make, kept: bool) -> None:
    """Also in the first update, before which all hold the checkpoint's, and with weights kept for restarts."""
    replicas = make(2)
    group = fake(replicas, 1)
    if kept:
        replicas.update_weights(tensors(), 1)
        restart = group.restart

        def with_weights() -> None:
            restart()
            group.problem = None

        group.restart = with_weights

    def slowly() -> Iterator[tuple[str, Any]]:
        yield from tensors().items()
        until(lambda: "restart" in group.log and replicas._members[1].reviving is None)

    group.fail_update = RankDied("rank 0 died")
    replicas.update_weights(slowly(), 1, bucket_bytes=8)  # the same number, other weights
    assert replicas.in_service == [0] and group.running
    assert "waits for a weight update" in replicas._members[1].why_not
    group.fail_update = None
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0, 1]


def test_what_was_wrong_with_a_bucket_is_told_however_late(make: Make) -> None:
    replicas = make(2)
    fake(replicas, 1).fail_update = BadInput("unknown weight 'x'")

    def slowly() -> Iterator[tuple[str, Any]]:
        for pair in tensors().items():
            yield pair
            time.sleep(0.05)  # the bucket before has failed when this one is sent

    with pytest.raises(BadInput, match="unknown weight"):
        replicas.update_weights(slowly(), 1, bucket_bytes=8)


def test_replicas_that_have_committed_what_others_have_not_wait_for_the_next_update(make: Make) -> None:
    replicas = make(2)

    def refuse() -> Any:
        raise BadInput("weights are missing")

    commit, fake(replicas, 1).commit_update = fake(replicas, 1).commit_update, refuse
    with pytest.raises(BadInput, match="missing"):
        replicas.update_weights(tensors(), 1)
    fake(replicas, 1).problem = None  # a staged one: the old weights serve on
    assert {s.rank // 2 for rollout in replicas.generate(PROMPTS, 2) for s in rollout.samples} == {1}
    assert replicas.in_service == [1]
    fake(replicas, 1).commit_update = commit
    replicas.update_weights(tensors(), 1)
    assert replicas.in_service == [0, 1]


def test_every_rank_gets_its_own_arguments(make: Make) -> None:
    replicas = make(2)
    replicas.pull_update(4, "a:b", [(i,) for i in range(4)])
    assert [line for i in range(2) for line in fake(replicas, i).log] == ["pull [(0,), (1,)]", "pull [(2,), (3,)]"]
    with pytest.raises(BadInput, match="all replicas, 4, got 2"):
        replicas.pull_update(5, "a:b", [(0,), (1,)])
