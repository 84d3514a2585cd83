"""Reports of replicas put together, taken apart, drawn and printed."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.layout import Layout
from moebius.rollout.hindsight import counterfactual
from moebius.rollout.output import step_line
from moebius.rollout.report_files import report_run
from moebius.rollout.report_html import page
from moebius.rollout.report_lanes import LaneOutcome, in_hindsight, merge, merged_timeline, views
from moebius.rollout.report_types import SampleTimes, StepReport, TimelinePoint
from moebius.rollout.types import Sample
from tests.unit.reports import step_report

SLOW = (2, 3, 9, 12)
QUICK = (1, 2, 3, 4)


POINTS = [
    CostPoint(layout=layout, batch=batch, context=1, ms=ms)
    for layout, batch, ms in [(Layout.EP, 1, 900), (Layout.EP, 8, 1000), (Layout.TP, 1, 500), (Layout.TP, 8, 1500)]
]
COSTS = CostModel(ranks=1, points=POINTS, switches=[SwitchPoint(to=Layout.TP, live=2, kv_tokens=8, ms=500)])


def shared(*, lost: bool = False, step: int = 3) -> StepReport:
    """Replica 0 is slow, replica 1 began half a second later; each of one rank, with prompts 0 to 3 and 4 to 7."""
    lanes, ended = [], []
    for replica, (lengths, began) in enumerate([(SLOW, 0.0), (QUICK, 0.5)]):
        own = step_report(step, lengths=lengths, switch_at=2)
        samples = [s.model_copy(update={"prompt": s.prompt + 4 * replica}) for s in own.samples]
        ends = [float(length) for length in lengths]
        times = SampleTimes(arrived_s=[0.0] * 4, ended_s=ends, ended_iteration=[length - 1 for length in lengths])
        own = own.model_copy(update={"samples": samples, "sample_times": times})
        gone = lost and replica == 1
        lanes.append(
            LaneOutcome(
                replica, f"node-{replica}", began, 4, replica, "it died" if gone else None, None if gone else own
            )
        )
        for number, length in enumerate(lengths):
            sample = Sample(0, [7] * length, None, None, None, "stop", None, 0, replica)
            ended.append((4 * replica + number, sample, 1))
    return merge(lanes, ended, step=step, policy_version=2, model="tiny", device="cpu", ranks=1, replicas=2)


def test_totals_are_sums_and_the_parts_are_those_of_the_slowest() -> None:
    report = shared()
    assert report.ranks == 2 and report.counts.samples == 8 and report.counts.output_tokens == sum(SLOW) + sum(QUICK)
    assert sum(p.tokens for p in report.timeline) == report.counts.output_tokens
    assert report.timeline[-1].live == 0 and report.timeline[0].layout == "EP"
    slow = step_report(3, lengths=SLOW, switch_at=2)
    d = report.durations_s
    assert (d.burst, d.switch, d.tail) == (slow.durations_s.burst, slow.durations_s.switch, slow.durations_s.tail)
    assert d.total == pytest.approx(d.burst + d.switch + d.tail + d.other) == pytest.approx(slow.durations_s.total)
    assert report.tokens_per_s == pytest.approx(report.counts.output_tokens / d.total)
    assert [(s.replica, s.t) for s in report.switches] == [(1, 2.5), (0, 3.0)]
    assert [s.rank for s in report.samples] == [0] * 4 + [1] * 4
    assert report.sample_times is not None and report.sample_times.ended_s == [*SLOW, *(0.5 + n for n in QUICK)]
    assert [lane.idle_s for lane in report.lanes] == [0.5, 0.5]  # its switch


def test_it_is_written_and_read(tmp_path: Path) -> None:
    report = shared()
    assert StepReport.load(report.write(tmp_path)) == report


def test_it_comes_apart_again() -> None:
    report = shared()
    for view, lengths in zip(views(report), [SLOW, QUICK], strict=True):
        own = step_report(3, lengths=lengths, switch_at=2)
        assert view.durations_s == own.durations_s and view.timeline == own.timeline and view.ranks == 1
        assert [s.output_tokens for s in view.samples] == list(lengths) and {s.rank for s in view.samples} == {0}
        assert view.counts.output_tokens == own.counts.output_tokens and not view.lanes
        assert [(s.t, s.live) for s in view.switches] == [(s.t, s.live) for s in own.switches]
    single = step_report(3)
    assert views(single) == [single]


def test_a_lost_replica() -> None:
    report = shared(lost=True)
    assert report.counts.samples == 8, "what had ended on it counts"
    lane = report.lanes[1]
    assert (lane.lost, lane.durations_s, lane.samples) == ("it died", None, 4)
    assert report.sample_times is None and report.counterfactual.reason is not None
    assert "a replica was lost" in report.counterfactual.reason and len(views(report)) == 1
    assert "lost" in step_line(report)
    text = page([report])
    assert "it died" in text and "with it the times of its samples" in text


def test_the_static_times_of_a_step_are_those_of_its_slowest_replica() -> None:
    costs = COSTS
    report = shared()
    parts = [counterfactual(view, costs) for view in views(report)]
    together = in_hindsight(report, costs)
    assert together.static_ep_s == max(part.static_ep_s for part in parts)
    assert together.measured_s == pytest.approx(
        sum(getattr(report.durations_s, n) for n in ("burst", "switch", "tail"))
    )
    single = step_report(3, lengths=SLOW)
    assert in_hindsight(single, costs) == counterfactual(single, costs)


def test_the_page_has_a_lane_for_each() -> None:
    text = page([shared(), shared(step=4), step_report(5)])
    assert text.count("Replica 1: live samples") == 2 and text.count("<h3>Replicas</h3>") == 2
    assert "node-1" in text and "in the colour of EP as long as one replica was in it" in text
    assert "Replicas" not in page([step_report(5)])


def test_the_terminal_and_the_tables(tmp_path: Path) -> None:
    shared().write(tmp_path)
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    report_run(tmp_path, console=console)
    text = console.export_text()
    assert "by replica" in text and all(len(line) <= 80 for line in text.splitlines() if "replica" in line)
    with (tmp_path / "report_switches.csv").open() as file:
        assert sorted(row["replica"] for row in csv.DictReader(file)) == ["0", "1"]
    line = step_line(shared())
    assert "and 1 more" in line and "replicas " in line
    assert "replicas" not in step_line(step_report(3))


point = st.tuples(st.floats(0.001, 1.0), st.integers(0, 50), st.integers(0, 50), st.integers(1, 4), st.booleans())
series = st.lists(point, max_size=40)


@given(lanes=st.lists(st.tuples(st.floats(0, 2), series), min_size=1, max_size=4), limit=st.integers(16, 40))
def test_merged_timelines_keep_tokens_and_time(lanes: list[tuple[float, list[tuple]]], limit: int) -> None:  # type: ignore[type-arg]
    given_, total = [], 0.0
    for began, rows in lanes:
        t, points = 0.0, []
        for step, live, tokens, iterations, ep in rows:
            t += step
            layout = "EP" if ep else "TP"
            ms = 1e3 * step / iterations
            points.append(
                TimelinePoint(t=t, layout=layout, live=live, tokens=tokens, iteration_ms=ms, iterations=iterations)
            )
        given_.append((began, points))
        total = max(total, began + t)
    merged = merged_timeline(given_, total, limit)
    assert len(merged) <= limit
    assert sum(p.tokens for p in merged) == sum(p.tokens for _, points in given_ for p in points)
    assert all(a.t < b.t for a, b in pairwise(merged))
    if any(points for _, points in given_):
        assert sum(p.iteration_ms * p.iterations for p in merged) / 1e3 <= total * (1 + 1e-9)
        assert merged[-1].live == sum(points[-1].live for _, points in given_ if points)
