"""Verifying drafts: every position is sampled as without drafts, and a draft is kept as far as it agrees."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from moebius.engine.sampler import SEED_FIELD, CounterSampler
from moebius.engine.verify import REJECTED, KeyedVerifier, UnknownProcessor, check_processors
from moebius.kernels.noise import derive_seed

VOCAB, LONGEST = 48, 64
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.8, "min_p": 0.1, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 9: -5.0}, "min_tokens": 9, "stop_token_ids": list(range(20, 40))},
    {"temperature": 1.2, "allowed_token_ids": list(range(3, 30)), "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 7, "stop_token_ids": list(range(24))},
    {"temperature": 0.7, "top_p": 0.95},
]  # fmt: skip
BAD_WORDS = [[7], [3, 4], [4, 11, 12]]


class Runner:
    """What the samplers read of a model runner; input batch and sampler are vLLM's own."""

    def __init__(self, requests: list[CachedRequestState], drafts: list[list[int]]) -> None:
        config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=32))
        device = torch.device("cpu")
        self.input_batch = InputBatch(
            max_num_reqs=32,
            max_model_len=LONGEST,
            max_num_batched_tokens=256,
            device=device,
            vocab_size=VOCAB,
            block_sizes=[16],
            kernel_block_sizes=[16],
            max_num_blocks_per_req=[4],
            logitsprocs=LogitsProcessors(kind(config, device, False) for kind in BUILTIN_LOGITS_PROCESSORS),
        )
        self.requests = {request.req_id: request for request in requests}
        self.sampler = Sampler("processed_logprobs")
        self.sampler.topk_topp_sampler = CounterSampler(self, "processed_logprobs")  # type: ignore[arg-type]
        for request, draft in zip(requests, drafts, strict=True):
            self.input_batch.add_request(request)
            self.input_batch.update_req_spec_token_ids(request, {request.req_id: draft})
        self.input_batch.refresh_metadata()
        self.seq_lens = torch.tensor([r.num_tokens + len(d) for r, d in zip(requests, drafts, strict=True)])


def request(number: int, kind: dict[str, Any], outputs: list[int], bad_words: bool) -> CachedRequestState:
    params = SamplingParams(**({"logprobs": 0} | kind), extra_args={SEED_FIELD: 1000 + number})
    if bad_words:
        params._bad_words_token_ids = BAD_WORDS
    return CachedRequestState(
        req_id=str(number),
        prompt_token_ids=[1, 2, 3, 4 + number],
        mm_features=[],
        sampling_params=params,
        generator=None,
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=list(outputs),
    )


@pytest.mark.parametrize("seed", range(4))
def test_places_are_those_that_vllm_computes(seed: int) -> None:
    """Prompts in parts beside drafts, drafts of no token, and passes in which all requests have one length."""
    r = np.random.default_rng(seed)
    drafted = r.integers(0, 4, 9).astype(np.int32) if seed else np.full(9, 3, dtype=np.int32)
    scheduled = drafted + 1 + np.where((drafted == 0) & (r.random(9) < 0.5), r.integers(0, 9, 9), 0)
    ends = np.cumsum(scheduled).astype(np.int32)
    tokens = torch.from_numpy(r.integers(0, VOCAB, int(ends[-1])).astype(np.int32))
    runner: Any = SimpleNamespace(device=torch.device("cpu"), input_ids=SimpleNamespace(gpu=tokens))
    runner._arange_scratch, runner.arange_np = np.zeros(64, dtype=np.int64), np.arange(64)
    runner._get_cumsum_and_arange = partial(GPUModelRunner._get_cumsum_and_arange, runner)
    wanted = GPUModelRunner._calc_spec_decode_metadata(runner, drafted, ends)
    found = KeyedVerifier(runner).metadata(drafted, ends)
    assert found.logits_indices.tolist() == wanted.logits_indices.tolist()
    assert found.draft_token_ids.tolist() == wanted.draft_token_ids.tolist()
    assert found.num_draft_tokens == wanted.num_draft_tokens and found.max_spec_len == wanted.max_spec_len
    places = found.places
    assert places is not None and places.ahead.dtype == torch.int32
    assert places.ahead.tolist() == (ends[places.rows] - 1 - found.logits_indices.numpy()).tolist()


def verify(runner: Runner, drafts: list[list[int]], logits: torch.Tensor) -> tuple[list[list[int]], Any]:
    flat = [token for draft in drafts for token in draft]
    metadata: Any = SpecDecodeMetadata.make_dummy(drafts, device=torch.device("cpu"))
    metadata.draft_token_ids = torch.tensor(flat, dtype=torch.int32)
    output = KeyedVerifier(runner)(metadata, None, logits, runner.input_batch.sampling_metadata)  # type: ignore[arg-type]
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    return RejectionSampler.parse_output(output.sampled_token_ids, VOCAB, (), output.logprobs_tensors)


@pytest.mark.parametrize("seed", range(6))
def test_every_position_is_sampled_as_without_drafts(seed: int) -> None:
    """The reference draws token after token, each with the batch as it is then; drafts are right, wrong or absent."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    many = len(KINDS) * 2
    outputs = [[r.randrange(VOCAB) for _ in range(r.randrange(0, 10))] for _ in range(many)]
    kinds = [KINDS[i % len(KINDS)] for i in range(many)]
    longest = 4
    logits = torch.randn(many, longest + 1, VOCAB) * 3
    truth: list[list[int]] = [[] for _ in range(many)]
    logprobs: list[list[float]] = [[] for _ in range(many)]
    for step in range(longest + 1):
        requests = [request(i, kinds[i], outputs[i] + truth[i], i % 3 == 0) for i in range(many)]
        runner = Runner(requests, [[]] * many)
        drawn = runner.sampler(logits[:, step].clone(), runner.input_batch.sampling_metadata)
        assert drawn.logprobs_tensors is not None
        for i, token in enumerate(drawn.sampled_token_ids.view(-1).tolist()):
            truth[i].append(token)
            logprobs[i].append(float(drawn.logprobs_tensors.logprobs[i, 0]))
    drafts = []
    for i in range(many):
        draft = truth[i][: r.randrange(longest + 1)]
        if draft and i % 2:
            at = r.randrange(len(draft))
            draft[at] = (draft[at] + 1) % VOCAB
        drafts.append(draft)
    runner = Runner([request(i, kinds[i], outputs[i], i % 3 == 0) for i in range(many)], drafts)
    rows = torch.cat([logits[i, : len(draft) + 1] for i, draft in enumerate(drafts)])
    tokens, lists = verify(runner, drafts, rows)
    for i, draft in enumerate(drafts):
        right = next((n for n, token in enumerate(draft) if token != truth[i][n]), len(draft))
        assert tokens[i] == truth[i][: right + 1], f"request {i} ({kinds[i]})"
        mine = lists.slice_request(i, len(tokens[i]))
        assert mine.logprobs[:, 0].tolist() == pytest.approx(logprobs[i][: right + 1], abs=1e-5)
        assert mine.logprob_token_ids[:, 0].tolist() == tokens[i]


def chance_of(counts: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of counts at least as far from those wanted (chi-square, all cells filled)."""
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("accept", ["what is right", "everything"])
def test_samples_with_drafts_are_distributed_as_without(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens of a Markov chain over four, 3,200 times, with drafts of its likeliest tokens: all 64 sequences come
    as often as they should. Right samples fail this with a chance of 1e-4; were every draft kept, they would not pass.
    """
    tokens, length, samples = 4, 3, 3200
    if accept == "everything":
        monkeypatch.setattr(KeyedVerifier, "accepted", lambda _, sampled, drafts: (drafts != REJECTED).sum(dim=1))
    logits = torch.full((tokens, VOCAB), -torch.inf)
    logits[:, :tokens] = 0.6 * torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(0))
    likeliest = logits.argmax(dim=1).tolist()
    counts = torch.zeros(tokens**length, dtype=torch.float64)
    for first in range(0, samples, 32):
        drawn: list[list[int]] = [[] for _ in range(32)]
        while left := [i for i in range(32) if len(drawn[i]) < length]:
            requests, drafts, rows = [], [], []
            for i in left:
                requests.append(request(i, {"temperature": 1.0}, drawn[i], False))
                requests[-1].sampling_params.extra_args = {SEED_FIELD: derive_seed(0, 0, first + i, 0)}  # type: ignore[union-attr]
                before = [drawn[i][-1] if drawn[i] else 0]
                for _ in range(length - len(drawn[i]) - 1):
                    before.append(likeliest[before[-1]])
                drafts.append(before[1:])
                rows.append(logits[before])
            found, _ = verify(Runner(requests, drafts), drafts, torch.cat(rows))
            for i, more in zip(left, found, strict=True):
                drawn[i] += more
        for a, b, c in drawn:
            counts[(a * tokens + b) * tokens + c] += 1
    p = logits[:, :tokens].double().softmax(dim=1)
    wanted = samples * (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    assert wanted.min() > 5, "chi-square needs so many"
    chance = chance_of(counts, wanted)
    assert (chance > 1e-4) is (accept == "what is right"), chance


def test_placeholders_are_never_right() -> None:
    """vLLM may schedule tokens of -1; penalties must not trip over them."""
    drafts = [[REJECTED, REJECTED], []]
    runner = Runner([request(0, KINDS[2], [5, 6], False), request(1, KINDS[1], [7], False)], drafts)
    tokens, _ = verify(runner, drafts, torch.randn(4, VOCAB))
    assert [len(row) for row in tokens] == [1, 1]


def test_state_of_vllm_is_left_alone() -> None:
    drafts = [[1, 2], [3]]
    runner = Runner([request(0, KINDS[3], [5], True), request(1, KINDS[2], [7], False)], drafts)
    before = runner.input_batch.sampling_metadata
    shapes = [before.temperature.shape, before.top_p, len(before.output_token_ids)]  # type: ignore[union-attr]
    min_p = next(p for p in before.logitsprocs.argmax_invariant)
    verify(runner, drafts, torch.randn(5, VOCAB))
    assert runner.input_batch.sampling_metadata is before
    assert [before.temperature.shape, before.top_p, len(before.output_token_ids)] == shapes  # type: ignore[union-attr]
    assert min_p.min_p.shape[0] == 2


def test_unknown_processors_are_refused() -> None:
    class Other:
        pass

    processors = LogitsProcessors()
    processors.argmax_invariant = [Other()]  # type: ignore[list-item]
    with pytest.raises(UnknownProcessor, match=r"Other.*tail\.speculation=off"):
        check_processors(processors)
