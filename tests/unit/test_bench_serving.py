"""Traces of `moebius bench serving` and the numbers made from replays; no engine here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from moebius.engine.config import PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.bench import serving, serving_numbers, serving_traces
from moebius.rollout.bench.rank import Capacity
from moebius.rollout.bench.results import make_results
from moebius.rollout.bench.serving import ServingOptions
from moebius.rollout.bench.serving_rank import Answered, ServingRun, TimedInbox
from moebius.rollout.bench.serving_traces import Phase, Traffic
from moebius.rollout.errors import BadInput, MoebiusError

TRAFFIC = Traffic(
    (0.0, 0.5, 2.0, 3.0), (4, 5, 6, 7), (3, 1, 5, 5), (Phase("burst_1", 0.0, 1.0), Phase("quiet", 1.0, 4.0))
)
CAPACITY = Capacity({"EP": 100, "TP": 100}, 16, 2, 256, 64, 1000)


def answers(*delays: tuple[float, float]) -> list[Answered]:
    """By request of TRAFFIC: seconds from arrival to the first token, and from that to the last one."""
    pairs = enumerate(zip(TRAFFIC.at, delays, strict=True))
    return [
        Answered(i, at + first / 2, at + first, at + first + rest, TRAFFIC.lengths[i], "length")
        for i, (at, (first, rest)) in pairs
    ]


def run_of(*delays: tuple[float, float], layout: str = "TP", switches: Any = (), **parts: Any) -> ServingRun:
    records = [{"t": t, "to": to, "live": 3, "pause_ms": ms, "kv_tokens": 9} for t, to, ms in switches]
    return ServingRun(answers(*delays), layout, records, parts.get("cancelled", []), parts.get("iterations", []))


FAST = ((0.1, 0.2), (0.3, 0.0), (0.2, 0.4), (0.2, 0.8))
SLOW = ((0.2, 0.2), (0.6, 0.0), (0.2, 0.8), (0.2, 0.8))


def test_bursty_is_the_papers_trace() -> None:
    traffic = serving_traces.bursty(seed=1)
    assert len(traffic.at) == len(traffic.lengths) == serving_traces.PAPER_REQUESTS
    assert traffic.duration == 375 and list(traffic.at) == sorted(traffic.at)
    assert traffic.at[0] >= 0 and traffic.at[-1] < 375
    counts = [0, 0, 0, 0]
    for i in range(len(traffic.at)):
        counts[traffic.phase_of(i)] += 1
    seconds = [phase.end - phase.start for phase in traffic.phases]
    rates = [count / s for count, s in zip(counts, seconds, strict=True)]
    assert rates == [80, pytest.approx(3.1, abs=0.1), 120, pytest.approx(3.1, abs=0.1)]
    _, by_5_s = traffic.rates(75)
    assert all(0.2 < rate < 8 for rate in by_5_s[2:62]), "1 to 5 per second, and chance"
    assert max(by_5_s[2:62]) > 1.8 * min(by_5_s[2:62])
    assert {min(traffic.prompt_tokens), max(traffic.prompt_tokens)} == {300, 700}
    assert {min(traffic.lengths), max(traffic.lengths)} == {800, 1200}
    assert traffic == serving_traces.bursty(seed=1) != serving_traces.bursty(seed=2)


def test_bursty_scales() -> None:
    small = serving_traces.bursty(seed=1, time_scale=0.1, requests_scale=0.1, length_scale=0.01)
    assert small.duration == pytest.approx(37.5) and len(small.at) == pytest.approx(311, abs=2)
    assert sum(small.phase_of(i) == 2 for i in range(len(small.at))) == 120, "still 120 per second"
    assert min(small.prompt_tokens) >= 3 and max(small.prompt_tokens) <= 7
    assert min(small.lengths) >= 8 and max(small.lengths) <= 12


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.6805900,879,55
"""


def test_csv_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    traffic = serving_traces.read_csv(path)
    assert traffic.at == pytest.approx((0.0, 2.0, 4.314579), abs=1e-5), "by time, since the first one"
    assert traffic.prompt_tokens == (374, 879, 396) and traffic.lengths == (44, 55, 109)
    again = serving_traces.of_arrivals(serving_traces.arrivals_of(traffic), traffic.phases)
    assert again == traffic
    scaled = serving_traces.read_csv(path, first_s=3, time_scale=0.5, length_scale=0.1)
    assert scaled.at == pytest.approx((0.0, 1.0)) and scaled.prompt_tokens == (37, 88) and scaled.lengths == (4, 6)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Other\n" + "".join(f"{i / 4},5,6,x\n" for i in range(40)))
    assert len(serving_traces.read_csv(path, requests_scale=0.25).at) == 10
    with pytest.raises(BadInput, match="share of its requests"):
        serving_traces.read_csv(path, requests_scale=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "missing: TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n1,x,3\n", "line 3: not a request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "line 2: not a request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2: not a request"),
    ],
)
def test_wrong_csv_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        serving_traces.read_csv(path)
    with pytest.raises(BadInput, match="cannot be read"):
        serving_traces.read_csv(tmp_path / "none.csv")


def test_latencies_by_phase() -> None:
    found = serving_numbers.phase_numbers(TRAFFIC, answers(*FAST))
    assert found["burst_1"]["requests"] == found["quiet"]["requests"] == 2
    assert found["burst_1"]["ttft_mean_s"] == pytest.approx(0.2)
    assert found["burst_1"]["ttft_p99_s"] == pytest.approx(0.1 + 0.99 * 0.2)
    assert found["burst_1"]["tpot_mean_ms"] == pytest.approx(100), "a request of one token has none"
    assert found["quiet"]["tpot_mean_ms"] == pytest.approx(150)
    assert found["quiet"]["tpot_p50_ms"] == pytest.approx(150)


def test_running_requests_and_time_in_tp() -> None:
    found = answers(*FAST)  # 0 to 0.3, 0.5 to 0.8, 2 to 2.6, 3 to 4
    assert serving_numbers.running(TRAFFIC, found, [0.0, 0.4, 0.6, 2.5, 2.7, 3.5, 5.0]) == [1, 0, 1, 1, 0, 1, 0]
    assert serving_numbers.peak(TRAFFIC, answers((1.0, 0.5), *SLOW[1:])) == 2
    run = run_of(*FAST, layout="TP", switches=[(-0.2, "TP", 1), (0.5, "EP", 2), (2.0, "TP", 3)])
    assert serving_numbers.tp_spans(run, 4.0) == [(0.0, 0.5), (2.0, 4.0)]
    assert [serving_numbers.in_tp(run, phase) for phase in TRAFFIC.phases] == pytest.approx([0.5, 2 / 3])
    assert serving_numbers.tp_spans(run_of(*FAST, layout="EP"), 4.0) == []


def test_gaps_are_against_the_better_static_layout() -> None:
    lanes = {
        "static_ep": serving_numbers.phase_numbers(TRAFFIC, answers(*FAST)),
        "static_tp": serving_numbers.phase_numbers(TRAFFIC, answers(*SLOW)),
        "interactive": serving_numbers.phase_numbers(TRAFFIC, answers(*SLOW[:2], *FAST[2:])),
    }
    gaps = serving_numbers.gaps(lanes)
    assert gaps.keys() == {
        f"gap_{part}_pct" for part in ("burst_1_ttft_mean", "burst_1_ttft_p99", "quiet_tpot_mean", "quiet_tpot_p99")
    }
    assert gaps["gap_burst_1_ttft_mean_pct"] == pytest.approx(100)
    assert gaps["gap_quiet_tpot_mean_pct"] == pytest.approx(0)
    assert serving_numbers.gaps({"interactive": lanes["interactive"]}) == {}


def test_ranks_are_merged_and_lost_requests_noticed() -> None:
    first = run_of(*FAST, switches=[(0.5, "EP", 2.0)])
    second = run_of(*FAST, switches=[(0.5, "EP", 5.0)])
    first.answered, second.answered = first.answered[1::2], second.answered[::2]
    run = serving.merged([first, second], TRAFFIC)
    assert [a.index for a in run.answered] == [0, 1, 2, 3] and run.switches[0]["pause_ms"] == 5.0
    with pytest.raises(MoebiusError, match="4 requests were sent, 2 ended"):
        serving.merged([run_of(*FAST), run_of(*FAST)][:1] and [second], TRAFFIC)
    wrong = run_of(*FAST)
    wrong.answered[2].reason = "error: no"
    with pytest.raises(MoebiusError, match="error: no"):
        serving.merged([wrong], TRAFFIC)


def test_summary_and_pictures(tmp_path: Path) -> None:
    iterations = [(0.5, "EP", 3, 3, 10.0), (0.7, "EP", 3, 3, 20.0), (2.0, "TP", 1, 1, 5.0)]
    runs = {
        "static_ep": [run_of(*FAST, layout="EP", iterations=iterations)],
        "static_tp": [run_of(*SLOW)],
        "interactive": [run_of(*FAST, switches=[(0.5, "EP", 2.0), (2.0, "TP", 7.0)], cancelled=[(3.0, "no room")])],
    }
    options = ServingOptions(threshold=9)
    policies = serving.policies_of(options, PolicyConfig(threshold_low=20, threshold=30).model_dump())
    assert policies["interactive"].threshold == 9 and policies["interactive"].low == pytest.approx(7.2)
    notes: list[str] = []
    numbers = serving.summarise(TRAFFIC, runs, policies, CAPACITY, 2, notes)
    assert numbers["burst_1_static_ep_iteration_ms"] == 15 and numbers["quiet_static_ep_iteration_ms"] == 5
    assert numbers["switches"] == 2 and numbers["pause_max_ms"] == 7.0 and numbers["switches_refused"] == 1
    assert numbers["worst_gap_pct"] == pytest.approx(0)
    assert numbers["burst_1_requests"] == 2 and numbers["burst_1_in_tp_pct"] == pytest.approx(50)
    assert notes == ["a switch was refused: no room"]
    curves, picture, panels = serving.pictures(TRAFFIC, {name: of_lane[0] for name, of_lane in runs.items()})
    assert panels[0].picture.marks == {"switch to EP": [0.5], "switch to TP": [2.0]}
    assert picture.spans == {"interactive is in TP": [(0.0, 0.5), (2.0, 4.0)]}
    results = make_results(
        "serving", command="x", options={}, results=numbers, curves=curves, picture=picture, panels=panels
    )
    results.write(tmp_path)
    assert (tmp_path / "serving.png").stat().st_size > 20_000


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match=r"the trace needs 1[0-9]{3} tokens per request, the engine takes 64"):
        serving.check_fits(serving_traces.bursty(seed=0), CAPACITY)
    few = Capacity({"EP": 100, "TP": 0}, 16, 2, 256, 64, 1000)
    with pytest.raises(BadInput, match="in TP it takes 1 KV pages"):
        serving.check_fits(TRAFFIC, few)
    with pytest.raises(BadInput, match="--file"):
        serving.traffic_of(ServingOptions(trace="csv"))
    with pytest.raises(BadInput, match="above threshold"):
        serving.policies_of(ServingOptions(threshold=2, threshold_low=3), PolicyConfig().model_dump())


def test_requests_come_at_their_time() -> None:
    now = time.perf_counter()
    requests = [SampleRequest(SampleKey(i, 0), [1], {}, i) for i in range(3)]
    inbox = TimedInbox([(now + 0.1, requests[2]), (now - 1, requests[1]), (now - 2, requests[0])])
    taken = inbox.take()
    assert taken.requests == requests[:2] and taken.is_open
    assert inbox.take().requests == []
    time.sleep(max(0.0, now + 0.11 - time.perf_counter()))
    taken = inbox.take()
    assert taken.requests == requests[2:] and not taken.is_open
    assert inbox.take().requests == [] and inbox.seen() == {request.key for request in requests}
