"""Lengths told beside the counts of an iteration: every rank reads the same, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.length_news import LengthNews, prompt_id, read
from moebius.engine.policy import Finished
from moebius.engine.types import SampleKey


def summed(news: list[LengthNews]) -> list[int]:
    return [sum(column) for column in zip(*(own.numbers() for own in news), strict=True)]


def test_by_hand() -> None:
    news = [LengthNews(rank, 2, slots=3) for rank in range(2)]
    news[0].ended(SampleKey(7, 0), 120, cut=False)
    news[1].ended(SampleKey(8, 3), 5, cut=True)
    news[1].came(SampleKey(9, 0))
    news[1].came(SampleKey(9, 1))
    told = read(summed(news))
    assert told.finished == [Finished(7, 120), Finished(8, 5, False)] and told.came == {9: 2}
    assert read(summed(news)) == read([])


def test_what_finds_no_place_waits() -> None:
    news = [LengthNews(0, 2, slots=2), LengthNews(1, 2, slots=2)]
    for i in range(5):
        news[0].ended(SampleKey(i, 0), i + 1, cut=False)
    told = [f.prompt for _ in range(2) for f in read(summed(news)).finished]
    assert told == [0, 1, 2, 3]
    assert [f.prompt for f in read(news[0].rest()).finished] == [4] and not news[0].rest()


def test_prompts_of_neighbouring_steps_are_told_apart() -> None:
    assert prompt_id(SampleKey(3, 0, 1)) != prompt_id(SampleKey(3, 0, 2)) != prompt_id(SampleKey(4, 0, 2))
    assert prompt_id(SampleKey(3, 0, 1)) == prompt_id(SampleKey(3, 9, 1))
    assert 0 <= prompt_id(SampleKey((1 << 24) - 1, 0, (1 << 63) - 1)) < 1 << 38


EVENT = st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 30), st.integers(0, 5000), st.booleans())


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.lists(EVENT, max_size=6), max_size=12))
def test_everything_arrives_once_on_all_ranks(
    ranks: int, slots: int, iterations: list[list[tuple[int, bool, int, int, bool]]]
) -> None:
    news = [LengthNews(rank, ranks, slots) for rank in range(ranks)]
    ended, came, told, told_came = [], {}, [], {}
    for events in [*iterations, *([[]] * 60)]:
        for rank, is_end, prompt, tokens, cut in events:
            if is_end:
                news[rank % ranks].ended(SampleKey(prompt, 0), tokens, cut=cut)
                ended.append(Finished(prompt, tokens, not cut))
            else:
                news[rank % ranks].came(SampleKey(prompt, 0))
                came[prompt] = came.get(prompt, 0) + 1
        numbers = summed(news)
        assert all(0 <= number < 1 << 63 for number in numbers)
        found = read(numbers)
        told += found.finished
        for prompt, count in found.came.items():
            told_came[prompt] = told_came.get(prompt, 0) + count
    order = lambda f: (f.prompt, f.tokens, f.ended)  # noqa: E731
    assert sorted(told, key=order) == sorted(ended, key=order) and told_came == came
