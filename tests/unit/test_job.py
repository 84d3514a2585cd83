"""The loop of a job with a made-up group: resuming, stopping, dying ranks, rewards, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moebius.rollout import job, placement
from moebius.rollout.config import RolloutConfig, load_config
from moebius.rollout.demo_assets import train_tokenizer
from moebius.rollout.errors import BadInput, MoebiusError, RankDied
from moebius.rollout.job import Stopped, StopSignal, main, out_folder, run_job
from moebius.rollout.job_config import JobSettings
from moebius.rollout.job_prompts import max_prompt_tokens
from moebius.rollout.shards import finished_steps, read_shard, shard_path
from moebius.rollout.types import LengthTrace, Rollout, Sample
from tests.unit.reports import step_report

CONFIGS = Path(__file__).parents[2] / "configs"
JOBS = sorted(CONFIGS.glob("deepmath_*.yaml"))


class FakeGroup:
    """RolloutGroup's interface; a sample's tokens follow from step, prompt and sample alone. Starts nothing."""

    made: list[FakeGroup] = []  # noqa: RUF012  (shared on purpose: tests look at what the job made)
    during: Callable[[FakeGroup, int], None] | None = None  # called in every step

    def __init__(self, config: RolloutConfig) -> None:
        self.config, self.steps, self.restarts, self.closed = config, [], 0, False  # type: ignore[var-annotated]
        self.startup: list[Any] = []
        self.last_report: Any = None
        self.prompts: dict[int, list[list[int]]] = {}
        FakeGroup.made.append(self)

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def restart(self) -> None:
        self.restarts += 1

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        *,
        step: int,
        on_progress: Callable[..., None],
        lengths: LengthTrace | None,
    ) -> list[Rollout]:
        self.steps.append(step)
        if FakeGroup.during is not None:
            FakeGroup.during(self, step)
        on_progress(0, len(prompts) * n, 0, len(prompts) * n, "EP")
        self.prompts[step] = list(prompts)
        rollouts = []
        for p, ids in enumerate(prompts):
            samples = []
            for s in range(n):
                count = 1 + (step + p + s) % 3 if lengths is None else lengths.lengths[p, s]
                samples.append(Sample(s, [step] * count, [-0.5] * count, None, f"{p}", "stop", None, 0, 0))
            rollouts.append(Rollout(p, ids, samples))
        flat = [len(sample.token_ids) for rollout in rollouts for sample in rollout.samples]
        self.last_report = step_report(step, lengths=flat, n=n)
        return rollouts


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    from moebius.rollout import group, report_startup

    monkeypatch.setattr(group, "RolloutGroup", FakeGroup)
    monkeypatch.setattr(placement, "connect", lambda config: None)
    monkeypatch.setattr(report_startup, "startup_line", lambda starts: "ready")
    FakeGroup.made.clear()
    FakeGroup.during = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes the checks of a model: a shape without weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    shape = json.loads((CONFIGS / "shapes/qwen3-30b-a3b/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"vocab_size": 512}))
    train_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> Callable[..., RolloutConfig]:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"ranks: 2\nengine: {{model: {model}, load_format: dummy, max_model_len: 512}}\n"
        f"sampling: {{max_tokens: 200}}\njob: {{out: {tmp_path / 'out'}, steps: 3, prompts_per_step: 4, n: 2, "
        "data: {source: offline, offline_questions: 30, instruction: ''}}\n"
    )

    def load(*overrides: str) -> RolloutConfig:
        return load_config(path, overrides)

    load.path = path  # type: ignore[attr-defined]
    return load


def everything(folder: Path) -> list[dict[str, Any]]:
    return [row for step in finished_steps(folder) for row in read_shard(shard_path(folder, step))]


# ---- a job ------------------------------------------------------------------------------------------


def test_shards_reports_and_page(settings: Callable[..., RolloutConfig]) -> None:
    folder = run_job(settings())
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "job.json", "report.html", "step_0000.json", "step_0000.parquet", "step_0001.json",
        "step_0001.parquet", "step_0002.json", "step_0002.parquet",
    ]  # fmt: skip
    rows = everything(folder)
    assert [(row["step"], row["prompt_index"], row["sample_index"]) for row in rows] == [
        (step, p, s) for step in range(3) for p in range(4) for s in range(2)
    ]
    assert len({row["question_index"] for row in rows}) == 12  # no question twice
    assert {row["reward"] for row in rows} == {None}
    (group,) = FakeGroup.made
    assert group.closed and group.steps == [0, 1, 2]
    assert [row["prompt_token_ids"] for row in rows[::2]] == [ids for step in range(3) for ids in group.prompts[step]]


def test_a_crashed_job_goes_on_and_equals_an_undisturbed_one(
    settings: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    def crash(group: FakeGroup, step: int) -> None:
        if step == 1:
            raise ZeroDivisionError("the machine went away")

    FakeGroup.during = crash
    with pytest.raises(ZeroDivisionError):
        run_job(settings())
    assert finished_steps(tmp_path / "out") == [0]
    before = shard_path(tmp_path / "out", 0).stat().st_mtime_ns
    FakeGroup.during = None
    assert FakeGroup.made[-1].closed
    run_job(settings())
    assert FakeGroup.made[-1].steps == [1, 2]
    assert shard_path(tmp_path / "out", 0).stat().st_mtime_ns == before
    quiet = run_job(settings(f"job.out={tmp_path / 'quiet'}"))
    assert everything(tmp_path / "out") == everything(quiet)


def test_a_hole_is_filled_and_a_finished_job_starts_nothing(settings: Callable[..., RolloutConfig]) -> None:
    folder = run_job(settings())
    shard_path(folder, 1).unlink()
    run_job(settings())
    assert FakeGroup.made[-1].steps == [1]
    count = len(FakeGroup.made)
    run_job(settings())
    assert len(FakeGroup.made) == count
    run_job(settings("job.steps=5"))  # more steps are the same job
    assert FakeGroup.made[-1].steps == [3, 4]


@pytest.mark.parametrize(
    "change", ["job.n=1", "sampling.temperature=0.5", "job.data.shuffle_seed=1", "engine.policy.threshold=7"]
)
def test_another_job_in_the_same_folder_is_refused(settings: Callable[..., RolloutConfig], change: str) -> None:
    folder = run_job(settings())
    with pytest.raises(BadInput, match=rf"settings\.{change.split('=', maxsplit=1)[0]}"):
        run_job(settings(change))
    assert run_job(settings(change), fresh=True) == folder


@pytest.mark.parametrize("change", ["startup_timeout_s=5", "job.progress_s=1", "job.restarts=3", "cpus_per_rank=2"])
def test_settings_that_do_not_matter_may_change(settings: Callable[..., RolloutConfig], change: str) -> None:
    run_job(settings("job.steps=1"))
    run_job(settings(change))
    assert FakeGroup.made[-1].steps == [1, 2]


def test_other_questions_in_the_same_file_are_refused(settings: Callable[..., RolloutConfig], tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "final_answer": "1"} for i in range(20)]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_job(settings(f"job.data.source={path}", "job.steps=1"))
    path.write_text("".join(json.dumps(row | {"question": "other"}) + "\n" for row in rows))
    with pytest.raises(BadInput, match=r"questions\.sha256"):
        run_job(settings(f"job.data.source={path}"))


def test_too_few_questions_are_found_before_anything_starts(settings: Callable[..., RolloutConfig]) -> None:
    with pytest.raises(BadInput, match="pass the filters"):
        run_job(settings("job.prompts_per_step=40"))
    assert not FakeGroup.made


# ---- ranks that die, signals ------------------------------------------------------------------------


def test_ranks_that_die_are_started_again(settings: Callable[..., RolloutConfig]) -> None:
    def die_once(group: FakeGroup, step: int) -> None:
        if step == 1 and not group.restarts:
            raise RankDied("rank 1 ended", rank=1, step=1)

    FakeGroup.during = die_once
    folder = run_job(settings())
    (group,) = FakeGroup.made
    assert group.steps == [0, 1, 1, 2] and group.restarts == 1 and len(everything(folder)) == 24
    with pytest.raises(RankDied):
        run_job(settings("job.restarts=0"), fresh=True)


def test_a_signal_ends_the_running_step_and_keeps_the_finished(
    settings: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    stop = StopSignal()
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]

    def send(group: FakeGroup, step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    FakeGroup.during = send
    try:
        stop.listen()
        with pytest.raises(Stopped, match="SIGTERM") as stopped:
            run_job(settings(), stop=stop)
        assert stopped.value.signum == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a second one ends the process at once
    finally:
        for signum, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(signum, handler)
    assert finished_steps(tmp_path / "out") == [0] and FakeGroup.made[0].closed
    FakeGroup.during = None
    run_job(settings())
    assert FakeGroup.made[-1].steps == [1, 2]


def wait_for_signal(stop: StopSignal) -> None:
    with stop.at_once():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


def test_a_signal_ends_a_wait_at_once() -> None:
    stop = StopSignal()
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    begun = time.monotonic()
    try:
        stop.listen()
        with pytest.raises(Stopped):
            wait_for_signal(stop)
        with pytest.raises(Stopped):
            stop.check()
    finally:
        for signum, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(signum, handler)
    assert time.monotonic() - begun < 10


# ---- rewards, lengths, prompts ----------------------------------------------------------------------


def prompt_number(text: str, answer: str) -> float:
    return float(text)


def test_rewards_are_in_the_shards(settings: Callable[..., RolloutConfig], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moebius.rollout")
    folder = run_job(settings("job.scorer='tests.unit.test_job:prompt_number'", "job.steps=1"))
    assert [row["reward"] for row in everything(folder)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "reward 1.500" in caplog.text


def test_a_scorer_that_does_not_load_stops_the_job_before_the_ranks(settings: Callable[..., RolloutConfig]) -> None:
    with pytest.raises(BadInput, match="cannot import nowhere"):
        run_job(settings("job.scorer='nowhere:f'"))
    assert not FakeGroup.made


def test_lengths_of_another_job_are_replayed(settings: Callable[..., RolloutConfig], tmp_path: Path) -> None:
    first = run_job(settings())
    again = run_job(settings(f"job.out={tmp_path / 'again'}", f"job.replay_lengths={first}", "sampling.seed=3"))
    assert [len(r["token_ids"]) for r in everything(first)] == [len(r["token_ids"]) for r in everything(again)]
    made = len(FakeGroup.made)
    more = ["job.steps=4", "sampling.seed=3", f"job.replay_lengths={first}", f"job.out={tmp_path / 'again'}"]
    with pytest.raises(BadInput, match="no lengths of step 3"):
        run_job(settings(*more))
    assert len(FakeGroup.made) == made  # found before anything starts


def test_drawn_lengths_and_random_prompts(settings: Callable[..., RolloutConfig]) -> None:
    folder = run_job(settings("job.replay_lengths=deepmath", "job.data.prompt=random_ids", "job.steps=1"))
    rows = everything(folder)
    assert all(1 <= len(row["token_ids"]) <= 200 for row in rows)
    assert all(10 <= token < 512 for row in rows for token in row["prompt_token_ids"])


def test_prompts_leave_room_for_the_output(settings: Callable[..., RolloutConfig]) -> None:
    assert max_prompt_tokens(settings()) == 312
    assert max_prompt_tokens(settings("job.data.max_prompt_tokens=9")) == 9
    assert max_prompt_tokens(settings("engine.max_model_len=null")) is None
    run_job(settings())
    assert max(len(ids) for prompts in FakeGroup.made[0].prompts.values() for ids in prompts) <= 312


# ---- folders, command line, configs -----------------------------------------------------------------


def test_relative_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RUNS", "/shared")
    assert out_folder(JobSettings(out="~/a")) == Path("/home/me/a")
    assert out_folder(JobSettings(out="$RUNS/a")) == Path("/shared/a")
    monkeypatch.chdir(tmp_path)
    assert out_folder(JobSettings(out="a")) == tmp_path / "a"
    copy = tmp_path / "session/runtime_resources/working_dir_files/_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with pytest.raises(BadInput, match="give an absolute one"):
        out_folder(JobSettings(out="a"))
    assert out_folder(JobSettings(out="$RUNS/a")) == Path("/shared/a")


def test_a_tiny_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moebius.rollout import demo_assets

    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "config.json").touch()

    monkeypatch.setattr(demo_assets, "make_tiny_model", make)
    for _ in range(2):
        job.ensure_tiny_model(str(tmp_path / "new" / "model"))
    assert len(made) == 1 and [p.name for p in (tmp_path / "new").iterdir()] == ["model"]


def test_the_command_line(settings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import sys
from tests.unit import test_job
from moebius.rollout import group, job, placement, report_startup
group.RolloutGroup, placement.connect = test_job.FakeGroup, lambda config: None
report_startup.startup_line = lambda starts: "ready"
sys.exit(job.main(sys.argv[1:]))
"""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "--config", str(settings.path), *arguments]
        root = CONFIGS.parent
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)

    done = run("--steps", "2", "--out", str(tmp_path / "a=b"), "--scorer", "tests.unit.test_job:prompt_number")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: 4 prompts, 8 samples" in done.stdout and "reward 1.500" in done.stdout
    assert finished_steps(tmp_path / "a=b") == [0, 1]
    wrong = run("--set", "job.stpes=2")
    assert wrong.returncode == 2 and "did you mean 'steps'" in wrong.stderr and "Traceback" not in wrong.stderr
    wrong = run("--set", "job.data.source=/nonexistent/x.parquet")
    assert wrong.returncode == 2 and "no such file" in wrong.stdout and "Traceback" not in wrong.stdout


def test_a_config_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no job: section"):
        run_job(load_config(CONFIGS / "cpu_tiny.yaml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_shipped_jobs(path: Path) -> None:
    config = load_config(path)
    assert config.job is not None
    assert out_folder(config.job).is_absolute() and not config.job.out.startswith("."), "must outlive Ray's copy"
    limit = max_prompt_tokens(config)
    assert limit is not None and config.engine.max_model_len is not None
    assert limit + config.sampling.max_tokens <= config.engine.max_model_len
    if path.name != "deepmath_tiny_cpu.yaml":
        assert (config.job.steps, config.job.prompts_per_step, config.sampling.max_tokens) == (9, 2048, 32768)


def test_there_are_shipped_jobs() -> None:
    assert {path.name for path in JOBS} >= {"deepmath_30b_x2.yaml", "deepmath_tiny_cpu.yaml"}


def test_main_reports_a_missing_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "/nonexistent.yaml"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert issubclass(BadInput, MoebiusError)
