"""The drafter by itself, with a stand-in for vLLM's runner: slots, room, tally; equal inputs give equal drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moebius.engine.draft_index import DraftIndex
from moebius.engine.speculation import DraftPass, TailDrafter
from moebius.engine.tail_modes import drop_drafts

WIDTH, LONGEST = 4, 64


class Bench:
    """A drafter and the requests it sees; every request's text is known beforehand."""

    def __init__(self, slots: int = 4, budget: int = 100) -> None:
        scheduling = SimpleNamespace(max_num_scheduled_tokens=budget, max_num_batched_tokens=budget, max_num_seqs=slots)
        config: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=WIDTH),
            model_config=SimpleNamespace(max_model_len=LONGEST),
            scheduler_config=scheduling,
        )
        self.drafter = TailDrafter(config)
        self.tracked = False
        metadata = SimpleNamespace(
            thinking_budget_state_holder=SimpleNamespace(has_tracked_requests=lambda: self.tracked)
        )
        self.batch = SimpleNamespace(req_ids=[], sampling_metadata=metadata)
        self.verified: list[int] | None = None
        runner: Any = SimpleNamespace(input_batch=self.batch, requests={})
        self.drafter.runner, self.drafter.mode = runner, "siblings"
        self.drafter._verifier = SimpleNamespace(take_drafted=self._take)  # type: ignore[assignment]
        self.texts: dict[str, list[int]] = {}

    def _take(self) -> list[int] | None:
        taken, self.verified = self.verified, None
        return taken

    def add(self, name: str, text: list[int], prompt: int = 2, most: int = 50) -> None:
        self.texts[name] = text[:LONGEST]
        self.drafter.runner.requests[name] = SimpleNamespace(  # type: ignore[assignment]
            prompt_token_ids=text[:prompt],
            num_prompt_tokens=prompt,
            sampling_params=SimpleNamespace(max_tokens=most),
        )

    def drop(self, name: str) -> None:
        del self.drafter.runner.requests[name]

    def propose(self, lengths: dict[str, int], sampled: dict[str, int] | None = None) -> list[list[int]]:
        """Drafts for requests that have these many tokens now, of which so many (else 1) are new."""
        self.batch.req_ids = list(lengths)
        table = np.zeros((len(lengths), LONGEST), dtype=np.int32)
        new = []
        for row, (name, length) in enumerate(lengths.items()):
            table[row, :length] = self.texts[name][:length]
            new.append(self.texts[name][length - (sampled or {}).get(name, 1) : length])
        return self.drafter.propose(new, np.array(list(lengths.values()), dtype=np.int32), table)


def begun(**changes: int) -> Bench:
    bench = Bench(**changes)
    bench.drafter.begin(DraftIndex(1 << 12, bench.drafter.slots), {})
    return bench


ROUND = [1, 2, 5, 6, 7] * 13  # goes round: the next tokens are known after the first turn


def test_no_drafts_before_texts_are_there_and_after_the_end() -> None:
    bench = Bench()
    bench.add("a", ROUND)
    assert bench.propose({"a": 12}) == [[]]
    bench.drafter.begin(DraftIndex(1 << 12, 4), {})
    assert bench.propose({"a": 13}) == [ROUND[13:17]]
    bench.drafter.end()
    assert bench.propose({"a": 14}) == [[]]
    assert bench.drafter.take_tally().tokens == 3
    assert bench.drafter.take_tally().tokens == 0


def test_drafts_end_where_the_request_must() -> None:
    bench = begun()
    bench.add("a", ROUND, prompt=2, most=14)  # ends with 16 tokens at the latest
    assert [len(bench.propose({"a": length})[0]) for length in (11, 12, 13, 14, 15)] == [4, 3, 2, 1, 0]
    bench.add("b", ROUND, most=1000)
    assert [len(bench.propose({"b": length})[0]) for length in (59, 61, 63)] == [4, 2, 0]


def test_every_running_request_keeps_room_for_its_token() -> None:
    bench = begun(budget=7)
    for name in "abc":
        bench.add(name, ROUND)
    drafts = bench.propose(dict.fromkeys("abc", 12))
    assert sum(len(draft) for draft in drafts) == 4, "three tokens of their own and four of drafts"
    bench.drafter.cost = lambda requests, context, tokens: np.ones(len(tokens))
    assert sum(len(draft) for draft in bench.propose(dict.fromkeys("abc", 13))) == 4


def test_partial_prompts_and_thinking_budgets_get_none() -> None:
    bench = begun()
    bench.add("a", ROUND)
    bench.add("b", ROUND)
    assert [len(d) for d in bench.propose({"a": 12, "b": 12}, {"b": 0})] == [4, 0]
    bench.tracked = True
    assert bench.propose({"a": 13, "b": 13}) == [[], []]


def test_slots_follow_requests_that_come_go_and_wait() -> None:
    bench = begun(slots=2)
    for name in "abcd":
        bench.add(name, ROUND)
    bench.propose({"a": 12, "b": 12})
    bench.drop("a")
    assert len(bench.propose({"b": 13, "c": 12})[1]) == 4  # a has ended, c takes its slot
    assert len(bench.propose({"c": 13, "d": 12})[1]) == 4  # b waits (preempted): d takes its slot
    assert len(bench.propose({"d": 13, "b": 14})[1]) == 4
    assert len(bench.propose({"b": 15, "c": 14})[1]) == 4


def test_tally_counts_by_position_and_request() -> None:
    bench = begun()
    bench.add("a", ROUND)
    bench.add("b", ROUND)
    bench.propose({"a": 12, "b": 12})
    bench.verified = [4, 2]
    bench.propose({"a": 15, "b": 15}, {"a": 3, "b": 3})  # two of four right; both of two right
    tally = bench.drafter.take_tally()
    assert tally.verified == [2, 2, 1, 0] and tally.accepted == [2, 2, 0, 0]
    assert (tally.drafted, tally.tokens, tally.rows, tally.with_drafts, tally.iterations) == (6, 8, 4, 1, 2)
    mine = tally.by_request["a"]
    assert (mine.drafted, mine.accepted) == (4, 2)


def test_what_an_iteration_was() -> None:
    bench = begun()
    bench.add("a", ROUND)
    bench.add("b", ROUND)
    bench.propose({"a": 12, "b": 14})
    assert bench.drafter.take_pass() == DraftPass(2, 0, 0.0), "nothing had been drafted for it"
    bench.verified = [4, 2]
    bench.propose({"a": 17, "b": 15}, {"a": 5})
    assert bench.drafter.take_pass() == DraftPass(2, 6, 13.0)
    assert bench.drafter.take_pass() is None


def test_too_many_samples_get_none_and_rows_are_bounded() -> None:
    bench = begun()
    for name in "abc":
        bench.add(name, ROUND)
    bench.drafter.max_samples = 2
    assert bench.propose(dict.fromkeys("abc", 12)) == [[], [], []]
    assert all(bench.propose(dict.fromkeys("ab", 13)))
    bench.drafter.max_samples, bench.drafter.max_rows = 3, 8
    assert sum(len(draft) for draft in bench.propose(dict.fromkeys("abc", 14))) == 8 - 3


def test_drafts_fill_the_graph_they_run_in() -> None:
    """The first drafted token pays for 16 rows; those that fit them cost no more."""
    bench = begun()
    bench.drafter.cost = lambda requests, context, tokens: 1.0 + 0.1 * tokens
    bench.drafter.sizes = np.array([8, 16])
    assert bench.drafter.ms(4, 0.0, 8).tolist() == pytest.approx([1.4, *[1.8] * 4, *[2.6] * 4])
    assert [bench.drafter.padded(n) for n in (5, 8, 9, 40)] == [8, 8, 16, 40]


def probe(bench: Bench, length: int, names: str = "ab") -> tuple[float, float]:
    requests = [SimpleNamespace(request_id=name, _all_token_ids=bench.texts[name][:length]) for name in names]
    return bench.drafter.probe(requests)


def test_guesses_are_judged_by_what_was_sampled_since() -> None:
    """A text that goes round is guessed right; one that stops doing so is not."""
    bench = begun()
    bench.drafter.cost = lambda requests, context, tokens: np.ones(len(tokens))
    turned = [*ROUND[:30], *([9] * 34)]
    for name, text in (("a", ROUND), ("b", ROUND), ("c", turned), ("d", turned)):
        bench.add(name, text)
    gain, judged = probe(bench, 15)
    assert gain > 1 and judged == 0
    right, judged = probe(bench, 21)
    assert right > 2 and judged > 4
    bench.drafter.begin(DraftIndex(1 << 12, bench.drafter.slots), {})
    probe(bench, 30, "cd")
    wrong, _ = probe(bench, 36, "cd")
    assert wrong < right


def test_some_requests_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn; each is judged, and what their drafts would cost is scaled up."""
    monkeypatch.setattr("moebius.engine.speculation.PROBED", 2)
    bench = begun(slots=6)
    seen: list[list[str]] = []
    tokens: list[list[int]] = []

    def cost(requests: int, context: float, counts: np.ndarray) -> np.ndarray:
        tokens.append(counts.tolist())
        return np.ones(len(counts))

    bench.drafter.cost = cost
    for name in "abcdef":
        bench.add(name, ROUND)
    for length in (15, 21, 27, 33):
        probe(bench, length, "abcdef")
        seen.append(sorted(bench.drafter._guessed))
    assert seen == [["a", "b"], ["c", "d"], ["e", "f"], ["a", "b"]]
    assert tokens[-1] == [6, 9, 12, 15, 18, 21, 24, 27, 30], "three requests for each that was asked"
    assert bench.drafter.index is not None and set(bench.drafter.index.known.tolist()) == {33}


def test_guesses_and_drafts_go_on_from_each_other() -> None:
    """Tokens that were sampled without drafts are in the index when drafting begins, and the other way round."""
    bench = begun()
    bench.drafter.cost = lambda requests, context, tokens: np.ones(len(tokens))
    bench.add("a", ROUND)
    probe(bench, 12, "a")
    assert bench.propose({"a": 16}) == [ROUND[16:20]]
    probe(bench, 20, "a")
    assert bench.propose({"a": 22}) == [ROUND[22:26]]
    assert bench.drafter.index is not None and bench.drafter.index.known[3] == 22


@pytest.mark.parametrize("mode", ["ngram", "suffix", "siblings"])
def test_two_ranks_draft_alike(mode: str) -> None:
    """Also when costs decide and requests come and go."""

    def rank() -> list[list[list[int]]]:
        r, bench, found = np.random.default_rng(3), begun(slots=3), []
        bench.drafter.mode = mode  # type: ignore[assignment]
        bench.drafter.cost = lambda requests, context, tokens: 1 + 0.05 * (tokens - requests)
        lengths: dict[str, int] = {}
        drafted: dict[str, int] = {}
        for step in range(60):
            if len(lengths) < 3:
                name = f"r{step}"
                bench.add(name, [int(n) for n in r.integers(1, 4, LONGEST)])
                lengths[name] = 3
            bench.verified = [drafted.get(name, 0) for name in lengths]
            drafts = bench.propose(lengths)
            found.append(drafts)
            drafted = {name: len(draft) for name, draft in zip(lengths, drafts, strict=True)}
            for name in list(lengths):
                lengths[name] += 1
                if lengths[name] > 30 and r.random() < 0.2:
                    del lengths[name]
                    bench.drop(name)
        return found

    first, second = rank(), rank()
    assert first == second
    assert any(draft for drafts in first for draft in drafts)


def test_drafts_are_dropped_before_a_switch() -> None:
    request = SimpleNamespace(spec_token_ids=[1, 2])
    drop_drafts(SimpleNamespace(requests={"a": request}))
    assert request.spec_token_ids == []
