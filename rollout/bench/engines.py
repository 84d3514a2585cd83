"""The engines a benchmark runs: their names, their environment, and the fleets that hold them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.config import EngineConfig
from moebius.rollout.bench import rank
from moebius.rollout.bench.fleet import Fleet
from moebius.rollout.config import RolloutConfig, apply_override, validate
from moebius.rollout.doctor import is_cpu_build
from moebius.rollout.errors import BadInput, unknown_key
from moebius.rollout.rank_setup import DEFAULT_ENVIRONMENT, RankSetup, rank_environment

# Attention and experts of the stock kinds: TP/TP, DP/EP, DP/TP, TP/EP, and TP/TP with vLLM's own worker processes.
Kind = Literal["moebius", "stock_tp", "stock_ep", "stock_dp_tp", "stock_tp_ep", "stock_mp"]
SET_BY_FLEET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MOEBIUS_GROUP_ID")
OWN_CHOICES = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT")  # of our engine: stock keeps vLLM's defaults
FLAGS = ("eager", "triton", "untuned", "seeded")
BATCHED_TOKENS = 8192  # per iteration where the configuration leaves it open: what `vllm serve` takes on large GPUs


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine by name: a kind, and `+eager` (no CUDA graphs); after a stock kind also `+triton` (the MoE backend that
    ours always has), `+seeded` (so has ours), or `+untuned` (without the kernel configurations that come with ours).
    After `moebius` may follow settings that differ from those of the benchmark, as `moebius:mover=collective`.
    """

    kind: Kind
    eager: bool = False
    triton: bool = False
    untuned: bool = False
    seeded: bool = False
    settings: tuple[str, ...] = ()  # of `engine`, as "mover=collective"

    @classmethod
    def parse(cls, name: str) -> EngineSpec:
        """From "stock_ep+triton" and the like. Raises BadInput for what no engine is called."""
        flags, *settings = name.strip().split(":")
        kind, *options = flags.split("+")
        if kind not in get_args(Kind):
            raise BadInput(f"engine '{name}': {unknown_key(kind, get_args(Kind))}")
        allowed = ("eager",) if kind == "moebius" else FLAGS
        if not set(options) <= set(allowed):
            raise BadInput(
                f"engine '{name}': after a kind may follow +eager, and after a stock kind also +triton, "
                "+untuned or +seeded (ours always uses Triton's experts, its own tuning of them, and a seed per sample)"
            )
        if settings and (kind != "moebius" or not all("=" in setting for setting in settings)):
            raise BadInput(f"engine '{name}': only moebius takes settings, each as :name=value")
        return cls(kind, settings=tuple(settings), **dict.fromkeys(options, True))  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        flags = [flag for flag in FLAGS if getattr(self, flag)]
        return ":".join(["+".join([self.kind, *flags]), *self.settings])

    @property
    def layouts(self) -> tuple[rank.Layout, ...]:
        """Layouts it decodes in; of stock kinds, how requests are spread: EP is a share each, TP all everywhere."""
        if self.kind == "moebius":
            return ("EP", "TP")
        return ("EP",) if self.kind in ("stock_ep", "stock_dp_tp") else ("TP",)


class BenchSetup(BaseModel):
    """What all engines of a benchmark share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(ge=1)
    device: Literal["cpu", "cuda"]
    engine: EngineConfig
    largest_batch: int = Field(ge=1, description="Largest global batch that gets a CUDA graph of its own size.")
    startup_timeout_s: float = 1800
    call_timeout_s: float = 1800

    @classmethod
    def of(
        cls, config: RolloutConfig, *, ranks: int | None, largest_batch: int, weights: str, folder: Path
    ) -> BenchSetup:
        """From a group's settings. `weights` is "dummy" (random ones; only config.json is read) or "checkpoint"."""
        device = resolve_device(config.device)
        engine = config.engine
        changes: dict[str, Any] = {}
        if weights == "dummy":
            changes |= {"model": bare_model(Path(engine.model), folder / "model"), "load_format": "dummy"}
        if engine.max_num_batched_tokens is None:
            changes["max_num_batched_tokens"] = BATCHED_TOKENS
        count = ranks if ranks is not None else config.ranks
        if device == "cuda" and len(visible_devices()) < count:
            raise BadInput(
                f"{count} ranks need a GPU each, {len(visible_devices())} are visible; lower --ranks, or check "
                "`nvidia-smi` and CUDA_VISIBLE_DEVICES"
            )
        return cls(
            ranks=count,
            device=device,
            engine=engine.model_copy(update=changes),
            largest_batch=largest_batch,
            startup_timeout_s=max(config.startup_timeout_s, 60),
        )


def resolve_device(device: str) -> Literal["cpu", "cuda"]:
    """ "cpu" or "cuda"; for "auto" cuda where the installed vLLM is built for it and a GPU is there."""
    if device == "cpu" or (device == "auto" and (is_cpu_build() or not visible_devices())):
        return "cpu"
    return "cuda"


def need_cuda(setup: BenchSetup, command: str, why: str) -> None:
    """Raise BadInput on CPU."""
    if setup.device != "cuda":
        raise BadInput(f"`moebius bench {command}` needs CUDA devices: {why}")


def visible_devices() -> list[str]:
    """GPU ids as CUDA_VISIBLE_DEVICES takes them, without making a CUDA context in this process."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device.strip() for device in listed.split(",") if device.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def bare_model(source: Path, target: Path) -> str:
    """A folder with the model's config.json only, so that neither engine loads a tokenizer or detokenizes."""
    config = source / "config.json"
    if not config.is_file():
        raise BadInput(
            f"{source}: there is no config.json; give a folder with one as engine.model (a model id works with "
            "--weights checkpoint only)"
        )
    json.loads(config.read_text(encoding="utf-8"))
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, target / "config.json")
    return str(target.resolve())


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs: vLLM's own up to 512, then ever wider steps up to at least `largest`.

    vLLM's default ends at 512, beyond which it runs without full graphs: its best at large batches needs more.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(576, 1025, 64)]
    sizes += range(1152, max(1152, largest + 128), 128)
    last = next(size for size in sizes if size >= largest)
    return tuple(size for size in sizes if size <= last)


def environments(spec: EngineSpec, setup: BenchSetup) -> list[dict[str, str]]:
    """Variables of every process of an engine: one per rank, except for `stock_mp`, which starts its own workers."""
    devices = visible_devices()[: setup.ranks] if setup.device == "cuda" else []
    # As the product runs its ranks; what the fleet sets itself is left to it.
    own = rank_environment(RankSetup(setup.engine, 0, setup.ranks, setup.device, devices, 0, ""))
    own = {name: value for name, value in own.items() if name not in SET_BY_FLEET}
    defaults = {name: os.environ.get(name, value) for name, value in DEFAULT_ENVIRONMENT.items()}
    if spec.kind == "moebius":
        return [defaults | own for _ in range(setup.ranks)]
    common = {name: value for name, value in own.items() if name not in OWN_CHOICES} | {"HF_HUB_OFFLINE": "1"}
    if importlib.util.find_spec("flashinfer") is not None:
        common.pop("VLLM_USE_FLASHINFER_SAMPLER", None)
    # Compiled code contains names of process groups that are no part of the cache's keys: a cache per engine.
    root = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
    common["VLLM_CACHE_ROOT"] = os.path.join(root, "moebius-bench", spec.kind)
    if not spec.untuned:  # what is compared is the engines, not who has tables for this GPU
        common["VLLM_TUNED_CONFIG_FOLDER"] = defaults["VLLM_TUNED_CONFIG_FOLDER"]
    if spec.kind == "stock_mp":
        return [common | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}]
    return [common | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} for _ in range(setup.ranks)]


def changed(config: EngineConfig, settings: Sequence[str]) -> EngineConfig:
    """With `settings` as of `--set`, without their `engine.`. Raises BadInput for names and values that are none."""
    values = config.model_dump()
    for setting in settings:
        apply_override(values, setting)
    return validate(EngineConfig, values, f"engine 'moebius:{':'.join(settings)}'")


def start(spec: EngineSpec, setup: BenchSetup, logs: Path, *, wait: bool = True) -> Fleet:
    """Start one engine. Raises FleetError with the words of the rank that failed."""
    config = setup.engine
    sizes = capture_sizes(setup.largest_batch)
    changes: dict[str, Any] = {"enforce_eager": True} if spec.eager else {}
    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    if spec.kind == "moebius":
        if config.capture_sizes is None and not spec.eager:
            changes["capture_sizes"] = list(sizes)
        make, arguments = rank.Ours, (changed(config.model_copy(update=changes), spec.settings),)
    else:
        (layout,) = spec.layouts
        largest = -(-setup.largest_batch // setup.ranks) if layout == "EP" else setup.largest_batch
        settings = rank.StockSettings(
            layout=layout,
            expert_parallel=spec.kind in ("stock_ep", "stock_tp_ep"),
            multiprocess=spec.kind == "stock_mp",
            moe_backend="triton" if spec.triton else "auto",
            capture_sizes=tuple(config.capture_sizes or capture_sizes(largest)),
            seeded=spec.seeded,
            patched=setup.device == "cpu" and spec.kind != "stock_mp",
        )
        make, arguments = rank.Stock, (config.model_copy(update=changes), settings, setup.ranks)
    return Fleet(
        re.sub(r"[^\w.]+", "-", spec.name),
        environments(spec, setup),
        make,
        *arguments,
        logs=logs,
        start_s=setup.startup_timeout_s,
        call_s=setup.call_timeout_s,
        wait=wait,
    )


class Engines:
    """Running engines by name; a context manager that ends them."""

    def __init__(self, setup: BenchSetup, names: Sequence[str], logs: Path, say: Callable[[str], None] = print) -> None:
        self.setup = setup
        self.specs = [EngineSpec.parse(name) for name in names]
        if len({spec.name for spec in self.specs}) != len(self.specs) or not self.specs:
            raise BadInput(f"engines: name at least one, and none twice, got {', '.join(names) or 'none'}")
        self.say, self._logs = say, logs
        self._fleets: dict[str, Fleet] = {}
        self._capacity: dict[str, rank.Capacity] = {}
        try:
            if setup.device == "cuda" and (os.cpu_count() or 1) >= 4 * setup.ranks * len(self.specs):
                say(f"starting {', '.join(spec.name for spec in self.specs)} ({setup.ranks} ranks each) ...")
                for spec in self.specs:
                    self._fleets[spec.name] = start(spec, setup, self._logs, wait=False)
                for spec in self.specs:
                    self._fleets[spec.name].wait_until_ready()
                    self._ready(spec)
            else:  # one after another: they share cores for compilation
                for spec in self.specs:
                    self._start(spec)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: EngineSpec) -> None:
        self.say(f"starting {spec.name} ({self.setup.ranks} ranks, {self.setup.device}) ...")
        fleet = start(spec, self.setup, self._logs)
        self._fleets[spec.name] = fleet
        self._ready(spec)

    def _ready(self, spec: EngineSpec) -> None:
        fleet = self._fleets[spec.name]
        self._capacity[spec.name] = fleet.call(rank.capacity)[0]
        kernels = " -> ".join(f"{us:.2f}" for us in fleet.call(rank.kernel_us)[0])
        took = f"; {kernels} us per small kernel of a graph" if kernels else ""
        self.say(f"  {spec.name} runs after {fleet.start_seconds:.1f} s{took}")

    def revive(self) -> None:
        """Start engines again that failed. Raises FleetError if one does not come up."""
        for spec in self.specs:
            if self._fleets[spec.name].problem:
                self._start(spec)

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def fleet(self, name: str) -> Fleet:
        """The fleet of an engine. Raises BadInput when it was not started."""
        if name not in self._fleets:
            raise BadInput(f"engine '{name}' does not run here; running: {', '.join(self._fleets)}")
        return self._fleets[name]

    def capacity(self, name: str) -> rank.Capacity:
        """Limits of an engine's rank 0; all ranks have the same."""
        return self._capacity[name]

    def notes(self) -> list[str]:
        """What a reader of the results must know of these engines."""
        stock = [spec.name for spec in self.specs if spec.kind not in ("moebius", "stock_mp")]
        if self.setup.device == "cpu" and stock:
            return [f"on CPU, {' and '.join(stock)} run with this project's CPU changes to vLLM: times mean little"]
        return []

    def close(self) -> None:
        """End all engines."""
        for fleet in self._fleets.values():
            fleet.close()
