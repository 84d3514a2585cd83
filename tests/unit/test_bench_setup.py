"""Engines' names and environment, process fleets, the daemon's folder and the commands' words; no vLLM here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moebius.engine.config import EngineConfig
from moebius.rollout.bench import daemon, rank
from moebius.rollout.bench.engines import (
    BenchSetup,
    EngineSpec,
    bare_model,
    capture_sizes,
    changed,
    environments,
)
from moebius.rollout.bench.fleet import Fleet, FleetError
from moebius.rollout.cli import app
from moebius.rollout.doctor import MULTICAST_OFF
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.shm import make_ident

CPU = BenchSetup(ranks=2, device="cpu", engine=EngineConfig(model="none"), largest_batch=8)
CUDA = CPU.model_copy(update={"device": "cuda"})
runner = CliRunner()


@pytest.mark.parametrize(
    "name",
    [
        "moebius",
        "moebius+eager",
        "stock_tp",
        "stock_ep+triton+untuned+seeded",
        "stock_dp_tp",
        "stock_tp_ep",
        "stock_mp",
        "moebius:mover=collective:policy.threshold=3",
    ],
)
def test_engine_names_round_trip(name: str) -> None:
    assert EngineSpec.parse(name).name == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stock_pt", "did you mean 'stock_tp'"),
        ("stock_ep+fast", "after a kind may follow"),
        ("moebius+triton", "always uses Triton"),
        ("stock_tp:mover=direct", "only moebius takes settings"),
        ("moebius:mover", "each as :name=value"),
    ],
)
def test_wrong_engine_names(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        EngineSpec.parse(name)


def test_settings_of_one_engine() -> None:
    found = changed(CPU.engine, EngineSpec.parse("moebius:mover=collective:policy.threshold=3").settings)
    assert (found.mover, found.policy.threshold, found.model) == ("collective", 3, "none")
    with pytest.raises(BadInput, match="did you mean 'mover'"):
        changed(CPU.engine, ["movr=direct"])


def test_multicast_is_off_for_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    for kind in ("moebius", "stock_tp", "stock_ep", "stock_dp_tp", "stock_tp_ep", "stock_mp"):
        of_ranks = environments(EngineSpec.parse(kind), CUDA)
        assert len(of_ranks) == (1 if kind == "stock_mp" else 2)
        for variables in of_ranks:
            assert MULTICAST_OFF.items() <= variables.items()
            assert variables["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_stock_keeps_vllm_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    ours = environments(EngineSpec.parse("moebius"), CUDA)[0]
    tp, ep = (environments(EngineSpec.parse(kind), CUDA)[0] for kind in ("stock_tp", "stock_ep"))
    assert {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT"} <= ours.keys()
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT"} & tp.keys()
    assert tp["VLLM_CACHE_ROOT"] != ep["VLLM_CACHE_ROOT"]
    assert tp["VLLM_TUNED_CONFIG_FOLDER"] == ours["VLLM_TUNED_CONFIG_FOLDER"], "both have the same kernels"
    assert "VLLM_TUNED_CONFIG_FOLDER" not in environments(EngineSpec.parse("stock_tp+untuned"), CUDA)[0]
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "/elsewhere")
    for kind in ("moebius", "stock_tp"):
        assert environments(EngineSpec.parse(kind), CUDA)[0]["VLLM_TUNED_CONFIG_FOLDER"] == "/elsewhere"


@pytest.mark.parametrize("largest", [1, 3, 8, 512, 600, 1024, 1025, 2048, 5000])
def test_capture_sizes_reach_the_largest_batch(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes[-1] >= largest
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) < 120


def test_bare_model_has_a_configuration_only(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    (tmp_path / "full" / "tokenizer.json").write_text("{}")
    assert os.listdir(bare_model(tmp_path / "full", tmp_path / "bare")) == ["config.json"]
    with pytest.raises(BadInput, match="--weights checkpoint"):
        bare_model(tmp_path, tmp_path / "other")


# ---- fleets ---------------------------------------------------------------------------------------------------------


class Echo:
    def __init__(self, word: str) -> None:
        print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
        self.word, self.rank = word, int(os.environ["RANK"])


class Refuses:
    def __init__(self) -> None:
        raise ValueError("no such model")


def speak(echo: Echo, more: str) -> tuple[int, str, int]:
    return echo.rank, echo.word + more, os.getpid()


def fail_on_one(echo: Echo) -> None:
    if echo.rank == 1:
        raise KeyError("broken")
    time.sleep(60)


def end_one(echo: Echo) -> None:
    if echo.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def dawdle(echo: Echo) -> None:
    time.sleep(60)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_fleet_answers_by_rank_and_ends(tmp_path: Path) -> None:
    with Fleet("echo", [{}, {}], Echo, "a", logs=tmp_path) as fleet:
        answers = fleet.call(speak, "b")
        assert [answer[:2] for answer in answers] == [(0, "ab"), (1, "ab")]
        assert fleet.log_of(1).read_text() == "rank 1 of 2\n"
    assert all(gone(pid) for _, _, pid in answers)
    with pytest.raises(FleetError, match="was closed"):
        fleet.call(speak, "c")


def test_fleet_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"rank 0: ValueError: no such model; see .*wrong\.0\.log"):
        Fleet("wrong", [{}], Refuses, logs=tmp_path)
    assert "Traceback" in (tmp_path / "wrong.0.log").read_text()


@pytest.mark.parametrize(
    ("function", "words"), [(fail_on_one, "rank 1: KeyError"), (end_one, "rank 0: its process has ended")]
)
def test_one_failed_rank_ends_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, words: str
) -> None:
    monkeypatch.setattr("moebius.rollout.bench.fleet.GRACE_S", 0.5)
    fleet = Fleet("echo", [{}, {}], Echo, "a", logs=tmp_path)
    pids = [pid for _, _, pid in fleet.call(speak, "")]
    with pytest.raises(FleetError, match=words):
        fleet.call(function)
    assert all(gone(pid) for pid in pids)


def test_ctrl_c_in_a_call_ends_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer, which is still to come, would be taken for the next call's."""
    fleet = Fleet("echo", [{}], Echo, "a", logs=tmp_path)
    [(_, _, pid)] = fleet.call(speak, "")

    def interrupt(*pipes: Any, **more: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("moebius.rollout.bench.fleet.connection.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fleet.call(speak, "late")
    assert gone(pid)
    with pytest.raises(FleetError, match="in the middle of a call"):
        fleet.call(speak, "c")


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    fleet = Fleet("echo", [{}], Echo, "a", logs=tmp_path, call_s=0.5)
    with pytest.raises(FleetError, match=r"no answer of ranks \[0\] to dawdle"):
        fleet.call(dawdle)


# ---- the daemon's folder --------------------------------------------------------------------------------------------


def test_without_a_daemon_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="bench up"):
        daemon.submit(tmp_path, "sweep", {}, "x", print)
    with pytest.raises(BadInput, match="no engines run there"):
        daemon.stop(tmp_path)


def test_a_dead_daemon_does_not_count_as_running(tmp_path: Path) -> None:
    ident = make_ident()
    (tmp_path / daemon.STATE).write_text(json.dumps({"owner": str(ident)}))
    assert daemon.running(tmp_path) is not None
    dead = str(ident).replace(f"-{ident.start_ticks}-", "-1-")
    (tmp_path / daemon.STATE).write_text(json.dumps({"owner": dead}))
    assert daemon.running(tmp_path) is None


def test_a_job_is_answered_with_its_error(tmp_path: Path) -> None:
    (tmp_path / daemon.STATE).write_text(json.dumps({"owner": str(make_ident())}))
    for part in ("jobs", "done"):
        (tmp_path / part).mkdir()

    def answer() -> None:
        while not (waiting := list((tmp_path / "jobs").glob("*.json"))):
            time.sleep(0.01)
        assert json.loads(waiting[0].read_text())["options"] == {"rounds": 2}
        daemon._write(tmp_path / "done" / waiting[0].name, {"ok": False, "error": "a rank died"})

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(MoebiusError, match="a rank died"):
        daemon.submit(tmp_path, "sweep", {"rounds": 2}, "x", print)
    thread.join()


def test_unknown_jobs_and_options_are_refused() -> None:
    with pytest.raises(BadInput, match="these do: sweep, rollout, graphs"):
        daemon.execute(None, "memory", {}, "x")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="did you mean 'rounds'"):
        daemon.execute(None, "sweep", {"round": 2}, "x")  # type: ignore[arg-type]


# ---- the commands ---------------------------------------------------------------------------------------------------


def config(folder: Path) -> str:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "c.yaml").write_text(f"ranks: 2\ndevice: cpu\nengine: {{model: {folder / 'model'}}}\n")
    return str(folder / "c.yaml")


@pytest.mark.parametrize("command", ["memory", "strawmen"])
def test_commands_that_need_cuda_say_so(tmp_path: Path, command: str) -> None:
    result = runner.invoke(app, ["bench", command, "--out", str(tmp_path / "out"), "--config", config(tmp_path)])
    assert result.exit_code == 2
    assert f"`moebius bench {command}` needs CUDA devices" in result.output


def test_graphs_needs_cuda_before_it_starts_engines(tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", "graphs", "--out", str(tmp_path / "out"), "--config", config(tmp_path)])
    assert result.exit_code == 2
    assert "`moebius bench graphs` needs CUDA devices" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep"], "give --config"),
        (["sweep", "--batches", "8,x"], "expected whole numbers"),
        (["sweep", "--iterations", "3", "--window", "10"], "does not fill one window"),
        (["sweep", "--config", "c.yaml", "--dir", "run"], "belong to `bench up`"),
        (["rollout", "--trace", "captured", "--lengths", "nowhere.json"], "cannot be read"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["bench", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert words in result.output


def test_stock_takes_over_what_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without peer access needs it off in all engines that are compared."""
    monkeypatch.setattr(
        "vllm.engine.arg_utils.EngineArgs", lambda **words: SimpleNamespace(create_engine_config=lambda: words)
    )
    for wanted in (True, False):
        config = EngineConfig(model="none", custom_all_reduce=wanted)
        for settings in (rank.StockSettings(layout="EP"), rank.StockSettings(layout="TP", multiprocess=True)):
            found = rank.stock_vllm_config(config, settings, 2)
            assert found["disable_custom_all_reduce"] is not wanted
