"""Puts our rollout actor where OpenRLHF's own is, for `create_vllm_engines` of this process to make."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moebius.rollout.errors import MoebiusError
from moebius.rollout.integrations.openrlhf.settings import OpenRlhfSettings, check

OPENRLHF_VERSION = "0.11.2"
MOST_CALLS = 1 << 20  # at once on an actor: every prompt of a step is a call, and pauses must not wait behind them


def install(settings: OpenRlhfSettings | None = None) -> None:
    """From now on `openrlhf.trainer.ray.vllm_engine.create_vllm_engines` makes switch groups.

    Raises MoebiusError for a missing or another OpenRLHF.
    """
    try:
        found = version("openrlhf")
    except PackageNotFoundError as error:
        raise MoebiusError(f"OpenRLHF is not installed: pip install --no-deps openrlhf=={OPENRLHF_VERSION}") from error
    if found != OPENRLHF_VERSION:
        raise MoebiusError(
            f"this works with OpenRLHF {OPENRLHF_VERSION}, but {found} is installed: "
            f"pip install --no-deps openrlhf=={OPENRLHF_VERSION}"
        )
    from openrlhf.trainer.ray import vllm_engine

    vllm_engine.RolloutRayActor = ActorClass(settings or OpenRlhfSettings())


class ActorClass:
    """Stands where OpenRLHF's actor class was: `.options(...).remote(...)`, which it calls, and nothing else."""

    def __init__(self, settings: OpenRlhfSettings, options: dict[str, Any] | None = None) -> None:
        self._settings, self._options = settings, options or {}

    def options(self, **options: Any) -> ActorClass:
        """Ray's options of an actor."""
        return ActorClass(self._settings, self._options | options)

    def remote(self, **arguments: Any) -> Any:
        """Start an actor. Raises BadInput for what is not supported, before anything is started."""
        import ray

        from moebius.rollout.integrations.openrlhf.actor import RolloutActor

        check(arguments)
        actor = ray.remote(RolloutActor).options(**self._options, max_concurrency=MOST_CALLS)
        return actor.remote(self._settings, **arguments)
