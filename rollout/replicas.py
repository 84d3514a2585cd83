"""RolloutReplicas: several switch groups behind the calls of one."""

from __future__ import annotations

from types import TracebackType

from moebius.rollout.replica_steps import ReplicaSteps
from moebius.rollout.replica_weights import ReplicaWeights

__all__ = ["RolloutReplicas"]


class RolloutReplicas(ReplicaSteps, ReplicaWeights):
    """`config.replicas` started switch groups, used as one RolloutGroup. One call at a time; only `abort` and
    `shutdown` may come from another thread. docs/replicas.md explains it.

    Samples are those of a single group: seeds depend on step, prompt and sample alone. A replica that loses a rank
    takes none of the others down: they go on with its prompts, and it is started again meanwhile.

    Raises as RolloutGroup; MoebiusError also when the cluster has no room for all replicas.
    """

    def __enter__(self) -> RolloutReplicas:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
