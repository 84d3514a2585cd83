"""What `benchmarks/paper.sh` measures on which machine: parts, their steps, and how long each takes. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moebius.rollout.plan_model import PlanModel, load_gpu
from moebius.rollout.planner import memory_of

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    1: "start-up, memory against both static layouts, switches, movers",
    2: "decode sweep: ours, stock EP, stock TP",
    3: "rollout steps with DeepMath's lengths",
    4: "CUDA graphs on and off",
    5: "the planner's predictions beside what was measured",
}
CAPTURED = "[1,2,4,8,16,32,64,128,256,512,1024,2048]"
DEEPEP = "moebius:ep.all2all=deepep_v2"


@dataclass(frozen=True, slots=True)
class Setting:
    """One model on one number of GPUs."""

    gpus: int
    shape: str  # "235b" | "30b" | "tiny"
    config: str
    layers: int | None  # None: all
    kv_gib: float
    start_min: float  # from nothing to ready, compile caches empty
    pace: float = 1.0  # how much longer steps take than on 8 GPUs with all layers

    @property
    def name(self) -> str:
        """Of the results file."""
        if self.shape == "tiny":
            return f"paper_x{self.gpus}_cpu"
        reduced = "" if self.layers is None else "_dry"
        return f"paper_x{self.gpus}{'_30b' if self.shape == '30b' else ''}{reduced}"

    @property
    def device(self) -> str:
        """What it runs on."""
        return "cpu" if self.shape == "tiny" else "cuda"


SETTINGS = {
    (8, "235b"): Setting(8, "235b", "configs/shape_235b_x8.yaml", None, 32, 5.0),
    (4, "235b"): Setting(4, "235b", "configs/shape_235b_x8.yaml", 40, 24, 3.5, 0.6),
    (4, "30b"): Setting(4, "30b", "configs/shape_30b_x2.yaml", None, 40, 2.5, 0.6),
    (2, "235b"): Setting(2, "235b", "configs/shape_235b_x8.yaml", 16, 16, 2.5, 0.4),
    (2, "30b"): Setting(2, "30b", "configs/shape_30b_x2.yaml", None, 24, 2.5, 0.6),
    (2, "tiny"): Setting(2, "tiny", "", None, 0.03125, 0.3, 0.1),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One `moebius bench` command, whose results file says that it is done."""

    part: int
    name: str
    command: tuple[str, ...]  # after `moebius bench`, without engines, settings and folders
    minutes: float  # without the start of an engine
    engine: str | None = None  # one that stays up over several steps; None: the command starts its own
    needs_cuda: bool = False
    needs_deepep: bool = False

    @property
    def file(self) -> str:
        """Relative to the folder of the setting."""
        return f"{self.name}/{self.command[0]}.json"


def steps_of(setting: Setting) -> list[Step]:
    """All measured steps, by value."""
    tiny = setting.shape == "tiny"
    pace = setting.pace
    fills = "150,600" if tiny else "35000,135000,270000,540000,640000"
    switch = ["switch", "--live", "6" if tiny else "256", "--fills", fills, "--soak", "0", "--switches", "6"]
    switch += ["--kv-tokens", "1024", "--repeats", "2", "--drained", "2", "--every", "3"] if tiny else []
    batches = "4,8" if tiny else "8,32,128,256,512,1024,2048"
    sweep = ["sweep", "--batches", batches, "--context", "16" if tiny else "128", "--rounds", "2"]
    sweep += ["--iterations", "8", "--window", "4"] if tiny else ["--iterations", "40"]
    lengths = ["--scale", "0.01", "--cap", "40", "--requests", "12", "--prompt", "12"] if tiny else [
        "--scale", "0.12", "--cap", "2000", "--requests", "2048",
    ]  # fmt: skip
    rollout = ["rollout", "--trace", "deepmath", *lengths, "--repeats", "1", "--no-update-weights"]
    eager = ["sweep", *sweep[1:]]
    eager[eager.index("--batches") + 1] = "4" if tiny else "8,64,256"
    memory = ["memory", "--largest-batch", "2048", "--engines"]
    start = setting.start_min
    steps = [
        Step(1, "switch", tuple(switch), 2.5 * pace, "moebius"),
        *(
            Step(1, f"memory_{name}", (*memory, name), start + 0.3, needs_cuda=True)
            for name in ("moebius", "stock_ep", "stock_tp")
        ),
        Step(2, "sweep_moebius", tuple(sweep), 3.0 * pace, "moebius"),
        Step(2, "sweep_stock_ep", tuple(sweep), 1.5 * pace, "stock_ep"),
        Step(2, "sweep_stock_tp", tuple(sweep), 2.0 * pace, "stock_tp"),
        Step(2, "sweep_deepep", tuple(sweep), 3.0 * pace, DEEPEP, needs_cuda=True, needs_deepep=True),
        *(Step(3, f"rollout_{seed}", (*rollout, "--seed", str(seed)), 3.4 * pace, "moebius") for seed in range(3)),
        Step(4, "sweep_eager", tuple(eager), 2.5 * pace, "moebius+eager", needs_cuda=True),
    ]
    return [step for step in steps if not (tiny and step.needs_cuda)]


def settings_of(setting: Setting, folder: Path) -> list[str]:
    """`--config`, `--ranks` and every `--set` of all engines of a setting, so that all are alike."""
    if setting.shape == "tiny":
        return ["--config", str(folder / "tiny.yaml")]
    sets = {
        "engine.kv_cache_bytes": str(int(setting.kv_gib * 2**30)),
        "engine.max_num_seqs": "2048",
        # Ranks' tokens are gathered on every rank in EP: so many times this in a prefill.
        "engine.max_num_batched_tokens": "4096",
        "engine.capture_sizes": CAPTURED,
        "engine.policy.costs": "null",
        "engine.ep.all2all": "allgather_reducescatter",
    }
    if setting.layers is not None:
        sets["engine.hf_overrides.num_hidden_layers"] = str(setting.layers)
    words = ["--config", str(ROOT / setting.config), "--ranks", str(setting.gpus)]
    return [*words, *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]


def model_config(setting: Setting, folder: Path) -> dict[str, object]:
    """The model's config.json with as many layers as run."""
    names = {"235b": "qwen3-235b-a22b", "30b": "qwen3-30b-a3b"}
    shapes = ROOT / "configs" / "shapes"
    path = folder / "model" if setting.shape == "tiny" else shapes / names[setting.shape]
    config: dict[str, object] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if setting.layers is not None:
        config["num_hidden_layers"] = setting.layers
    return config


def plan_model(setting: Setting, folder: Path) -> PlanModel:
    """The model's sizes as they run."""
    return PlanModel.from_config(setting.shape, model_config(setting, folder), setting.gpus)


def needs_gb(setting: Setting, folder: Path) -> float:
    """Memory per GPU: weights of both layouts, KV with its spare slot, 10 GB for graphs, workspace, communicators."""
    held = memory_of(plan_model(setting, folder), load_gpu("h200"), setting.gpus)
    layers = plan_model(setting, folder).shape.num_layers
    kv = setting.kv_gib * 2**30 / 1e9 * (1 + 1 / layers)
    return (held.experts + held.spare_slot + held.ep_rest + held.tp_rest) / 1e9 + kv + 10.0
