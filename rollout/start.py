"""One switch group or several, as the configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from moebius.rollout.group import RolloutGroup
    from moebius.rollout.replicas import RolloutReplicas

    AnyGroup = RolloutGroup | RolloutReplicas


def start_group(config: RolloutConfig) -> AnyGroup:
    """A RolloutGroup, or RolloutReplicas if `config.replicas` is above 1. Raises as these."""
    if config.replicas > 1:
        from moebius.rollout.replicas import RolloutReplicas

        return RolloutReplicas(config)
    from moebius.rollout.group import RolloutGroup

    return RolloutGroup(config)
