"""What ranks leave to be read: marks, weights kept for new ones, and losses in reports. No Ray, no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius.engine import phases
from moebius.engine.types import Iteration, SampleKey, SampleResult, StepOutcome, StepStats
from moebius.rollout import kept
from moebius.rollout.failure_types import Loss
from moebius.rollout.kept import Keeper, KeptWriter, read_kept
from moebius.rollout.marks import Marker, mark_path, read_mark
from moebius.rollout.output import step_line
from moebius.rollout.report import build_report
from moebius.rollout.report_step import step_card
from moebius.rollout.shm import make_ident
from moebius.rollout.worker import RankWorker


def test_a_mark_outlives_its_process(tmp_path: Path) -> None:
    ident = make_ident()
    code = (
        "import os, signal, sys; from pathlib import Path; from moebius.rollout.marks import Marker\n"
        "mark = Marker(Path(sys.argv[1])); mark('prefill'); mark('decode in EP'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = mark_path(ident, 1, tmp_path)
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    mark = read_mark(str(ident), 1, tmp_path)
    assert mark is not None and mark.phase == "decode in EP" and mark.since > 0
    assert read_mark(str(ident), 0, tmp_path) is None and read_mark("", 0, tmp_path) is None
    marker = Marker(path)
    assert read_mark(str(ident), 1, tmp_path) is None, "nothing was told yet"
    marker("x" * 500)
    assert len(read_mark(str(ident), 1, tmp_path).phase) == 120  # type: ignore[union-attr]
    marker.close()


def test_phases_are_told_to_all_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(phases, "observers", [seen.append, seen.append])
    phases.enter(phases.switch("TP", "kv"))
    assert seen == ["switch to TP, phase kv"] * 2
    assert phases.own_requests_only("prefill") and phases.own_requests_only("decode in EP")
    assert not phases.own_requests_only("decode in TP") and not phases.own_requests_only(seen[0])


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    monkeypatch.setattr(kept, "SHM_DIR", tmp_path)
    return Keeper()


WEIGHTS = {f"layer.{i}.weight": torch.arange(7 * i, dtype=torch.float32).view(7, i).to(dtype)
           for i, dtype in enumerate([torch.bfloat16, torch.float32, torch.float16] * 5)}  # fmt: skip
WEIGHTS["a scalar"] = torch.tensor(3.5)


def write(files: str, ranks: int, end: bool = True) -> None:
    for rank in range(ranks):
        writer = KeptWriter(files, rank, ranks)
        writer.take(list(WEIGHTS.items())[:4])
        writer.take(list(WEIGHTS.items())[4:])
        if end:
            writer.end()


def test_kept_weights_come_back_each_once(keeper: Keeper, tmp_path: Path) -> None:
    failed = keeper.new_set(None)
    write(failed, 3, end=False)
    files = keeper.new_set(None)
    write(files, 3)
    read = [pair for batch in read_kept(files, 3) for pair in batch]
    assert len(read) == len(WEIGHTS)
    for name, tensor in read:
        assert tensor.dtype == WEIGHTS[name].dtype and tensor.shape == WEIGHTS[name].shape
        assert torch.equal(tensor, WEIGHTS[name])
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 3 and min(sizes) > 0, "every rank has a share"
    newer = keeper.new_set(files)
    write(newer, 3)
    assert len(list(tmp_path.iterdir())) == 6, "an update that has not been committed replaces nothing"
    keeper.keep_only(newer)
    assert {path.name for path in tmp_path.iterdir()} == {f"{Path(newer).name}-{rank}" for rank in range(3)}
    keeper.keep_only(None)
    assert not list(tmp_path.iterdir())


def test_kept_weights_of_an_update_that_broke_off_are_refused(keeper: Keeper) -> None:
    files = keeper.new_set(None)
    write(files, 2, end=False)
    with pytest.raises(ValueError, match=r"are not whole|cannot be read"):
        list(read_kept(files, 2))
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_kept(files + "0", 2))


def test_a_rank_that_could_not_keep_weights_says_so_at_the_commit() -> None:
    """And not instead of it: the other ranks wait there."""

    class Full:
        def write(self, data: Any) -> int:
            return len(data)

        def close(self) -> None:
            raise OSError(28, os.strerror(28))

    writer: Any = object.__new__(KeptWriter)
    writer._path, writer._file = Path("/dev/shm/kept-1-1"), Full()
    told: list[Any] = []
    worker: Any = RankWorker(1)
    worker._engine, worker._keeping = SimpleNamespace(commit_update=told.append), writer
    worker.commit_update()
    remedy = "give it more room, or set failures.keep_weights: none"
    assert told == [f"rank 1: weights cannot be kept in /dev/shm (No space left on device): {remedy}"]
    worker.commit_update()
    assert told[1:] == [None]


def test_no_room_for_kept_weights_is_told_when_the_source_has_been_read(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = KeptWriter(keeper.new_set(None), 0, 1)
    read: list[int] = []

    def source(parts: int) -> Any:
        for part in range(parts):
            read.append(part)
            yield [(f"w{part}", torch.zeros(3))]

    class Full:
        def write(self, data: Any) -> None:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(ValueError, match=r"No space left on device.*failures\.keep_weights: none"):
        list(writer.along(source)(4))
    assert read == [0, 1, 2, 3], "whoever sends is not left waiting"


def test_reports_tell_of_losses() -> None:
    results = [
        SampleResult(SampleKey(0, 0), [7, 7], None, None, "length", None, 0, 0, ended_iteration=-1),
        SampleResult(SampleKey(1, 0), [], None, None, "failed", "given up", 0, 1, ended_iteration=-1),
    ]
    stats = [StepStats(rank, 2, total_s=2.0, iterations=[Iteration(1.0, "EP", 1, 1, 5.0)]) for rank in range(2)]
    outcomes = [StepOutcome([result], own) for result, own in zip(results, stats, strict=True)]
    loss = Loss("step 4", "rank 1 <died>", 1, "prefill", 5.0, 12.5, replayed=2, given_up=((4, 1),))
    report = build_report(
        outcomes, step=4, policy_version=0, model="m", device="cpu", prompt_tokens=[3, 3], losses=[loss]
    )
    [entry] = report.losses
    assert (entry.rank, entry.phase, entry.replayed, entry.given_up) == (1, "prefill", 2, [[4, 1]])
    assert report.counts.finish_reasons["failed"] == 1 and report.sample_times is None
    assert report.tokens_per_s == 0.5, "only what the last start has sampled"
    assert report.counterfactual.reason == "ranks were lost during the step"
    assert "rank 1 &lt;died&gt;; after 12.5 s 2 samples were drawn anew" in step_card(report, 100, is_open=True)
    assert "ranks lost 1 times" in step_line(report)
