"""What the settings of all trainers' integrations have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moebius.engine.config import PolicyConfig
from moebius.rollout.service_types import ServiceSettings


class TrainerSettings(BaseModel):
    """Settings of the rollout that a trainer's own do not say."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trainer: ClassVar[str] = ""  # where its own settings are, in words
    follows: ClassVar[Mapping[str, str]] = {}  # fields of EngineConfig that follow from them, and from which

    policy: PolicyConfig = Field(PolicyConfig(), description="When to switch; docs/policies.md.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Other settings of the engine, e.g. kv_cache_bytes, mover."
    )
    service: ServiceSettings = Field(ServiceSettings(), description="How steps open and close; docs/serving.md.")
    startup_timeout_s: float = Field(1800, gt=0, description="Longest wait for all ranks to be ready, in seconds.")

    @field_validator("engine")
    @classmethod
    def _not_the_trainers(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in cls.follows:
                raise ValueError(f"{key} follows from {cls.trainer}: set {cls.follows[key]} instead")
        return value
