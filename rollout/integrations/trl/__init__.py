"""TRL 1.16: a `rollout_func` over a switch group. Its server mode needs nothing of ours but `moebius serve`.

docs/trl.md.
"""

from moebius.rollout.integrations.trl.rollouts import GroupRollouts

__all__ = ["GroupRollouts"]
