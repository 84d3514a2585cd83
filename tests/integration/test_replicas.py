"""Several switch groups with real engines: two of two CPU ranks each on a Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo import load_weights
from moebius.rollout.demo_assets import make_tiny_model
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.group import RolloutGroup
from moebius.rollout.replicas import RolloutReplicas
from moebius.rollout.transports.ray_collective import NODE as NODE_OF
from moebius.rollout.transports.ray_collective import RayBroadcaster
from moebius.rollout.types import LengthTrace, Rollout, Sampling
from tests.integration.warm import Warm

PROMPTS = [[5 + i, 6, 7 + i] for i in range(10)]
N = 2
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 128 << 20}
LENGTHS = LengthTrace({(p, s): 3 + (11 * p + 7 * s) % 40 for p in range(10) for s in range(N)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module", autouse=True)
def cluster(warm: Warm) -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    nodes.add_node(**NODE)
    ray.init(address=nodes.address, log_to_driver=False, runtime_env=warm.runtime_env)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def settings(model: Path, replicas: int) -> RolloutConfig:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=3,  # six samples of a replica at once: others wait in the queue
        kv_cache_bytes=16 << 20,
        enforce_eager=True,
        policy=PolicyConfig(kind="rollout", threshold=3),
    )
    return RolloutConfig(
        ranks=2, replicas=replicas, device="cpu", engine=engine, sampling=Sampling(max_tokens=90, seed=0)
    )


def tokens(rollouts: list[Rollout]) -> list[Any]:
    return [[sample.token_ids for sample in rollout.samples] for rollout in rollouts]


def test_two_replicas_on_two_nodes(model: Path, tmp_path: Path) -> None:
    with RolloutGroup(settings(model, 1)) as group:
        expected = tokens(group.generate(PROMPTS, N, step=2, lengths=LENGTHS))
    with RolloutReplicas(settings(model, 2)) as replicas:
        assert len(set(replicas.pids())) == 4
        _draw_together(replicas, expected, tmp_path)
        _update(replicas, model)
        _update_by_rays_collectives(replicas, model)
        _lose_one(replicas, expected, model)


def _draw_together(replicas: RolloutReplicas, expected: list[Any], out: Path) -> None:
    found = replicas.generate(PROMPTS, N, step=2, lengths=LENGTHS)
    assert tokens(found) == expected
    assert all(len({sample.rank // 2 for sample in rollout.samples}) == 1 for rollout in found)
    report = replicas.last_report
    assert report is not None
    assert len({lane.node for lane in report.lanes}) == 2, "spread over the nodes"
    assert report.ranks == 4 and report.startup is not None and len(report.startup) == 4
    assert sum(lane.later for lane in report.lanes) > 0, "taken from the queue while the step ran"
    assert report.counts.samples == 20 and report.sample_times is not None
    # Each group switched for its own tail, and only when nothing was left to come for it.
    assert [s.to for s in report.switches] == ["TP", "TP"]
    assert sorted(s.replica or 0 for s in report.switches) == [0, 1]
    assert sum(p.tokens for p in report.timeline) == report.counts.output_tokens


def _update(replicas: RolloutReplicas, model: Path) -> None:
    weights = load_weights(model)
    before = tokens(replicas.generate(PROMPTS[:4], 1, step=9))
    report = replicas.update_weights({name: tensor * 0.5 for name, tensor in weights.items()}, 1, bucket_bytes=1 << 18)
    assert report.nbytes == sum(tensor.nbytes for tensor in weights.values())
    changed = replicas.generate(PROMPTS[:4], 1, step=9)
    assert tokens(changed) != before
    assert {sample.policy_version for rollout in changed for sample in rollout.samples} == {1}
    replicas.update_weights(weights, 2)
    assert tokens(replicas.generate(PROMPTS[:4], 1, step=9)) == before


def _update_by_rays_collectives(replicas: RolloutReplicas, model: Path) -> None:
    class Trainer:  # by value: the workers do not have this module
        def begin(self, nodes: list[str]) -> None:
            from moebius.rollout.transports.ray_collective import RayBroadcaster

            self.weights = RayBroadcaster(nodes, bucket_bytes=1 << 18, timeout_s=60)

        def offer(self, folder: str, factor: float) -> Any:
            from pathlib import Path

            from moebius.rollout.demo import load_weights

            return self.weights.offer((name, factor * tensor) for name, tensor in load_weights(Path(folder)).items())

        def spoil(self) -> Any:
            return self.weights.offer({"no.such.weight": __import__("torch").ones(3)})

        def cancel(self) -> None:
            self.weights.cancel()

        def close(self) -> None:
            self.weights.close()

    before = tokens(replicas.generate(PROMPTS[:4], 1, step=9))
    nodes = replicas.on_ranks(NODE_OF, [()] * 4)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    trainer: Any = ray.remote(Trainer).options(num_cpus=0).remote()
    ray.get(trainer.begin.remote(nodes))
    replicas.pull_update(5, *ray.get(trainer.offer.remote(str(model), 0.5)))
    assert tokens(replicas.generate(PROMPTS[:4], 1, step=9)) != before
    source, args = ray.get(trainer.spoil.remote())
    with pytest.raises(BadInput, match=r"no\.such\.weight"):
        replicas.pull_update(6, source, args)
    source, args = ray.get(trainer.offer.remote(str(model), 1.0))
    with pytest.raises(BadInput, match="at least 5"):
        replicas.pull_update(4, source, args)  # nobody reads it: given up, it keeps nobody waiting
    ray.get(trainer.cancel.remote(), timeout=30)
    replicas.pull_update(6, *ray.get(trainer.offer.remote(str(model), 1.0)))
    ray.get(trainer.close.remote())
    ray.kill(trainer)
    assert tokens(replicas.generate(PROMPTS[:4], 1, step=9)) == before
    with pytest.raises(BadInput, match="only within a Ray actor or task"):
        RayBroadcaster(nodes)


def _lose_one(replicas: RolloutReplicas, expected: list[Any], model: Path) -> None:
    victim = replicas.pids()[-1]
    dead = False

    def kill(done: int, total: int, now: int, live: int, layout: str) -> None:
        nonlocal dead
        if not dead:
            os.kill(victim, signal.SIGKILL)
            dead = True

    assert tokens(replicas.generate(PROMPTS, N, step=2, lengths=LENGTHS, on_progress=kill)) == expected
    report = replicas.last_report
    assert report is not None and dead
    assert [lane.lost is not None for lane in report.lanes] == [False, True]
    deadline = time.monotonic() + 120
    while replicas._members[1].reviving is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert replicas.in_service == [0], "it holds the checkpoint's weights"
    replicas.update_weights(load_weights(model), 7)
    assert replicas.in_service == [0, 1]
    assert tokens(replicas.generate(PROMPTS, N, step=2, lengths=LENGTHS)) == expected


def test_no_room_for_all(model: Path) -> None:
    with pytest.raises(MoebiusError, match="3 replicas of 2 ranks cannot be placed: each needs 2 CPU on one node"):
        RolloutReplicas(settings(model, 3))
