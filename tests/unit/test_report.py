"""Step reports: totals, merging over ranks, files, schema, and the HTML page."""

import json
import random
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.engine.types import (
    CancelledSwitch,
    Iteration,
    SampleKey,
    SampleResult,
    StepOutcome,
    StepStats,
    SwitchRecord,
)
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.report import StepReport, build_report, installed_versions
from moebius.rollout.report_html import page, write_html
from moebius.rollout.report_types import TimelinePoint, schema_text
from moebius.rollout.timeline import AROUND, MAX_POINTS, thin
from moebius.rollout.types import LengthTrace

DOCS = Path(__file__).parents[2] / "docs"
PHASES = ["decide", "quiesce", "export", "gather", "reshard", "kv", "import", "activate"]


def outcomes(step=0, prompts=64, n=8, ranks=2, threshold=48, cancelled=False):
    """Outcomes of a made-up step with lognormal output lengths; iteration times grow with the live samples."""
    rng = random.Random(step)
    keys = [SampleKey(p, s) for p in range(prompts) for s in range(n)]
    lengths = {key: min(2000, max(4, int(rng.lognormvariate(5.6, 0.8)))) for key in keys}
    iterations, switch_at, t, live, parts = [], None, 0.05, len(keys), {"EP": 0.0, "TP": 0.0}
    layout, pause = "EP", 96.0
    for i in range(1, max(lengths.values()) + 1):
        if layout == "EP" and live <= threshold:
            switch_at, layout, moved = (i, t), "TP", live
            t += pause / 1e3
        ms = (5 + 0.02 * live if layout == "EP" else 3 + 0.045 * live) * rng.uniform(0.95, 1.15)
        t += ms / 1e3
        parts[layout] += ms / 1e3
        tokens, live = live, sum(length > i for length in lengths.values())
        iterations.append(Iteration(t, layout, live, tokens, ms))
    result = []
    for rank in range(ranks):
        stats = StepStats(rank, ranks, t + 0.02 * rank, parts["EP"], 0.0, parts["TP"], iterations=list(iterations))
        if switch_at:
            ms = dict(zip(PHASES, [0.2, 3.1, 6.0 + rank, 4.2, 40.0, 22.0 - rank, 14.0, 1.1], strict=True))
            by_rank = [moved // ranks + (r < moved % ranks) for r in range(ranks)]
            stats.switches = [
                SwitchRecord(
                    "TP", *switch_at, moved, by_rank, 9000, ms, pause - rank, 10**9, 10**8 + rank, 0.1, 0.4 + rank / 10
                )
            ]
            (switch,) = stats.switches
            switch.prepared, switch.staged_layers, switch.expert_layers = True, 12, 48
            switch.staged_bytes = 250 * 10**6
            stats.switch_s = pause / 1e3
        if cancelled:
            stats.cancelled = [CancelledSwitch(40, 0.9, 400, 'needs 900 pages, 512 <free> & "few"')]
        results = [
            SampleResult(
                key, [1] * lengths[key], None, None, "length" if lengths[key] == 2000 else "stop", None, 3, rank
            )
            for i, key in enumerate(keys)
            if i % ranks == rank
        ]
        result.append(StepOutcome(results, stats))
    return result


def report(step=0, **kwargs):
    given = {"policy_version": 3, "model": "tiny <moe>", "device": "cpu", "prompt_tokens": [10 + p for p in range(64)]}
    given |= {key: kwargs.pop(key) for key in list(kwargs) if key in ("prompt_tokens", "update_weights_s", "created")}
    return build_report(outcomes(step, **kwargs), step=step, **given)


def test_totals():
    made = outcomes()
    r = report(update_weights_s=1.25, created=datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC))
    tokens = sum(len(result.token_ids) for outcome in made for result in outcome.results)
    assert r.counts.output_tokens == tokens == sum(s.output_tokens for s in r.samples)
    assert (r.counts.prompts, r.counts.samples, r.counts.prompt_tokens) == (64, 512, sum(10 + p for p in range(64)))
    assert sum(r.counts.finish_reasons.values()) == 512
    assert r.counts.finish_reasons["abort"] == 0
    assert [(s.prompt, s.sample) for s in r.samples] == [(p, s) for p in range(64) for s in range(8)]
    assert sum(p.tokens for p in r.timeline) == tokens
    iterations = made[0].stats.iterations
    assert sum(p.iterations for p in r.timeline) == len(iterations) == sum(p.count for p in r.iteration_ms.values())
    assert sum(p.iteration_ms * p.iterations for p in r.timeline) == pytest.approx(sum(i.ms for i in iterations))
    d = r.durations_s
    assert d.total == max(outcome.stats.total_s for outcome in made)
    assert d.burst + d.switch + d.tail + d.other == pytest.approx(d.total)
    assert r.tokens_per_s == pytest.approx(tokens / d.total)
    assert r.created == "2025-01-02T03:04:05+00:00"
    assert r.update_weights_s == 1.25
    for p in r.iteration_ms.values():
        assert p.p50 <= p.p90 <= p.p99


def test_switch_is_merged_over_ranks():
    (switch,) = report().switches
    assert switch.phases_ms.export == 7.0
    assert switch.phases_ms.kv == 22.0
    assert switch.phases_ms.import_ == 14.0
    assert switch.pause_ms == 96.0
    assert switch.expert_bytes == 2 * 10**9
    assert (switch.staged_bytes, switch.staged_layers, switch.expert_layers) == (5 * 10**8, 12, 48)
    assert switch.kv_bytes == 2 * 10**8 + 1
    assert sum(switch.live_by_rank) == switch.live <= 48
    assert switch.kv_use_after == 0.5


def test_order_of_outcomes_does_not_matter():
    given = {
        "step": 0,
        "policy_version": 1,
        "model": "m",
        "device": "cpu",
        "prompt_tokens": dict.fromkeys(range(64), 4),
    }
    given["created"] = datetime.now(UTC)
    assert build_report(outcomes(), **given) == build_report(outcomes()[::-1], **given)


def test_empty_step():
    r = build_report(
        [StepOutcome([], StepStats(rank, 2)) for rank in range(2)],
        step=0,
        policy_version=0,
        model="m",
        device="cpu",
        prompt_tokens=[],
    )
    assert r.tokens_per_s == 0
    assert r.timeline == []
    assert r.iteration_ms == {}
    assert r.counts.samples == 0
    assert "Step 0" in page([r])


def test_inconsistent_outcomes_are_refused():
    given = {"step": 0, "policy_version": 1, "model": "m", "device": "cpu", "prompt_tokens": [4] * 64}
    with pytest.raises(BadInput, match="one outcome of each of 2 ranks, got \\[1\\]"):
        build_report(outcomes()[1:], **given)
    with pytest.raises(BadInput, match="of all ranks, got \\[\\]"):
        build_report([], **given)
    with pytest.raises(BadInput, match="no entry for prompt 5"):
        build_report(outcomes(), **given | {"prompt_tokens": [4] * 5})
    twice = outcomes()
    twice[1].results.append(twice[0].results[0])
    with pytest.raises(BadInput, match="prompt 0, sample 0 came back twice"):
        build_report(twice, **given)
    odd = outcomes()
    odd[1].stats.switches.clear()
    with pytest.raises(MoebiusError, match="different iterations"):
        build_report(odd, **given)
    odd = outcomes()
    odd[0].results[0].finish_reason = "eos"
    with pytest.raises(BadInput, match="prompt 0, sample 0: finish_reason"):
        build_report(odd, **given)
    odd = outcomes()
    odd[0].stats.iterations[0].layout = "DP"
    with pytest.raises(BadInput, match="layout must be EP or TP"):
        build_report(odd, **given)


def test_versions_are_those_installed():
    versions = installed_versions()
    assert re.match(r"3\.\d+\.\d+", versions["python"])
    assert all(versions.values())


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    limit=st.integers(16, MAX_POINTS),
    seed=st.integers(0, 1000),
)
def test_thinning_keeps_sums_and_switches(runs, limit, seed):
    rng = random.Random(seed)
    series, t = [], 0.0
    for k, length in enumerate(runs):
        for _ in range(length):
            t += (ms := rng.uniform(1, 30)) / 1e3
            series.append(
                TimelinePoint(
                    t=t,
                    layout="EP" if k % 2 == 0 else "TP",
                    live=1,
                    tokens=rng.randrange(99),
                    iteration_ms=ms,
                    iterations=1,
                )
            )
    out = thin(series, limit)
    assert len(out) <= limit
    assert sum(p.tokens for p in out) == sum(p.tokens for p in series)
    assert sum(p.iterations for p in out) == len(series)
    assert sum(p.iteration_ms * p.iterations for p in out) == pytest.approx(sum(p.iteration_ms for p in series))
    assert [p.t for p in out] == sorted(p.t for p in out)
    assert out[0] == series[0]
    assert out[-1] == series[-1]
    changes = [i for i in range(1, len(series)) if series[i].layout != series[i - 1].layout]
    if limit == MAX_POINTS or len(changes) == 1:
        for change in changes:
            for point in series[max(0, change - AROUND) : change + AROUND]:
                assert point in out


def test_thinning_uses_the_room_it_has():
    series = [TimelinePoint(t=i, layout="EP", live=1, tokens=1, iteration_ms=1, iterations=1) for i in range(20_000)]
    out = thin(series)
    assert 500 <= len(out) <= MAX_POINTS
    assert max(p.iterations for p in out) - min(p.iterations for p in out[1:-1]) <= 1


def test_thinning_many_changes_stays_within_the_limit():
    series = [
        TimelinePoint(t=i, layout="EP" if i // 7 % 2 else "TP", live=1, tokens=1, iteration_ms=1, iterations=1)
        for i in range(5000)
    ]
    out = thin(series)
    assert len(out) <= MAX_POINTS
    assert sum(p.tokens for p in out) == 5000


def test_write_and_load(tmp_path):
    r = report(7, cancelled=True)
    path = r.write(tmp_path / "new")
    assert path.name == "step_0007.json"
    assert [p.name for p in path.parent.iterdir()] == ["step_0007.json"]
    assert StepReport.load(path) == r
    assert len(r.timeline) <= MAX_POINTS
    assert LengthTrace.from_report(r).lengths[(0, 0)] == r.samples[0].output_tokens


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = report(1).write(tmp_path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk is full")

    monkeypatch.setattr("moebius.rollout.report_types.os.replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        report(1, threshold=9).write(tmp_path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d | {"schema_version": 2}, "schema_version is 2, this version reads 1"),
        (lambda d: [], "schema_version is None"),
        (lambda d: d | {"stepp": 2}, "unknown key 'stepp'; did you mean 'step'"),
        (
            lambda d: d | {"counts": d["counts"] | {"prompt": 1}},
            "in 'counts': unknown key 'prompt'; did you mean 'prompts'",
        ),
        (lambda d: {k: v for k, v in d.items() if k != "model"}, "model: required"),
        (lambda d: d | {"tokens_per_s": -1}, "tokens_per_s"),
    ],
)
def test_load_refuses(tmp_path, change, words):
    path = report(prompts=2, n=2).write(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(BadInput, match=words):
        StepReport.load(path)


def test_load_refuses_files_that_are_not_reports(tmp_path):
    (tmp_path / "step_0000.json").write_text('{"schema_version": 1, "st')
    with pytest.raises(BadInput, match="not valid JSON"):
        StepReport.load(tmp_path / "step_0000.json")
    with pytest.raises(BadInput, match="cannot be read"):
        StepReport.load(tmp_path / "step_0001.json")


def test_schema_file_is_current_and_fits():
    text = (DOCS / "step_report.schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "run: python -m moebius.rollout.report_types > docs/step_report.schema.json"
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(report(cancelled=True).model_dump_json())
    jsonschema.validate(data, schema)
    del data["switches"][0]["phases_ms"]["import"]
    data["switches"][0]["phases_ms"]["import_"] = 1.0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_every_field_is_documented():
    text = (DOCS / "reports.md").read_text(encoding="utf-8")
    schema = json.loads(schema_text())
    parts = [schema, *(part for part in schema["$defs"].values() if "properties" in part)]
    missing = [name for part in parts for name in part["properties"] if f"`{name}`" not in text]
    assert not missing


class _Links(HTMLParser):
    """Collects everything a browser would load, and checks that tags close."""

    def __init__(self):
        super().__init__()
        self.loads, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "object"):
            self.loads.append(tag)
        if tag not in ("meta", "br", "path", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag


def test_html_is_whole_and_self_contained(tmp_path):
    for step in range(9):
        report(step, cancelled=step == 2, threshold=0 if step == 3 else 48, update_weights_s=0.5).write(tmp_path)
    path = write_html(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 400_000
    parser = _Links()
    parser.feed(text)
    assert parser.loads == []
    assert parser.open == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    for svg in drawings:
        ElementTree.fromstring(svg)
    # Overview (twice, for wide and small screens), iteration times, lengths, updates, phases and KV use; per step a bar
    # (twice), live, tokens/s, lifelines and lengths; phases where there was a switch (not in step 3).
    assert len(drawings) == 7 + 9 * 6 + 8
    assert text.count("<tbody><tr>") == 2
    assert text.count("</tr>") == 10 + 9
    assert "tiny &lt;moe&gt;" in text
    assert "512 &lt;free&gt; &amp;" in text
    assert "experts 2.0 GB (500.0 MB ahead, 12 of 48 layers)" in text
    assert "<moe>" not in text
    assert not re.search(r"\bnan\b|\binf\b", text)


def test_html_of_many_steps_stays_small(tmp_path):
    many = [report(step, prompts=64) for step in range(3)]
    reports = [many[i % 3].model_copy(update={"step": i}) for i in range(150)]
    text = page(reports)
    assert len(text.encode()) < 320_000
    assert "Charts of the last 6 of 150 steps" in text


def test_html_needs_reports(tmp_path):
    with pytest.raises(BadInput, match="no step_"):
        write_html(tmp_path)
    (tmp_path / "step_0000.json").write_text("{")
    with pytest.raises(BadInput, match=r"step_0000\.json: not valid JSON"):
        write_html(tmp_path)
    assert not (tmp_path / "report.html").exists()
