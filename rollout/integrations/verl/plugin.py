"""What verl imports at start, through the entry-point group `verl.plugins`: it makes the name known, and no more.

verl swallows an error in a plug-in. So nothing here may fail on its own account: whatever is wrong is kept, and said
when the rollout is asked for.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from verl.workers.rollout import base as _base
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "moebius"
VERL_VERSION = "0.9.1"


def load_replica() -> type[Any]:
    """The replica class, imported when it is asked for. Raises MoebiusError for another verl."""
    from moebius.rollout.errors import MoebiusError

    found = version("verl")
    if found != VERL_VERSION:
        raise MoebiusError(
            f"rollout.name={NAME} works with verl {VERL_VERSION}, but {found} is installed: "
            f"pip install verl=={VERL_VERSION}"
        )
    from moebius.rollout.integrations.verl.replica import MoebiusReplica

    return MoebiusReplica


RolloutReplicaRegistry.register(NAME, load_replica)
# verl has no public way to name the class that runs in the trainer processes; `moebius doctor` checks that this works.
_base._ROLLOUT_REGISTRY[(NAME, "async")] = "moebius.rollout.integrations.verl.adapter.ServerAdapter"

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from moebius.rollout.integrations.verl import cpu_platform

    cpu_platform.register()
