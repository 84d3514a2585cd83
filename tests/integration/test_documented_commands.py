"""Commands of the documentation, executed as they are written (see tests/documented_commands.yaml)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from moebius.engine.costs import CostModel
from moebius.engine.layout import Layout
from moebius.rollout.cost_files import expected_switch
from moebius.rollout.demo_assets import make_questions, make_tiny_model
from moebius.rollout.plan_model import H200, expected_points, load_gpu, load_model
from moebius.rollout.report_types import StepReport
from moebius.rollout.types import LengthTrace
from tests.documented import ROOT, filled, register
from tests.unit.reports import step_report

REGISTER = register()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: some folders, the demo's model and questions, three runs of the same steps, costs."""
    root = tmp_path_factory.mktemp("reader")
    for name in ("configs", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, root / name)
    make_tiny_model(root / "runs" / "demo" / "model")
    make_questions(root / "runs" / "demo" / "questions.jsonl", 16)
    lengths = [random.Random(i).randint(1, 90) for i in range(64)]
    for name, layout, switch_at in (("a", "EP", 8), ("b", "EP", None), ("c", "TP", None), ("moebius", "EP", 8),
                                    ("ep", "EP", None), ("tp", "TP", None)):  # fmt: skip
        for step in range(2):
            made = step_report(step, lengths=lengths, layout=layout, iteration_s=0.02, switch_at=switch_at)
            made.write(root / "runs" / name)
    model, gpu = load_model("qwen3-30b-a3b", 2), load_gpu("h200")
    costs = CostModel(
        ranks=2, points=expected_points(model, gpu, 2, H200, top=256), switches=expected_switch(model, gpu, 2)
    )
    assert {point.layout for point in costs.points} == set(Layout)
    costs.save(root / "costs.json")
    costs.model_copy(update={"ranks": 1}).save(root / "runs" / "calibration" / "costs.json")  # the runs are of one rank
    LengthTrace({divmod(i, 8): n for i, n in enumerate(lengths)}).save(root / "lengths.json")
    return root


def execute(command: str, folder: Path) -> str:
    """What it printed; fails when it does."""
    start = " ".join(command.split()[:2])
    words = filled(command, REGISTER["dots"].get(start, ""))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    (folder / "home").mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-c", words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("command", REGISTER["run"]["quick"])
def test_quick_commands(folder: Path, command: str) -> None:
    execute(command, folder)


def test_the_program_of_the_readme(folder: Path) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line == "    from transformers import AutoModelForCausalLM")
    end = next(i for i in range(begin, len(lines)) if lines[i] and not lines[i].startswith("    "))
    (folder / "program.py").write_text(dedent("\n".join(lines[begin:end])), encoding="utf-8")
    told = execute("python program.py", folder)
    assert told.count(" stop") + told.count(" length") == 16, "eight samples of each of two prompts"
    assert "burst" in told.splitlines()[-1]


def test_commands_that_start_engines(folder: Path) -> None:
    """In their order: the later ones take what the earlier ones leave."""
    for command in REGISTER["run"]["engines"]:
        assert execute(command, folder)
    assert (folder / "runs" / "first" / "report.html").is_file()
    first = StepReport.load(folder / "runs" / "first" / "step_0000.json")
    assert [switch.to for switch in first.switches] == ["TP"], "a reader's first step shows no switch"
    assert 8 <= first.switches[0].live <= 32 and first.durations_s.tail > 0
    told = execute("moebius report runs/a runs/ep runs/tp --out runs/tuned", folder)
    assert all(f"{name} ({kind})" in told for name, kind in (("a", "switching"), ("ep", "EP"), ("tp", "TP")))
    lengths = [LengthTrace.load(folder / "lengths.json")]
    assert len(lengths[0].lengths) == 16 * 16
    job = folder / "home" / "moebius-runs" / "deepmath_tiny_cpu"
    assert len(list(job.glob("step_*.json"))) == 3
