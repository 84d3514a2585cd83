"""Settings of a rollout group: one YAML file, every key known, overridable from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moebius.engine.config import EngineConfig
from moebius.rollout.errors import BadInput, validate
from moebius.rollout.failure_types import FailureSettings
from moebius.rollout.job_config import JobSettings
from moebius.rollout.report_writers import ReportSettings
from moebius.rollout.service_types import ServiceSettings
from moebius.rollout.types import Sampling


class Place(BaseModel):
    """Where ranks run when the caller holds the resources already: Ray is then asked for neither GPUs nor CPUs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str | None = Field(None, description="Ray's id of the node; None: the one of the calling process.")
    devices: list[str] = Field(
        default_factory=list, description="GPU of each rank, as CUDA_VISIBLE_DEVICES names them; none on CPU."
    )


class RolloutConfig(BaseModel):
    """A switch group of `ranks` ranks, their engine, and the default sampling settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ranks: int = Field(ge=2, description="Ranks of the switch group: one process with one GPU each.")
    engine: EngineConfig
    sampling: Sampling = Sampling()
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu.")
    startup_timeout_s: float = Field(600, gt=0, description="Longest wait for all ranks to be ready, in seconds.")
    step_timeout_s: float | None = Field(None, gt=0, description="Longest rollout step in seconds; None: no limit.")
    ray_address: str | None = Field(
        None, description="Ray cluster to join; None: RAY_ADDRESS if set, else a local one."
    )
    update_mode: Literal["in_place", "staged"] = Field(
        "in_place",
        description="Weight updates. in_place: nothing is held twice; after a failed one only a full one helps. "
        "staged: in the ranks' host memory until all is there; after a failed one the old weights serve on.",
    )
    cpus_per_rank: float = Field(1, gt=0, description="CPUs that Ray sets aside per rank.")
    replicas: int = Field(
        1, ge=1, description="Switch groups that share the prompts of a step, each on one node; see docs/replicas.md."
    )
    place: Place | None = Field(None, description="Run on these GPUs, which the caller holds; None: Ray chooses.")
    failures: FailureSettings = FailureSettings()
    service: ServiceSettings = ServiceSettings()
    report: ReportSettings = ReportSettings()
    job: JobSettings | None = Field(None, description="Steps of `python -m moebius.rollout.job`; see docs/deepmath.md.")

    @property
    def total_ranks(self) -> int:
        """Ranks of all replicas together."""
        return self.ranks * self.replicas

    @model_validator(mode="after")
    def _a_device_for_each_rank(self) -> RolloutConfig:
        if self.place is not None and self.replicas > 1:
            raise ValueError("place names the GPUs of one group: leave it out with replicas > 1, where Ray chooses")
        devices = self.place.devices if self.place else []
        if devices and len(set(devices)) != self.ranks:
            raise ValueError(f"place.devices names {devices}; {self.ranks} ranks need as many different GPUs")
        if self.place and self.device == "cuda" and not devices:
            raise ValueError("place.devices is empty: name the GPU of each rank, or leave `place` out")
        return self

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> RolloutConfig:
        limit = self.engine.max_model_len
        if limit is not None and self.sampling.max_tokens >= limit:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len={limit}; lower the first or raise the second"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RolloutConfig:
    """The configuration in a YAML file, with overrides such as "engine.policy.threshold=32" applied in order.

    Values of overrides are read as YAML. Raises BadInput for a missing file, broken YAML, a malformed override, an
    unknown key (naming the nearest known one) or a value out of range.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not a text file in UTF-8: {error}") from error
    data = _read_yaml(text, str(path))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise BadInput(f"{path}: expected a mapping of settings at the top, got {type(data).__name__}")
    for override in overrides:
        apply_override(data, override)
    return validate(RolloutConfig, data, f"{path} with {', '.join(overrides)}" if overrides else str(path))


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set a value in nested settings, as "engine.policy.threshold=32" does. Raises BadInput for what is malformed."""
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise BadInput(f"override '{override}': write it as key=value, for example engine.policy.threshold=32")
    here = data
    for i, part in enumerate(parts[:-1]):
        if here.get(part) is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict):
            raise BadInput(f"override '{override}': '{'.'.join(parts[: i + 1])}' is a value and has no keys below it")
    here[parts[-1]] = _read_yaml(value, f"override '{override}'")


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except yaml.YAMLError as error:
        raise BadInput(f"{what}: not valid YAML: {error}") from error
