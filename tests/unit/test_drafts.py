"""Drafts from earlier text, and how many of them are verified: pure, against plain definitions."""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from rich.console import Console
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from moebius.engine.costs import CostModel, CostPoint, SwitchPoint
from moebius.engine.draft_index import DraftIndex
from moebius.engine.draft_lengths import MARGIN, RETRY, Acceptance, best_gain, best_lengths, roofline
from moebius.engine.draft_library import DraftLibrary, scope_of
from moebius.engine.layout import Layout
from moebius.engine.outputs import single_tokens
from moebius.engine.predict import outlook
from moebius.engine.survival import LiveForecast
from moebius.engine.tail_drafts import plain_seconds
from moebius.engine.types import DraftStats, SampleKey, SampleResult
from moebius.rollout.report_drafts import DraftsEntry, drafts_entry, drafts_words, merged_drafts
from moebius.rollout.report_files import report_run
from moebius.rollout.report_types import StepReport
from tests.unit.reports import step_report


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def index_of(*sequences: list[int], scopes: list[int] | None = None, capacity: int = 1 << 10) -> DraftIndex:
    """Growing sequences, each in the slot of its number."""
    index = DraftIndex(capacity, len(sequences))
    table = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int32)
    for slot, tokens in enumerate(sequences):
        index.begin(slot, scopes[slot] if scopes else 0)
        table[slot, : len(tokens)] = tokens
    slots = np.arange(len(sequences))
    index.extend(slots, table, slots, ints([len(tokens) for tokens in sequences]))
    return index


def draft(index: DraftIndex, slot: int, limit: int = 8) -> list[int]:
    found = index.drafts(ints([slot]), ints([limit]), 8)
    return found.tokens[0, : found.counts[0]].tolist()


def test_goes_on_as_an_earlier_text_did() -> None:
    index = index_of([90, 3, 4])
    index.add(0, np.array([1, 2, 3, 4, 5, 6, 7], dtype=np.int32))
    assert draft(index, 0) == []  # the text came after: nothing stands before the sequence's end in its chain
    index = DraftIndex(64, 1)
    index.add(0, np.array([1, 2, 3, 4, 5, 6, 7], dtype=np.int32))
    index.begin(0, 0)
    index.extend(ints([0]), np.array([[90, 3, 4]], dtype=np.int32), ints([0]), ints([3]))
    assert draft(index, 0) == [5, 6, 7]
    assert draft(index, 0, limit=2) == [5, 6]
    assert draft(index, 0, limit=0) == []


def test_goes_on_with_itself_round_and_round() -> None:
    assert draft(index_of([20, 21, 22, 20, 21]), 0) == [22, 20, 21, 22, 20, 21, 22, 20]


def test_the_longer_match_wins_and_equal_ones_are_counted() -> None:
    index = DraftIndex(1 << 10, 1)
    for text in ([1, 2, 3, 4, 50], [9, 3, 4, 60], [8, 3, 4, 60]):
        index.add(0, np.array(text, dtype=np.int32))
    index.begin(0, 0)
    table = np.array([[1, 2, 3, 4, 0, 0], [7, 3, 4, 0, 0, 0]], dtype=np.int32)
    index.extend(ints([0]), table, ints([0]), ints([4]))
    assert draft(index, 0) == [50]
    index.begin(0, 0)
    index.extend(ints([0]), table, ints([1]), ints([3]))
    assert draft(index, 0) == [60]


def test_long_matches_are_found_behind_many_newer_short_ones() -> None:
    index = DraftIndex(1 << 10, 1)
    for text in [[1, 2, 3, 4, 5, 60]] * 3 + [[9, 4, 5, 70]] * 40:
        index.add(0, np.array(text, dtype=np.int32))
    index.begin(0, 0)
    table = np.array([[1, 2, 3, 4, 5], [8, 3, 4, 5, 0]], dtype=np.int32)
    index.extend(ints([0]), table, ints([0]), ints([5]))
    assert draft(index, 0, limit=1) == [60]
    index.begin(0, 0)
    index.extend(ints([0]), table, ints([1]), ints([4]))
    assert draft(index, 0, limit=1) == [70], "without a long match the short ones count"


def test_scopes_keep_texts_apart() -> None:
    index = DraftIndex(1 << 10, 2)
    index.add(1, np.array([3, 4, 5], dtype=np.int32))
    index.begin(0, 1)
    index.begin(1, 2)
    table = np.array([[3, 4], [3, 4]], dtype=np.int32)
    index.extend(ints([0, 1]), table, ints([0, 1]), ints([2, 2]))
    assert draft(index, 0) == [5]
    assert draft(index, 1) == []


def test_growing_sequences_learn_from_each_other() -> None:
    index = DraftIndex(1 << 10, 2)
    index.begin(0, 0)
    index.begin(1, 0)
    table = np.array([[1, 2, 3, 4, 5, 6], [9, 2, 3, 0, 0, 0]], dtype=np.int32)
    for length in range(1, 7):
        index.extend(ints([0, 1]), table, ints([0, 1]), ints([length, min(length, 3)]))
    assert draft(index, 1) == [4, 5, 6]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=5),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    capacity=st.sampled_from([16, 32, 1 << 10]),
)
def test_drafts_are_continuations_that_stand_in_the_ring(
    texts: list[list[int]], tail: list[int], capacity: int
) -> None:
    """Whatever was overwritten: the first drafted token follows the last two in some text, and results repeat."""
    index = DraftIndex(capacity, 1)
    for text in texts:
        index.add(0, np.array(text, dtype=np.int32))
    index.begin(0, 0)
    index.extend(ints([0]), np.array([tail], dtype=np.int32), ints([0]), ints([len(tail)]))
    found = draft(index, 0)
    if found:
        followers = {
            text[i + 2] for text in [*texts, tail] for i in range(len(text) - 2) if text[i : i + 2] == tail[-2:]
        }
        assert found[0] in followers
    elif capacity == 1 << 10 and len(tail) > 2:
        assert all(text[i : i + 2] != tail[-2:] for text in [*texts, tail] for i in range(len(text) - 2))
    assert found == draft(index, 0)


def test_capacity_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        DraftIndex(1000, 1)


# ---- how many are verified --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    chance=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=3),
    counts=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    slope=st.floats(0, 2),
    room=st.integers(0, 9),
)
def test_lengths_are_the_best_of_all(chance: list[list[float]], counts: list[int], slope: float, room: int) -> None:
    rows = len(chance)
    ms = 1 + slope * np.arange(room + 1)
    table, have = np.array(chance), np.array(counts[:rows], dtype=np.int32)

    def rate(lengths: tuple[int, ...]) -> float:
        gain = sum(float(np.prod(table[i, : j + 1])) for i in range(rows) for j in range(lengths[i]))
        return (rows + gain) / float(ms[sum(lengths)])

    found = tuple(best_lengths(table, have, ms).tolist())
    assert all(length <= have[i] for i, length in enumerate(found))
    assert sum(found) <= room
    best = max(rate(c) for c in itertools.product(*(range(n + 1) for n in have)) if sum(c) <= room)
    assert rate(found) >= best / (1 + MARGIN) - 1e-9


def test_nothing_is_verified_where_it_does_not_pay() -> None:
    chance, counts = np.full((4, 5), 0.5), np.full(4, 5, dtype=np.int32)
    dear = 1.0 + np.arange(21)  # every token costs as much as the whole iteration without drafts
    assert best_lengths(chance, counts, dear).tolist() == [0, 0, 0, 0]
    free = np.ones(21)
    assert best_lengths(chance, counts, free).tolist() == [5, 5, 5, 5]
    assert best_lengths(np.zeros((4, 5)), counts, free).tolist() == [0, 0, 0, 0]


def test_requests_that_are_right_get_more() -> None:
    ms = 1 + 0.1 * np.arange(17)
    lengths = best_lengths(np.array([[0.95] * 8, [0.3] * 8]), np.full(2, 8, dtype=np.int32), ms)
    assert lengths[0] > lengths[1]


def test_ratio_follows_what_was_accepted() -> None:
    seen, slots = Acceptance(2), ints([0, 1])
    assert seen.ratio(slots).tolist() == [1, 1]
    chance = np.full((2, 4), 0.8)
    for _ in range(200):
        seen.judge(slots, chance, ints([4, 4]), ints([4, 0]))
    right, wrong = seen.ratio(slots)
    assert right == pytest.approx(1 / 0.8, rel=0.05)
    assert wrong < 0.1
    seen.begin(1)
    assert seen.ratio(slots)[1] == 1


def test_only_judged_tokens_count() -> None:
    """The second of four was wrong: the last two tell nothing."""
    seen, slot = Acceptance(1), ints([0])
    seen.judge(slot, np.full((1, 4), 0.5), ints([4]), ints([1]))
    assert seen.ratio(slot)[0] == pytest.approx((1 + 2) / (2 * 0.5 + 2))


def test_a_request_without_drafts_is_tried_again() -> None:
    seen, slot = Acceptance(1), ints([0])
    for _ in range(RETRY):
        assert not seen.is_due(slot)[0]
        seen.judge(slot, np.zeros((1, 4)), ints([0]), ints([0]))
    assert seen.is_due(slot)[0]
    seen.judge(slot, np.full((1, 4), 0.5), ints([1]), ints([0]))
    assert not seen.is_due(slot)[0]


def test_roofline_counts_experts_that_tokens_choose() -> None:
    ms = roofline(dense=1e9, experts=4, chosen=1, expert_bytes=8e9, kv_bytes_per_token=1e6)
    found = ms(2, 500.0, ints([1, 2, 10_000]))
    assert found == pytest.approx([1 + 2 + 1, 1 + 8 * (1 - 0.75**2) + 1, 1 + 8 + 1])
    fixed = roofline(dense=1e9, experts=4, chosen=1, expert_bytes=8e9, kv_bytes_per_token=1e6, fixed=3e9)
    assert fixed(2, 500.0, ints([1, 2, 10_000])) == pytest.approx(found + 3)


def test_the_gain_of_the_best_length() -> None:
    chance, counts, free = np.full((2, 3), 0.5), np.full(2, 3, dtype=np.int32), np.ones(7)
    assert best_gain(chance, counts, free) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert best_gain(chance, counts, 1.0 + np.arange(7)) == 1
    assert best_gain(np.zeros((2, 3)), counts, free) == 1
    assert best_gain(np.zeros((0, 3)), np.zeros(0, dtype=np.int32), free) == 1


def test_a_request_of_which_little_is_known_is_taken_to_be_like_the_others() -> None:
    seen, chance = Acceptance(9), np.full((8, 4), 0.9)
    for _ in range(3):
        seen.judge(np.arange(8), chance, np.full(8, 4), np.zeros(8, dtype=np.int64))
    assert seen.ratio(ints([8]))[0] < 0.15, "nothing was right so far: the ninth is not hoped to be"
    assert seen.judged == pytest.approx(0.9 * 8 * 3, rel=0.1)
    before = seen.ratio(ints([8]))[0]
    seen.fade(3)
    assert seen.judged == pytest.approx(3) and before < seen.ratio(ints([8]))[0] < 0.5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=2, max_size=6))
def test_appending_is_extending(parts: list[list[int]]) -> None:
    """Two sequences that grow in turn."""
    one, other = DraftIndex(1 << 8, 2), DraftIndex(1 << 8, 2)
    texts: list[list[int]] = [[], []]
    table = np.zeros((2, 64), dtype=np.int32)
    both = ints([0, 1])
    for a, b in itertools.pairwise(parts):
        other.append(both, np.array([*a, *b], dtype=np.int32), ints([len(a), len(a) + len(b)]))
        for row, new in enumerate((a, b)):
            table[row, len(texts[row]) : len(texts[row]) + len(new)] = new
            texts[row] += new
        one.extend(both, table, both, ints([len(text) for text in texts]))
    for name in ("text", "links", "heads", "last", "known", "clock"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


# ---- finished samples ---------------------------------------------------------------------------------------------


def test_library_keeps_what_was_used_last_and_its_bound() -> None:
    library = DraftLibrary("siblings", 10)
    library.add([1, 2], [5] * 4)
    library.add([3], [6] * 4)
    library.add([1, 2], [7] * 2)  # full; the first prompt is now the newer one
    library.add([4], [8] * 3)
    assert library.tokens == 9
    scopes = {scope_of("siblings", prompt, "") for prompt in ([1, 2], [3], [4])}
    assert [tokens.tolist() for _, tokens in library.of(scopes, 100)] == [[5] * 4, [8] * 3, [7] * 2]
    assert [tokens.tolist() for _, tokens in library.of({scope_of("siblings", [1, 2], "")}, 5)] == [[7, 7]]
    library.add([4], [9] * 11)  # longer than all of it
    assert library.tokens == 9


def test_scopes_are_of_prompt_request_or_all() -> None:
    assert scope_of("siblings", [1, 2], "a") == scope_of("siblings", (1, 2), "b") != scope_of("siblings", [1], "a")
    assert scope_of("ngram", [1, 2], "a") == scope_of("ngram", [3], "a") != scope_of("ngram", [1, 2], "b")
    assert scope_of("suffix", [1], "a") == scope_of("suffix", [2], "b")
    assert all(0 <= scope_of("siblings", [n], "") < 1 << 63 for n in range(100))
    everything = DraftLibrary("suffix", 100)
    everything.add([1], [5, 6])
    everything.add([2], [7])
    assert [tokens.tolist() for _, tokens in everything.of({0}, 100)] == [[5, 6], [7]]
    nothing = DraftLibrary("ngram", 100)
    nothing.add([1], [5, 6])
    assert nothing.tokens == 0


def test_seconds_of_a_tail_without_drafts() -> None:
    """Lengths 2, 2 and 5: two iterations of three samples, then three of one."""
    points = [CostPoint(layout=layout, batch=n, context=0, ms=10 * n) for layout in Layout for n in (1, 2, 3)]
    costs = CostModel(ranks=2, points=points)

    def cost(requests: int, context: float, tokens: np.ndarray) -> np.ndarray:
        return costs.ms(Layout.TP, tokens, context)

    assert plain_seconds(cost, [2, 5, 2, 0]) == pytest.approx((2 * 30 + 3 * 10) / 1e3)
    assert plain_seconds(cost, []) == 0


# ---- in reports ---------------------------------------------------------------------------------------------------


def entry(**changes: object) -> DraftsEntry:
    stats = DraftStats("siblings", [10, 6], [6, 3], 20, 9, 7, 24, 15, plain_s=4.0, ahead=2, changes=1)
    results = [
        SampleResult(SampleKey(0, s), [1], None, None, "stop", None, 0, 0, drafted=9, accepted=4) for s in (0, 1)
    ]
    found = drafts_entry(stats, results, 2.5)
    assert found is not None
    return found.model_copy(update=changes)


def test_report_entry_and_its_words() -> None:
    found = entry()
    assert found.tokens_per_iteration == 24 / 15 and found.saved_s == 1.5
    assert found.drafted_by_sample == [9, 9] and found.accepted_by_sample == [4, 4]
    assert drafts_words(found) == (
        "drafts (siblings): 1.60 tokens per sample and iteration of the tail; 9 of 20 drafted tokens right; "
        "by position 60, 50 %; 2 of 9 iterations without; about 1.50 s saved"
    )
    assert drafts_words(entry(saved_s=-0.25)).endswith("about 0.25 s lost")
    assert drafts_words(entry(saved_s=None)).endswith("by position 60, 50 %; 2 of 9 iterations without")
    assert drafts_words(entry(problem="drafts are off")) == "drafts (siblings): drafts are off"
    assert "none verified in 9 iterations" in drafts_words(entry(drafted=0))
    assert drafts_entry(None, [], 1.0) is None


def test_replicas_together() -> None:
    other = entry(tokens=10, tokens_per_iteration=1.0, verified=[4, 0], accepted=[0, 0], drafted=8)
    both = merged_drafts([entry(), other])
    assert both is not None
    assert (both.drafted, both.verified, both.accepted, both.tokens) == (28, [14, 6], [6, 3], 34)
    assert both.tokens_per_iteration == pytest.approx(34 / 25)
    assert both.plain_s is None and both.drafted_by_sample is None
    assert merged_drafts([]) is None


def test_page_and_file_tell_of_drafts(tmp_path: Path) -> None:
    report = step_report(0, switch_at=2).model_copy(update={"drafts": entry()})
    report.write(tmp_path)
    assert StepReport.load(tmp_path / "step_0000.json").drafts == entry()
    console = Console(record=True, width=200)
    page = report_run(tmp_path, console=console).read_text(encoding="utf-8")
    assert drafts_words(entry()) in page
    assert f"step 0, {drafts_words(entry())}" in console.export_text()


# ---- for the policy -----------------------------------------------------------------------------------------------


class Lasting:
    """As many samples run for so many iterations, and then none."""

    def __init__(self, live: int, iterations: int) -> None:
        self.live, self.iterations = live, iterations

    def forecast(self, offsets: np.ndarray) -> LiveForecast:
        on = (offsets < self.iterations).astype(float)
        return LiveForecast(live=self.live * on, any=on)


def test_a_faster_tail_pays_where_a_plain_one_does_not() -> None:
    """Both layouts take 10 ms, 100 iterations are left, the switch takes 100 ms; twice as fast, TP saves 500 ms."""
    points = [CostPoint(layout=layout, batch=n, context=0, ms=10) for layout in Layout for n in (1, 64)]
    costs = CostModel(ranks=2, points=points, switches=[SwitchPoint(to=Layout.TP, live=0, kv_tokens=0, ms=100)])
    plain, drafts = (outlook(costs, Lasting(8, 100), context=10, horizon=200, tail_speed=s) for s in (1.0, 2.0))
    assert not plain.pays and drafts.pays
    assert drafts.stay_ms == plain.stay_ms
    assert drafts.saved_ms == pytest.approx(drafts.stay_ms / 2)


# ---- outputs of several tokens ------------------------------------------------------------------------------------


def test_an_output_taken_apart() -> None:
    lists = LogprobsLists(np.array([[7], [8], [9]]), np.array([[-1.0], [-2.0], [-3.0]]), np.array([0, 1, 2]))
    routes = np.arange(6).reshape(3, 1, 2)
    whole = EngineCoreOutput("r", [7, 8, 9], lists, finish_reason=FinishReason.LENGTH, routed_experts=routes)
    parts = single_tokens(whole)
    assert [part.new_token_ids for part in parts] == [[7], [8], [9]]
    assert [part.finish_reason for part in parts] == [None, None, FinishReason.LENGTH]
    assert [part.new_logprobs.logprobs.tolist() for part in parts if part.new_logprobs] == [
        [[-1.0]],
        [[-2.0]],
        [[-3.0]],
    ]
    assert [part.routed_experts.tolist() for part in parts] == [[[[0, 1]]], [[[2, 3]]], [[[4, 5]]]]
    assert whole.new_token_ids == [7, 8, 9] and whole.finish_reason is FinishReason.LENGTH
