"""Comparison of runs: bars split at the switch, speed-ups, and files whose figures are those of the reports."""

from __future__ import annotations

import csv
import io
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moebius.rollout.compare import Run, compare, kind_of, load_runs, median_speedup, split_at
from moebius.rollout.compare_files import compare_runs, csv_text, page
from moebius.rollout.compare_svg import colour_of
from moebius.rollout.errors import BadInput
from moebius.rollout.report_types import DecisionEntry, StepReport
from tests.unit.reports import step_report

LENGTHS = [2, 2, 4, 10]  # live: 4 4 2 2 1 1 1 1 1 1
RUNS: dict[str, dict[str, Any]] = {
    "ep": {"layout": "EP", "iteration_s": 1.0},
    "tp": {"layout": "TP", "iteration_s": 0.9},
    "moebius": {"switch_at": 2, "iteration_s": 0.7, "pause_s": 0.5},
}


def folders(root: Path, steps: int = 3, **changes: dict[str, Any]) -> list[Path]:
    for name, how in RUNS.items():
        for step in range(steps):
            step_report(step, **({"lengths": LENGTHS} | how | changes.get(name, {}))).write(root / name)
    return [root / name for name in RUNS]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_bars_are_split_where_the_switching_run_switched(tmp_path: Path) -> None:
    found = compare(load_runs(folders(tmp_path)))
    assert found.kinds == ["EP", "TP", "switching"] and found.steps == [0, 1, 2] and found.warnings == []
    ep, tp, switching = (bars[0] for bars in found.bars)
    assert (ep.burst_s, ep.switch_s, ep.tail_s, ep.total_s, ep.split_live) == (2.0, 0.0, 8.0, 10.0, 2)
    assert (tp.burst_s, tp.tail_s) == pytest.approx((1.8, 7.2))
    assert (switching.burst_s, switching.switch_s, switching.tail_s) == pytest.approx((1.4, 0.5, 5.6))
    assert switching.split_live == 2 and switching.speedup == pytest.approx(9.0 / 7.5)
    assert ep.speedup is None and found.speedup(0) is None
    assert found.speedup(2) == pytest.approx(1.2) == median_speedup(found, 2)
    assert "1.200x over the better static run" in found.line(2)
    for bars in found.bars:
        for bar in bars:
            assert bar.burst_s + bar.switch_s + bar.tail_s == pytest.approx(bar.total_s)


def test_a_given_threshold_splits_static_runs_only(tmp_path: Path) -> None:
    found = compare(load_runs(folders(tmp_path)), threshold=1)
    assert [(bars[0].burst_s, bars[0].split_live) for bars in found.bars] == [
        (4.0, 1), (pytest.approx(3.6), 1), (pytest.approx(1.4), 2),
    ]  # fmt: skip


def test_splits_at_the_ends() -> None:
    report = step_report(0, lengths=LENGTHS)
    assert split_at(report, 4) is None  # never more than 4 live
    assert split_at(report, 0) == 10.0
    assert split_at(report, 3) == 2.0


def test_static_runs_alone_are_not_split_and_not_sped_up(tmp_path: Path) -> None:
    found = compare(load_runs(folders(tmp_path)[:2]))
    assert all(
        (bar.burst_s, bar.tail_s, bar.split_live) == (bar.total_s, 0.0, None) for bars in found.bars for bar in bars
    )
    assert found.speedup(0) is None and median_speedup(found, 0) is None


def test_unequal_work_is_said(tmp_path: Path) -> None:
    paths = folders(tmp_path, tp={"lengths": [2, 2, 5, 10], "model": "other"})
    step_report(7, lengths=LENGTHS).write(paths[0])
    words = compare(load_runs(paths)).warnings
    assert "different work in steps [0, 1, 2]" in words[0]
    assert words[1:] == ["the runs differ in model: other, tiny", "ep has steps that others lack: [7]"]


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no step_\*\.json"):
        load_runs([tmp_path])
    a, b, _ = folders(tmp_path, steps=1)
    (b / "step_0000.json").rename(b / "step_x.json")
    step_report(5).write(b)
    (b / "step_x.json").unlink()
    with pytest.raises(BadInput, match=r"no step in common \(ep: \[0\]; tp: \[5\]\)"):
        compare(load_runs([a, b]))
    with pytest.raises(BadInput, match="given twice"):
        load_runs([a, a])


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    for name in ("x/ep", "y/ep"):
        step_report(0).write(tmp_path / name)
    assert [run.name for run in load_runs([tmp_path / "x/ep", tmp_path / "y/ep"])] == ["x/ep", "y/ep"]


def test_kinds() -> None:
    assert kind_of([step_report(0, switch_at=2)]) == "switching"
    assert kind_of([step_report(0), step_report(1, layout="TP")]) == "switching"
    assert kind_of([step_report(0, layout="TP")]) == "TP"


def under(policy: str, report: StepReport) -> StepReport:
    """With a decision as that policy logs it."""
    decision = DecisionEntry(target=None, reason="x", outcome="", inputs={"policy": policy, "iteration": 0, "live": 4})
    return report.model_copy(update={"decisions": [decision]})


def test_a_static_run_is_static_although_its_engine_had_to_go_to_tp(tmp_path: Path) -> None:
    """Its step begins with a switch of no tokens, which a TP engine would not have."""
    for step in range(2):
        for name, policy, how in (
            ("a", "rollout", {"switch_at": 2, "iteration_s": 0.7}),
            ("ep", "static_ep", {"iteration_s": 1.0}),
            ("tp", "static_tp", {"switch_at": 4, "iteration_s": 0.9, "pause_s": 0.25}),
        ):
            under(policy, step_report(step, lengths=LENGTHS, **how)).write(tmp_path / name)
    found = compare(load_runs([tmp_path / name for name in ("a", "ep", "tp")]))
    assert found.kinds == ["switching", "EP", "TP"] and found.warnings == []
    a, ep, tp = (bars[0] for bars in found.bars)
    assert (tp.total_s, tp.burst_s, tp.switch_s, tp.tail_s) == pytest.approx((9.0, 1.8, 0.0, 7.2))
    assert (a.split_live, ep.split_live, tp.split_live) == (2, 2, 2)
    assert a.speedup == pytest.approx(9.0 / 7.5) and ep.speedup is tp.speedup is None


def test_a_run_that_might_have_switched_is_no_static_one(tmp_path: Path) -> None:
    for name, policy in (("a", "rollout"), ("ep", "static_ep")):
        under(policy, step_report(3, lengths=LENGTHS)).write(tmp_path / name)
    found = compare(load_runs([tmp_path / "a", tmp_path / "ep"]))
    assert found.kinds == ["switching", "EP"]
    assert found.warnings == ["a was free to switch and did not in steps [3]; it counts as no static run"]
    assert found.speedup(0) == pytest.approx(1.0)


def test_csv_holds_the_figures_of_the_reports(tmp_path: Path) -> None:
    found = compare(load_runs(folders(tmp_path)))
    rows = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert len(rows) == 9
    for row in rows:
        report = StepReport.load(tmp_path / row["run"] / f"step_{int(row['step']):04d}.json")
        assert float(row["total_s"]) == report.durations_s.total
        assert int(row["output_tokens"]) == report.counts.output_tokens
        assert float(row["tokens_per_s"]) == report.tokens_per_s
        if report.switches:
            assert (float(row["burst_s"]), int(row["split_live"])) == (report.switches[0].t, report.switches[0].live)
            assert float(row["switch_s"]) == report.switches[0].pause_ms / 1e3


def test_the_page_shows_them_too_and_loads_nothing(tmp_path: Path) -> None:
    found = compare(load_runs(folders(tmp_path)))
    html = page(found)
    assert not re.search(r"<(?:script|link|img|iframe)|https?://|@import", html)
    assert html.count("<svg") == 1 and html.count('fill="url(#tail') == 9
    titles = [unescape(title) for title in re.findall(r"<title>([^<]*step \d[^<]*)</title>", html)]
    # Two parts of static bars, three of switching ones.
    assert len(titles) == 3 * (2 + 2 + 3)
    assert "moebius, step 0: 7.50 s (burst 1.40, switch 0.500, tail 5.60)" in titles
    cells = re.findall(r"<td>([^<]*)</td>", html)
    assert cells[20:30] == ["0", "moebius", "7.50", "1.40", "0.50", "5.60", "2", "18", "2", "1.200x"]
    run = Run("<b>&", found.runs[2].reports)
    assert "<b>&" not in page(compare([found.runs[0], run]))


def test_heights_are_proportional(tmp_path: Path) -> None:
    html = page(compare(load_runs(folders(tmp_path, steps=1))))
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', html)]
    assert heights[1] / heights[0] == pytest.approx(4, rel=0.01)  # EP: tail 8 s, burst 2 s
    assert heights[5] / heights[0] == pytest.approx(0.5 / 2, rel=0.02)  # the pause of the switching run


def test_files_and_summary(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    console = quiet()
    html = compare_runs(folders(tmp_path), tmp_path / "out", console=console)
    assert html.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "comparison.csv",
        "comparison.html",
        "comparison.png",
    ]
    assert (tmp_path / "out/comparison.png").read_bytes().startswith(b"\x89PNG")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.200x" in printed and "moebius (switching): 22.5 s" in printed


def test_without_matplotlib_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = quiet()
    compare_runs(folders(tmp_path), tmp_path / "out", console=console)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["comparison.csv", "comparison.html"]
    assert ".[bench]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_runs_of_one_kind_get_colours_of_their_own() -> None:
    runs = [Run(f"r{i}", {0: step_report(0, lengths=LENGTHS)}) for i in range(4)]
    found = compare(runs)
    assert len({colour_of(found, i) for i in range(4)}) == 4


def test_a_measured_gain_is_projected_on_whole_training_steps(tmp_path: Path) -> None:
    """The switching run took 7.5 s of 9 s: 1.2x; with 85 % of a training step's time in rollouts that is 1.165x."""
    said = io.StringIO()
    html = compare_runs(folders(tmp_path), tmp_path / "out", console=Console(file=said, width=200), share=0.5)
    text = html.read_text(encoding="utf-8")
    assert text.count("<h3>End to end</h3>") == 1 and "whole step, rollout 1.200x as fast" in text
    assert "<td>85 %</td><td>1.165x</td>" in text and "<td>50 % (given)</td><td>1.091x</td>" in text
    assert "whole training steps 1.091x at 50 % of their time in rollouts" in said.getvalue()
    compare_runs(folders(tmp_path), tmp_path / "out", console=(console := quiet()))
    assert "1.121x at 65 % and 1.165x at 85 %" in console.file.getvalue()  # type: ignore[attr-defined]
