"""Input of a step: what is refused, how samples are seeded and spread, and the check of what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius.engine.types import SampleKey, SampleRequest
from moebius.rollout.batch import Limits, assign, build_requests, check_complete, check_sampling, to_token_ids
from moebius.rollout.errors import BadInput, IncompleteStep
from moebius.rollout.types import LengthTrace, Sampling

LIMITS = Limits(max_model_len=16, vocab_size=100, has_tokenizer=True)


class Letters:
    """A tokenizer of letters with a chat template that refuses the system role, as some real ones do."""

    chat_template = "given"

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 100 for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        if messages[0]["role"] == "system":
            raise ValueError("system role not supported")
        return [1, *self.encode(messages[0]["content"]), 2]


def ids(prompt: Any, limits: Limits = LIMITS) -> list[int]:
    return to_token_ids(prompt, 3, limits, Letters)


@pytest.mark.parametrize(
    "prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), 2, torch.tensor(3)]]
)
def test_token_ids_of_any_integer_kind(prompt):
    got = ids(prompt)
    assert got == [1, 2, 3]
    assert all(type(token) is int for token in got)


def test_texts_and_chat_messages():
    assert ids("ab") == [97, 98]
    assert ids([{"role": "user", "content": "ab"}]) == [1, 97, 98, 2]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt 3 is empty"),
        ("", "prompt 3 is empty"),
        ([1, 100], "token id 100 is outside the model's vocabulary of 100"),
        ([-1], "token id -1 is outside"),
        ([1.5], "must be integers, got 1.5"),
        ([True], "must be integers, got True"),
        (["a"], "must be integers"),
        ([[1, 2]], "must be integers"),
        (np.array([[1, 2]]), "must be integers"),
        (7, "got int"),
        (None, "got NoneType"),
        (b"ab", "got bytes"),
        ({"role": "user"}, "got dict"),
        ([{"role": "user"}], "needs a 'role' and a 'content'"),
        ([{"role": "user", "content": "a"}, 5], "chat message 1 needs"),
        ([{"role": "system", "content": "a"}], "refuses these messages: system role not supported"),
        ([1] * 16, "has 16 tokens, which leaves no room for output in max_model_len=16"),
    ],
)
def test_bad_prompts_are_refused_in_words(prompt, words):
    with pytest.raises(BadInput, match=words):
        ids(prompt)


def test_the_longest_prompt_leaves_one_token():
    [request] = build_requests([ids([1] * 15)], 1, Sampling(), seed=0, step=0, limits=LIMITS)
    assert request.sampling["max_tokens"] == 1


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_sampling_token_ids_must_be_in_the_vocabulary(field):
    check_sampling(Sampling(**{field: [99]}), LIMITS)
    with pytest.raises(BadInput, match=rf"sampling.{field}: token id 100 is outside"):
        check_sampling(Sampling(**{field: [5, 100]}), LIMITS)


def test_stop_texts_need_a_tokenizer():
    check_sampling(Sampling(stop=["x"]), LIMITS)
    with pytest.raises(BadInput, match="use stop_token_ids"):
        check_sampling(Sampling(stop=["x"]), Limits(16, 100, has_tokenizer=False))


def test_seeds_differ_by_sample_prompt_and_step_and_repeat():
    def seeds(seed: int = 0, step: int = 0) -> list[int]:
        return [r.seed for r in build_requests([[1], [1]], 3, Sampling(), seed=seed, step=step, limits=LIMITS)]

    assert seeds() == seeds()
    assert len(set(seeds() + seeds(step=1) + seeds(seed=1))) == 18


def test_requests_are_ordered_and_fit():
    requests = build_requests([[1] * 4, [1] * 10], 2, Sampling(max_tokens=8), seed=0, step=0, limits=LIMITS)
    assert [r.key for r in requests] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [r.sampling["max_tokens"] for r in requests] == [8, 8, 6, 6]
    with pytest.raises(BadInput, match=r"prompt 1, sample 0: min_tokens asks for 8 output tokens, .* room for 6"):
        build_requests([[1], [1] * 10], 1, Sampling(min_tokens=8), seed=0, step=0, limits=LIMITS)


def test_replayed_lengths_are_forced():
    trace = LengthTrace({(0, 0): 3, (0, 1): 7})
    requests = build_requests([[1]], 2, Sampling(stop_token_ids=[4]), seed=0, step=0, limits=LIMITS, lengths=trace)
    assert [r.sampling["max_tokens"] for r in requests] == [3, 7]
    assert all(r.sampling["ignore_eos"] and not r.sampling["stop_token_ids"] for r in requests)
    with pytest.raises(BadInput, match="no prompt 1"):
        build_requests([[1], [1]], 2, Sampling(), seed=0, step=0, limits=LIMITS, lengths=trace)
    with pytest.raises(BadInput, match="the length trace has 7 output tokens, max_model_len leaves room for 6"):
        build_requests([[1] * 10], 2, Sampling(), seed=0, step=0, limits=LIMITS, lengths=trace)


def test_samples_of_a_prompt_stay_together_while_ranks_balance():
    many = build_requests([[1]] * 4, 3, Sampling(max_tokens=5), seed=0, step=0, limits=LIMITS)
    homes = [{r.key.prompt for r in rank} for rank in assign(many, 2)]
    assert homes[0].isdisjoint(homes[1])
    single = build_requests([[1]], 4, Sampling(max_tokens=5), seed=0, step=0, limits=LIMITS)
    assert [len(rank) for rank in assign(single, 2)] == [2, 2]


@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=8),
    n=st.integers(1, 5),
    ranks=st.integers(2, 4),
)
def test_every_sample_goes_to_exactly_one_rank(lengths, n, ranks):
    requests = build_requests([[1] * k for k in lengths], n, Sampling(), seed=0, step=0, limits=LIMITS)
    spread = assign(requests, ranks)
    assert len(spread) == ranks
    assert sorted(r.key for rank in spread for r in rank) == [r.key for r in requests]
    loads = [sum(len(r.prompt_token_ids) + r.sampling["max_tokens"] for r in rank) for rank in spread]
    # Graham's bound for single samples; whole prompts are within 10 % of the mean.
    assert max(loads) <= max(sum(loads) / ranks * 4 / 3 + 16, 1.1 * sum(loads) / ranks)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([(0, 0), (1, 0)], r"step 9, .*missing: \(0, 1\), \(1, 1\)$"),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (0, 1)], r"double: \(0, 1\)$"),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], r"not asked for: \(2, 0\)$"),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (1, 1, 8)], r"not asked for: \(1, 1, 8\)$"),
    ],
)
def test_a_short_or_double_step_is_an_error(keys, words):
    expected = [SampleKey(prompt, sample, 9) for prompt in range(2) for sample in range(2)]
    check_complete(reversed(expected), expected, 9)
    with pytest.raises(IncompleteStep, match=words):
        check_complete([SampleKey(*key[:2], *key[2:] or (9,)) for key in keys], expected, 9)


def test_requests_are_picklable_without_vllm():
    import pickle

    [request] = build_requests([[1]], 1, Sampling(), seed=0, step=0, limits=LIMITS)
    assert isinstance(pickle.loads(pickle.dumps(request)), SampleRequest)
