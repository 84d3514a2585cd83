"""The report of a run: its numbers are those of the JSON files, its lifelines those of the step, its files small."""

from __future__ import annotations

import csv
import io
import random
import re
import time
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.engine.types import Iteration, SampleKey, SampleResult, StepOutcome, StepStats, SwitchRecord
from moebius.rollout.cli import app
from moebius.rollout.errors import BadInput
from moebius.rollout.hindsight import counterfactual, static_times
from moebius.rollout.report import build_report
from moebius.rollout.report_files import PHASES, STEP_FIELDS, SWITCH_FIELDS, report_run, summary
from moebius.rollout.report_html import hindsight, page
from moebius.rollout.report_lifelines import lifelines, spans
from moebius.rollout.report_picture import picture
from moebius.rollout.report_run import crossover, medians
from moebius.rollout.report_step import trailing_rates
from moebius.rollout.report_types import DecisionEntry, SampleTimes, StepReport, TimelinePoint
from moebius.rollout.svg import LEFT, RIGHT, TOP, WIDTH, ticks
from tests.unit.reports import step_report
from tests.unit.test_report import report

COSTS = CostModel(
    ranks=2,
    points=[
        CostPoint(layout=layout, batch=batch, context=0, ms=ms)
        for layout, values in ((Layout.EP, (8, 20)), (Layout.TP, (4, 40)))
        for batch, ms in zip((1, 1024), values, strict=True)
    ],
    switches=[SwitchPoint(to=to, live=0, kv_tokens=0, ms=100) for to in Layout],
    source="costs.json",
)


def flights(
    lengths: list[int], *, starts: list[int] | None = None, ms: float = 10.0, switch_at: tuple[int, ...] = ()
) -> tuple[StepReport, np.ndarray, np.ndarray]:
    """A step in which sample i decodes from iteration `starts[i]` on, and when each really began and ended.

    Before each iteration in `switch_at` there is a pause of 0.25 s and the layout changes.
    """
    begins = starts or [0] * len(lengths)
    iterations, switches, now, layout = [], [], 0.0, "EP"
    start, end = np.zeros(len(lengths)), np.zeros(len(lengths))
    for k in range(max(b + n for b, n in zip(begins, lengths, strict=True))):
        live = sum(k < b + n for b, n in zip(begins, lengths, strict=True))
        if k in switch_at:
            layout = "TP" if layout == "EP" else "EP"
            switches.append(SwitchRecord(layout, k, now, live, [live], 9, {"kv": 200.0}, 250.0, 5, 6, 0.25, 0.5))
            now += 0.25
        decoding = 0
        for i, (b, n) in enumerate(zip(begins, lengths, strict=True)):
            if b == k:
                start[i] = now
            if b + n - 1 == k:
                end[i] = now + ms / 1e3
            decoding += b <= k < b + n
        now += ms / 1e3
        live = sum(k + 1 < b + n for b, n in zip(begins, lengths, strict=True))
        iterations.append(Iteration(now, layout, live, decoding, ms))
    stats = StepStats(0, 1, total_s=now, burst_s=now, iterations=iterations, switches=switches)
    results = [SampleResult(SampleKey(i, 0), [1] * n, None, None, "stop", None, 0, 0) for i, n in enumerate(lengths)]
    made = build_report(
        [StepOutcome(results, stats)],
        step=0,
        policy_version=0,
        model="m",
        device="cpu",
        prompt_tokens=[3] * len(lengths),
    )
    return made, start, end


def test_lifelines_are_those_of_the_step() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 60) for _ in range(200)]
    made, start, end = flights(lengths, switch_at=(20, 30, 41))
    found = lifelines(made)
    assert found is not None and not found.waited and found.prefill == 1
    np.testing.assert_allclose(found.end, end)
    np.testing.assert_allclose(found.start, start, atol=1e-9)
    assert "exact to one iteration" in found.note
    assert [span.layout for span in spans(made.timeline)] == ["EP", "TP", "EP", "TP"]
    for before, after in zip(spans(made.timeline), spans(made.timeline)[1:], strict=False):
        assert after.start - before.end == pytest.approx(0.25)


def test_lifelines_of_a_thinned_timeline_are_within_a_point() -> None:
    rng = random.Random(2)
    made, _, end = flights([rng.randint(1, 2500) for _ in range(300)], switch_at=(900,))
    found = lifelines(made)
    assert found is not None and not found.waited
    assert max(p.iterations for p in made.timeline) > 1
    widest = max(p.iterations * p.iteration_ms / 1e3 for p in made.timeline)
    assert float(np.abs(found.end - end).max()) <= widest + 1e-9
    assert float(np.abs(found.start).max()) <= widest + 1e-9


def test_lifelines_of_chunked_prefill_say_how_exact_they_are() -> None:
    lengths = [30 + i % 17 for i in range(40)]
    made, start, end = flights(lengths, starts=[i // 10 for i in range(40)])
    found = lifelines(made)
    assert found is not None and not found.waited and found.prefill == 4
    assert float(np.abs(found.end - end).max()) <= 0.04 + 1e-9
    assert float(np.abs(found.start - start).max()) <= 0.04 + 1e-9
    assert "the 4 iterations with prefill" in found.note


def test_lifelines_say_when_samples_waited_or_joined() -> None:
    made, _, end = flights([20] * 8, starts=[0] * 4 + [20] * 4)
    found = lifelines(made)
    assert found is not None and found.waited and "approximate" in found.note
    np.testing.assert_allclose(np.sort(found.end), np.sort(end))
    assert "approximate: samples waited" in page([made])
    points = list(made.timeline)
    points[10] = points[10].model_copy(update={"live": 99})
    joined = made.model_copy(update={"timeline": points})
    assert lifelines(joined) is None and "samples joined while the step ran" in page([joined])


def test_crossover_by_hand() -> None:
    assert crossover([(4, 8.0), (8, 8.0), (16, 8.0)], [(4, 5.0), (8, 7.0), (16, 9.0)]) == pytest.approx(8 * 2**0.5)
    assert crossover([(4, 8.0), (8, 8.0)], [(16, 5.0), (32, 7.0)]) is None
    assert crossover([(4, 8.0), (8, 8.0)], [(4, 5.0), (8, 7.0)]) is None
    assert medians([(4.0, 1.0, 1), (4.1, 3.0, 1), (4.0, 2.0, 1), (64.0, 5.0, 1)]) == [(4.0, 2.0), (64.0, 5.0)]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, the head first."""
    return [
        [
            [unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", body)
        ]
        for body in re.findall(r"<table>(.*?)</table>", text, re.S)
    ]


def test_numbers_of_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    for step in range(4):
        report(step, update_weights_s=1.25 + step).write(tmp_path)
    reports = [StepReport.load(path) for path in sorted(tmp_path.glob("step_*.json"))]
    text = page(reports, COSTS)
    steps, switches, static, projected = tables(text)
    for row, r in zip(steps[1:], reports, strict=True):
        d, cell = r.durations_s, dict(zip(steps[0], row, strict=True))
        assert int(cell["output tokens"].replace(",", "")) == r.counts.output_tokens
        assert int(cell["samples"].replace(",", "")) == r.counts.samples
        for name in ("total", "burst", "switch", "tail", "other"):
            assert float(cell[f"{name} s"]) == pytest.approx(getattr(d, name), abs=0.005 + 1e-9)
        assert float(cell["EP p50 ms"]) == pytest.approx(r.iteration_ms["EP"].p50, abs=0.005 + 1e-9)
        assert float(cell["TP p50 ms"]) == pytest.approx(r.iteration_ms["TP"].p50, abs=0.005 + 1e-9)
        assert float(cell["update s"]) == pytest.approx(r.update_weights_s, abs=0.005 + 1e-9)
        assert int(cell["switch at live"]) == r.switches[0].live
    assert len(switches) == 1 + 4
    for row, r in zip(switches[1:], reports, strict=True):
        s, cell = r.switches[0], dict(zip(switches[0], row, strict=True))
        assert (int(cell["step"]), cell["to"], int(cell["live"])) == (r.step, s.to, s.live)
        assert float(cell["pause ms"]) == pytest.approx(s.pause_ms, abs=0.005 + 1e-9)
        for name in PHASES:
            assert float(cell[f"{name} ms"]) == pytest.approx(s.phases_ms.model_dump()[name], abs=0.005 + 1e-9)
        assert float(cell["KV after %"]) == pytest.approx(100 * s.kv_use_after, abs=0.05 + 1e-9)
    for row, r in zip(static[1:-1], reports, strict=True):
        found = counterfactual(r, COSTS)
        times = (found.measured_s, found.static_ep_s, found.static_tp_s, found.best_single_s)
        assert [float(cell) for cell in row[1:5]] == pytest.approx(times, abs=0.005 + 1e-9)
        assert row[5] == f"{found.gain:.3f}x"
    assert [row[0] for row in projected[1:]] == ["65 %", "75 %", "85 %"]
    gain = float(static[-1][5].rstrip("x"))
    for row in projected[1:]:
        share = float(row[0].rstrip("% ")) / 100
        assert float(row[1].rstrip("x")) == pytest.approx(1 / (1 - share + share / gain), abs=2e-3)


def test_what_the_reports_themselves_say_about_static_layouts_is_shown(tmp_path: Path) -> None:
    """Without --costs the page and the terminal take the reports' own fields; a given share has a row of its own."""
    for step in range(2):
        made = report(step)
        static = static_times(made, COSTS, "costs from the cache")
        made.model_copy(update={"counterfactual": static}).write(tmp_path)
    said = io.StringIO()
    report_run(tmp_path, None, Console(file=said, width=200), share=0.7)
    text = (tmp_path / "report.html").read_text()
    projected = next(found for found in tables(text) if "70 % (given)" in str(found))
    assert [row[0] for row in projected[1:]] == ["65 %", "70 % (given)", "75 %", "85 %"]
    assert "costs from the cache" in text
    assert "by the costs: static EP" in said.getvalue() and "at 70 % of their time in rollouts" in said.getvalue()
    (first, *_) = csv.DictReader((tmp_path / "report.csv").open())
    assert float(first["static_tp_s"]) == counterfactual(report(0), COSTS).static_tp_s


def test_a_report_without_costs_says_why() -> None:
    made = report()
    assert made.counterfactual.static_ep_s is None and "no costs" in str(made.counterfactual.reason)
    text = page([made.model_copy(update={"counterfactual": static_times(made, None, "none kept in a cache")})])
    assert "Not known: no costs: none kept in a cache" in text
    other = COSTS.model_copy(update={"ranks": 8})
    assert "calibrate there" in str(static_times(made, other, "x").reason)
    bare = COSTS.model_copy(update={"switches": []})
    assert "no switch was measured" in str(static_times(made, bare, "x").reason)


def test_recorded_times_are_the_lifelines() -> None:
    made, start, end = flights([20] * 8, starts=[0] * 4 + [20] * 4)
    times = SampleTimes(arrived_s=list(start), ended_s=list(end), ended_iteration=[0] * 8)
    made = made.model_copy(update={"sample_times": times})
    found = lifelines(made)
    assert found is not None and found.recorded
    np.testing.assert_allclose(found.start, start)
    np.testing.assert_allclose(found.end, end)
    text = page([made])
    assert "as the ranks recorded them" in text
    drawn = re.search(r'aria-label="Arrivals over time">(.*?)</svg>', text, re.S)
    assert drawn is not None and "4 of 8 samples joined the running step" in text


def test_static_times_of_an_open_step_follow_its_timeline() -> None:
    """Samples that join decode in another layout with those they decoded with: two waves of four, never eight."""
    costs = CostModel(
        ranks=1,
        points=[
            CostPoint(layout=layout, batch=batch, context=0, ms=ms)
            for layout, values in ((Layout.EP, (8, 16)), (Layout.TP, (4, 32)))
            for batch, ms in zip((4, 8), values, strict=True)
        ],
        switches=COSTS.switches,
    )
    made, start, end = flights([20] * 8, starts=[0] * 4 + [20] * 4)
    times = SampleTimes(arrived_s=list(start), ended_s=list(end), ended_iteration=[0] * 8)
    found = counterfactual(made.model_copy(update={"sample_times": times}), costs)
    assert (found.static_ep_s, found.static_tp_s) == pytest.approx((40 * 8 / 1e3, 40 * 4 / 1e3))
    assert found.best_single_s is None
    assert "best single switch" in page([made.model_copy(update={"sample_times": times})], costs)


def test_a_step_as_one_picture() -> None:
    made, _, _ = flights([5 + i for i in range(40)], switch_at=(15,))
    root = ElementTree.fromstring(picture(made))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("40 samples, 980 tokens in") and "switch to TP with 29 live" in text for text in texts)
    assert {"burst (EP)", "switch", "tail (TP)", "to TP, 29 live"} <= set(texts)
    assert "http" not in picture(made).replace("http://www.w3.org/2000/svg", "")
    committed = (Path(__file__).parents[2] / "docs" / "demo_step.svg").read_text()
    assert ElementTree.fromstring(committed).tag.endswith("svg") and "128 samples" in committed


def test_bars_are_as_long_as_the_times() -> None:
    reports = [report(step) for step in range(3)]
    overview = re.search(r'<svg[^>]*aria-label="Time of each step by part">(.*?)</svg>', page(reports), re.S)
    assert overview is not None
    bars = re.findall(r'<rect class="(ep|switch|tp|other)" x="[\d.]+" y="([\d.]+)" width="([\d.]+)"', overview[1])
    scale = []
    for y, r in zip(sorted({float(y) for _, y, _ in bars}), reports, strict=True):
        widths = {css: float(width) for css, own, width in bars if float(own) == y}
        scale += [widths["ep"] / r.durations_s.burst, widths["tp"] / r.durations_s.tail]
    assert max(scale) / min(scale) == pytest.approx(1, rel=0.005)


def test_the_live_chart_goes_through_the_timeline() -> None:
    made, _, _ = flights([5 + i for i in range(40)], switch_at=(15, 25))
    found = re.search(r'<svg[^>]*aria-label="Live samples over time">(.*?)</svg>', page([made]), re.S)
    assert found is not None
    drawing = found[1]
    top_y, top_x = ticks(max(p.live for p in made.timeline))[-1], made.durations_s.total
    bottom = 190 - 36
    known = np.array(
        [(LEFT + p.t / top_x * (WIDTH - LEFT - RIGHT), bottom - p.live / top_y * (bottom - TOP)) for p in made.timeline]
    )
    paths = re.findall(r'class="line (ep|tp)" d="M([\d. L]+)"', drawing)
    assert [css for css, _ in paths] == ["ep", "tp", "ep"]
    for _, path in paths:
        for pair in path.split("L"):
            x, y = map(float, pair.split())
            assert float(np.abs(known - (x, y)).max(axis=1).min()) <= 0.051
    assert re.findall(r'rect class="band (ep|tp)"', drawing) == ["ep", "tp", "ep"]
    assert drawing.count('class="mark switch"') == 2
    assert "to TP, 29 live" in drawing and "to EP, 19 live" in drawing


def test_decisions_are_shown_as_text() -> None:
    decisions = [
        DecisionEntry(
            target="TP", reason="live <= threshold", outcome="switched", inputs={"live": 1234, "wait_ms": 1.5}
        )
    ] * 30
    text = page([report().model_copy(update={"decisions": decisions})])
    assert "Policy decisions: 30, the last 24 shown" in text
    found = tables(text)[-1]
    assert found[1:] == [["TP", "live <= threshold", "switched", "live 1,234, wait_ms 1.5"]] * 24


def test_a_run_of_16384_samples_is_drawn_fast_and_small() -> None:
    reports = [report(step, prompts=2048, n=8, prompt_tokens=[9] * 2048) for step in range(2)]
    reports = [reports[i % 2].model_copy(update={"step": i}) for i in range(9)]
    begin = time.perf_counter()
    text = page(reports)
    assert time.perf_counter() - begin < 5
    assert len(text.encode()) < 450_000
    assert "190 of 16,384 samples" in text


def test_hindsight_needs_costs_that_fit(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="hold no switch"):
        hindsight([report()], COSTS.model_copy(update={"switches": []}))
    with pytest.raises(BadInput, match="calibrate there"):
        hindsight([report()], COSTS.model_copy(update={"ranks": 8}))
    assert hindsight([], COSTS) == {}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps, of which only the second one switched."""
    report(0, threshold=0).write(tmp_path / "run")
    report(1, update_weights_s=0.5, cancelled=True).write(tmp_path / "run")
    COSTS.save(tmp_path / "costs.json")
    return tmp_path / "run"


def test_csv_files_hold_the_numbers_of_the_json(run: Path) -> None:
    report_run(run, run.parent / "costs.json", Console(file=io.StringIO(), width=80))
    reports = [StepReport.load(path) for path in sorted(run.glob("step_*.json"))]
    rows = list(csv.DictReader((run / "report.csv").open()))
    assert tuple(rows[0]) == STEP_FIELDS
    for row, r in zip(rows, reports, strict=True):
        assert float(row["total_s"]) == r.durations_s.total and float(row["other_s"]) == r.durations_s.other
        assert int(row["output_tokens"]) == r.counts.output_tokens
        assert float(row["static_ep_s"]) == counterfactual(r, COSTS).static_ep_s
        assert (row["update_weights_s"] or None) == (None if r.update_weights_s is None else str(r.update_weights_s))
        assert row["tp_p50_ms"] == (str(r.iteration_ms["TP"].p50) if "TP" in r.iteration_ms else "")
    (row,) = csv.DictReader((run / "report_switches.csv").open())
    (switch,) = reports[1].switches
    assert tuple(row) == SWITCH_FIELDS
    assert (row["step"], row["to"], int(row["live"])) == ("1", "TP", switch.live)
    assert float(row["import_ms"]) == switch.phases_ms.import_ and float(row["pause_ms"]) == switch.pause_ms


def test_a_picture_is_written_where_matplotlib_is(run: Path) -> None:
    pytest.importorskip("matplotlib")
    report_run(run, console=Console(file=io.StringIO(), width=80))
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    step_report(2, lengths=[1]).write(run)  # a single iteration, no decode points
    report_run(run, console=Console(file=io.StringIO(), width=80))
    assert not list(run.glob(".*"))


def test_without_matplotlib_the_rest_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = io.StringIO()
    report_run(run, console=Console(file=said, width=80))
    assert "needs matplotlib" in said.getvalue() and (run / "report.csv").exists()
    assert not (run / "report.png").exists()


def test_the_summary_fits_a_terminal() -> None:
    many = [report(step, cancelled=True) for step in range(3)]
    many[1] = many[1].model_copy(update={"switches": many[1].switches * 7})
    said = io.StringIO()
    Console(file=said, width=80).print(summary(many))
    lines = said.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.split()[:2] == ["0", "512"])
    assert row[3:7] == [f"{getattr(many[0].durations_s, name):.2f}" for name in ("total", "burst", "switch", "tail")]
    assert any("5 more" in line for line in lines) and any("1 refused" in line for line in lines)


def test_the_command_prints_and_refuses(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), "--costs", str(run.parent / "costs.json")])
    assert done.exit_code == 0, done.output
    assert "by the costs: static EP" in done.output and "report.html, beside it" in done.output
    assert "Static layouts in hindsight" in (run / "report.html").read_text()
    missing = CliRunner().invoke(app, ["report", str(run), "--costs", str(run / "none.json")])
    assert missing.exit_code == 2 and "cannot be read" in missing.stderr
    both = CliRunner().invoke(app, ["report", str(run), str(run), "--costs", "x"])
    assert both.exit_code == 2 and "give one folder" in both.stderr


def test_rates_of_tokens_are_taken_over_a_window_of_one_layout() -> None:
    def point(t: float, layout: Any, tokens: int, ms: float) -> TimelinePoint:
        return TimelinePoint(t=t, layout=layout, live=1, tokens=tokens, iteration_ms=ms, iterations=1)

    series = [
        point(0.1, "EP", 10, 100), point(0.2, "EP", 20, 100), point(0.201, "EP", 20, 1), point(0.4, "TP", 5, 50),
        point(0.4, "TP", 1, 0),
    ]  # fmt: skip
    assert trailing_rates(series, 0.1) == pytest.approx([100, 200, 40 / 0.101, 100, 120])
    assert trailing_rates([point(0.1, "TP", 3, 0)], 0.1) == [0]
