"""Sampling settings, errors that name the nearest key, and length traces."""

import json
import math

import pytest

from moebius.rollout.errors import BadInput, GroupNotReady, IncompleteStep, MoebiusError, RankDied, nearest_key
from moebius.rollout.types import LengthTrace, Sampling


def test_errors_share_a_base():
    for kind in (BadInput, GroupNotReady, RankDied, IncompleteStep):
        assert issubclass(kind, MoebiusError)
        assert issubclass(kind, RuntimeError)
    assert issubclass(BadInput, ValueError)


def test_parse_accepts_dict_object_and_nothing():
    sampling = Sampling.parse({"temperature": 0.5, "stop": "END", "logit_bias": {"7": 1}})
    assert sampling.stop == ["END"]
    assert sampling.logit_bias == {7: 1.0}
    assert Sampling.parse(sampling) is sampling
    assert Sampling.parse(None) == Sampling() == Sampling.parse({})
    with pytest.raises(BadInput, match="expected a dict or Sampling, got list"):
        Sampling.parse([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "near"),
    [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("topp", "top_p"), ("TOP_K", "top_k")],
)
def test_unknown_field_names_the_nearest(given, near):
    with pytest.raises(BadInput, match=f"sampling: unknown key '{given}'; did you mean '{near}'"):
        Sampling.parse({given: 1})


def test_unknown_field_unlike_any_lists_all():
    with pytest.raises(BadInput, match=r"unknown key 'zzzz'; known keys: allowed_token_ids, bad_words"):
        Sampling.parse({"zzzz": 1})
    assert nearest_key("zzzz", ["a", "b"]) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.1}, "temperature: .*greater than or equal to 0"),
        ({"temperature": 2.5}, "temperature: .*less than or equal to 2"),
        ({"temperature": math.nan}, "temperature: .*finite"),
        ({"repetition_penalty": math.inf}, "repetition_penalty: .*finite"),
        ({"repetition_penalty": 0}, "repetition_penalty: .*greater than 0"),
        ({"top_p": 0}, "top_p: .*greater than 0"),
        ({"top_p": 1.01}, "top_p: .*less than or equal to 1"),
        ({"top_k": -2}, "top_k: .*-1"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens: .*1"),
        ({"max_tokens": 4, "min_tokens": 5}, "sampling: min_tokens=5 is above max_tokens=4"),
        ({"logprobs": -1}, "logprobs"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop: must not contain an empty text"),
        ({"bad_words": [""]}, "bad_words: must not contain an empty text"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: token ids must not be negative"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ],
)
def test_values_out_of_range(fields, words):
    with pytest.raises(BadInput, match=words):
        Sampling.parse(fields)


def test_every_fault_is_named():
    with pytest.raises(BadInput) as caught:
        Sampling.parse({"top_p": 2, "max_tokns": 3})
    assert "top_p" in str(caught.value)
    assert "did you mean 'max_tokens'" in str(caught.value)


def test_engine_fields_leave_out_n_and_seed():
    fields = Sampling(seed=3, top_k=-1, stop=["x"]).engine_fields()
    assert "seed" not in fields
    assert "n" not in fields
    assert fields["top_k"] == 0
    assert fields["stop"] == ["x"]
    assert fields["logprobs"] == 0
    fields["stop"].append("y")  # the engine may change its copy
    assert Sampling(stop=["x"]).engine_fields()["stop"] == ["x"]


def test_engine_fields_are_vllm_fields():
    vllm = pytest.importorskip("vllm")
    sampling = Sampling(temperature=0.7, top_k=5, stop=["x"], logit_bias={1: 2.0}, bad_words=["b"], seed=1)
    params = vllm.SamplingParams(**sampling.engine_fields(), seed=9)
    for name, value in sampling.engine_fields().items():
        assert getattr(params, name) == value, name


def test_trace_round_trip(tmp_path):
    trace = LengthTrace({(1, 0): 5, (0, 1): 7, (0, 0): 0})
    trace.save(tmp_path / "trace.json")
    assert LengthTrace.load(tmp_path / "trace.json") == trace
    assert json.loads((tmp_path / "trace.json").read_text())["lengths"] == [[0, 0, 0], [0, 1, 7], [1, 0, 5]]


def test_trace_forces_a_length():
    trace = LengthTrace({(0, 0): 40, (0, 1): 0})
    base = Sampling(max_tokens=8, min_tokens=2, stop=["x"], stop_token_ids=[3], temperature=0.3)
    forced = trace.forced(base, 0, 0)
    assert (forced.max_tokens, forced.min_tokens, forced.ignore_eos) == (40, 0, True)
    assert forced.stop == []
    assert forced.stop_token_ids == []
    assert forced.temperature == 0.3
    assert Sampling.parse(forced.model_dump()) == forced
    assert trace.forced(base, 0, 1).max_tokens == 1
    with pytest.raises(BadInput, match="no prompt 2, sample 0"):
        trace.forced(base, 2, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a length trace"),
        ("[]", "not a length trace"),
        ('{"schema_version": 2, "lengths": []}', "schema_version 2, this version reads 1"),
        ('{"schema_version": 1, "lengths": [[0, 0]]}', "not a length trace"),
        ('{"schema_version": 1, "lengths": [[0, 0, 1], [0, 0, 2]]}', "occurs twice"),
        ('{"schema_version": 1, "lengths": [[0, 0, -1]]}', "negative length"),
    ],
)
def test_trace_files_that_are_wrong(tmp_path, text, words):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        LengthTrace.load(path)
    with pytest.raises(BadInput, match="cannot be read"):
        LengthTrace.load(tmp_path / "missing.json")


def test_stop_texts_need_text() -> None:
    with pytest.raises(BadInput, match="leave detokenize on"):
        Sampling.parse({"stop": ["END"], "detokenize": False})
    assert Sampling.parse({"stop_token_ids": [4], "detokenize": False}).engine_fields()["detokenize"] is False
