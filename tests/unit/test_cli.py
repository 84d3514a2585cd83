"""The command line: help, errors as one line, exit codes, and what commands write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moebius.engine.config import EngineConfig
from moebius.engine.types import Iteration, SampleKey, SampleResult, StepOutcome, StepStats
from moebius.rollout import doctor
from moebius.rollout.cli import app
from moebius.rollout.config import RolloutConfig
from moebius.rollout.demo_assets import make_questions
from moebius.rollout.doctor import Check
from moebius.rollout.rank_setup import RankSetup, rank_environment
from moebius.rollout.report import build_report
from moebius.rollout.shm import make_ident
from moebius.rollout.types import LengthTrace, Rollout, Sample

CONFIG = "ranks: 2\nengine: {model: tiny}\n"
runner = CliRunner()


class FakeGroup:
    """RolloutGroup's interface with made-up samples: sample s of a prompt has s + 1 tokens. Starts nothing."""

    made: list[FakeGroup] = []  # noqa: RUF012  (shared on purpose: tests look at what the command made)

    def __init__(self, config: RolloutConfig) -> None:
        self.config, self.lengths, self.closed = config, [], False  # type: ignore[var-annotated]
        self.last_report: Any = None
        self.startup: list[Any] = []
        FakeGroup.made.append(self)

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def generate(
        self, prompts: list[Any], n: int, *, step: int, on_progress: Callable[..., None], lengths: LengthTrace | None
    ) -> list[Rollout]:
        self.lengths.append(lengths)
        on_progress(len(prompts) * n, len(prompts) * n, 5, 0, "TP")
        stats = StepStats(0, 1, total_s=2.0, burst_s=2.0, iterations=[Iteration(1.0, "EP", 0, 3, 4.0)])
        results = [
            SampleResult(SampleKey(p, s), [7] * (s + 1), None, "x", "stop", None, 0, 0)
            for p in range(len(prompts))
            for s in range(n)
        ]
        self.last_report = build_report(
            [StepOutcome(results, stats)],
            step=step,
            policy_version=0,
            model="tiny",
            device="cpu",
            prompt_tokens=[1] * len(prompts),
        )
        return [
            Rollout(p, [1], [Sample(s, [7] * (s + 1), None, None, "x", "stop", None, 0, 0) for s in range(n)])
            for p in range(len(prompts))
        ]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A config, prompts and an output folder; groups are fakes."""
    from moebius.rollout import group

    monkeypatch.setattr(group, "RolloutGroup", FakeGroup)
    FakeGroup.made.clear()
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    prompts = make_questions(tmp_path / "prompts.jsonl", 3)
    return SimpleNamespace(
        out=tmp_path / "out", trace=tmp_path / "lengths.json", config=config, prompts=prompts,
        args=["rollout", "--config", str(config), "--prompts", str(prompts), "--out", str(tmp_path / "out")],
    )  # fmt: skip


@pytest.mark.parametrize("command", ["", "demo", "rollout", "report", "doctor"])
def test_help(command: str) -> None:
    result = runner.invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_rollout_writes_rollouts_reports_and_page(files: SimpleNamespace) -> None:
    result = runner.invoke(app, [*files.args, "--n", "2", "--steps", "2", "--set", "engine.policy.threshold=7"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (files.out / "rollouts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt_index"], len(row["samples"])) for row in rows] == [
        (step, prompt, 2) for step in range(2) for prompt in range(3)
    ]
    answers = [json.loads(line)["final_answer"] for line in files.prompts.read_text().splitlines()]
    assert [row["answer"] for row in rows[:3]] == answers
    assert sorted(path.name for path in files.out.iterdir()) == [
        "report.html", "rollouts.jsonl", "step_0000.json", "step_0001.json",
    ]  # fmt: skip
    (group,) = FakeGroup.made
    assert group.config.engine.policy.threshold == 7 and group.closed
    assert "step 1: 3 prompts, 6 samples, 9 tokens" in result.output


def test_profile_goes_to_the_output_folder(files: SimpleNamespace) -> None:
    stale = files.out / "profile" / "step_0007_rank_0.json.gz"
    stale.parent.mkdir(parents=True)
    stale.touch()
    result = runner.invoke(app, [*files.args, "--profile", "--set", "engine.profile.after=3"])
    assert result.exit_code == 0, result.output
    (group,) = FakeGroup.made
    assert group.config.engine.profile.folder == str(stale.parent.resolve())
    assert group.config.engine.profile.after == 3 and not stale.exists()


def test_doctor_finds_a_missing_folder_of_moe_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    assert doctor.check_moe_configs().ok and "moe_configs" in doctor.check_moe_configs().detail
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path / "none"))
    assert not doctor.check_moe_configs().ok
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    (tmp_path / "E=64,N=768,device_name=NVIDIA_H200.json").touch()
    assert doctor.check_moe_configs().detail.startswith("1 ")


def test_a_second_run_replaces_the_first(files: SimpleNamespace) -> None:
    assert runner.invoke(app, [*files.args, "--steps", "2"]).exit_code == 0
    assert runner.invoke(app, [*files.args, "--limit", "1"]).exit_code == 0
    assert not (files.out / "step_0001.json").exists()
    assert len((files.out / "rollouts.jsonl").read_text().splitlines()) == 1


def test_lengths_are_captured_and_replayed(files: SimpleNamespace) -> None:
    assert runner.invoke(app, [*files.args, "--n", "2", "--capture-lengths", str(files.trace)]).exit_code == 0
    captured = {(prompt, sample): sample + 1 for prompt in range(3) for sample in range(2)}
    assert LengthTrace.load(files.trace).lengths == captured
    assert runner.invoke(app, [*files.args, "--n", "2", "--replay-lengths", str(files.trace)]).exit_code == 0
    first, second = FakeGroup.made
    assert first.lengths == [None]
    assert [trace.lengths for trace in second.lengths] == [captured]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--set", "engine.polcy.threshold=1"], "did you mean 'policy'"),
        (["--set", "ranks"], "write it as key=value"),
        (["--replay-lengths", "/nonexistent/trace"], "cannot be read"),
        (["--capture-lengths", "x.json", "--steps", "2"], "--steps 1"),
        (["--prompts", "/nonexistent/p.jsonl"], "no such file"),
        (["--config", "/nonexistent/c.yaml"], "cannot be read"),
    ],
)
def test_bad_input_is_one_clear_line(files: SimpleNamespace, extra: list[str], words: str) -> None:
    result = runner.invoke(app, [*files.args, *extra])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and words in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.strip().splitlines()) == 1
    assert not FakeGroup.made and not files.out.exists()


def test_report_of_a_folder(files: SimpleNamespace) -> None:
    assert runner.invoke(app, files.args).exit_code == 0
    page = files.out / "report.html"
    page.unlink()
    result = runner.invoke(app, ["report", str(files.out)])
    assert result.exit_code == 0 and str(page) in result.output.replace("\n", "") and page.exists()
    assert runner.invoke(app, ["report", str(files.out / "none")]).exit_code == 2


def test_doctor_proves_that_verl_has_loaded_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    good = doctor.check_verl()
    assert good.ok and "MoebiusReplica, ServerAdapter" in good.detail
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    bad = doctor.check_verl()
    assert not bad.ok and "VERL_USE_EXTERNAL_PLUGINS" in bad.remedy


def test_doctor_knows_that_verl_fails_beside_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "trl-1.99.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.99\n")
    (told / "RECORD").write_text("trl/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.check_verl()
    assert not found.ok and "TRL 1.99" in found.detail and "docs/trl.md" in found.remedy
    (told / "RECORD").write_text("trl/__init__.py,,\ntrl/experimental/ppo/__init__.py,,\n")
    assert doctor._trl_in_verls_way() is None


def test_doctor_does_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert doctor.check_verl().ok and "not installed" in doctor.check_verl().detail


def test_doctor_exits_with_1_and_prints_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_good() -> Check:
        return Check("good", True, "fine")

    def check_bad() -> Check:
        return Check("bad", False, "is broken", "mend it")

    def check_raises() -> Check:
        raise OSError("torn file")

    def check_noted() -> Check:
        return Check("noted", True, "is untidy", "tidy up")

    monkeypatch.setattr(doctor, "CHECKS", [check_good, check_noted])
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0 and "FAIL" not in result.output
    assert "note noted" in result.output and "-> tidy up" in result.output

    monkeypatch.setattr(doctor, "CHECKS", [check_good, check_bad, check_raises])
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "is broken" in result.output and "-> mend it" in result.output
    assert "OSError: torn file" in result.output and "2 of 3 checks failed" in result.output


def test_doctor_finds_wrong_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda: {"torch": "2.12.0", "vllm": "0.25.1"})
    assert not doctor.check_torch().ok and not doctor.check_vllm().ok
    monkeypatch.setattr(doctor, "installed_versions", lambda: {"torch": "2.11.0+cu130", "vllm": "0.26.0+cpu"})
    assert doctor.check_torch().ok and doctor.check_vllm().ok
    monkeypatch.setattr(doctor, "installed_versions", dict)
    assert "not installed" in doctor.check_torch().detail and "not installed" in doctor.check_vllm().detail


def test_doctor_finds_leftovers_and_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{make_ident()}-buffer").touch()  # of this process, which lives
    assert doctor.check_leftovers(tmp_path).ok
    dead = tmp_path / "moebius-1-999999999999-0123abcd-buffer"
    dead.touch()
    found = doctor.check_leftovers(tmp_path)
    assert found.ok and str(dead) in found.remedy  # the next start frees it: nothing is wrong
    monkeypatch.setattr(doctor, "MIN_SHM_BYTES", 1 << 60)
    assert not doctor.check_shm_size(tmp_path).ok
    assert not doctor.check_shm_size(tmp_path / "none").ok


def test_doctor_finds_multicast_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: False)
    for name in doctor.MULTICAST_OFF:
        monkeypatch.delenv(name, raising=False)
    assert doctor.check_multicast().ok
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found = doctor.check_multicast()
    assert not found.ok and found.remedy == "export NCCL_NVLS_ENABLE=0"


def test_ranks_run_with_what_the_doctor_expects() -> None:
    setup = RankSetup(EngineConfig(model="m"), 0, 2, "cuda", ["0", "1"], 1234, "i")
    assert doctor.MULTICAST_OFF.items() <= rank_environment(setup).items()


def test_doctor_knows_the_engine_s_vllm_version() -> None:
    from moebius.engine import vllm_patches

    assert doctor.VLLM_VERSION == vllm_patches.VLLM_VERSION


def test_doctor_reports_patches_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a package `vllm` in the way that has none of vLLM's modules."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = doctor.check_patches()
    assert not found.ok and "vllm" in found.detail and found.remedy
