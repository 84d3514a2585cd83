"""The sampler's rows: seeds on the device follow every change of vLLM's input batch and are read only then."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from moebius.engine.sampler import SEED_FIELD, CounterSampler, to_device
from moebius.kernels.noise import gumbel_noise
from moebius.rollout.bench.sampler import measure

VOCAB = 64


class Runner:
    """What the sampler reads of a model runner; the input batch is vLLM's own."""

    def __init__(self, rows: int = 16) -> None:
        self.input_batch = InputBatch(
            max_num_reqs=rows,
            max_model_len=32,
            max_num_batched_tokens=64,
            device=torch.device("cpu"),
            vocab_size=VOCAB,
            block_sizes=[16],
            kernel_block_sizes=[16],
            max_num_blocks_per_req=[2],
        )
        self.requests: dict[str, CachedRequestState] = {}
        self.seq_lens = torch.arange(1, rows + 1, dtype=torch.int32)
        self.reads = 0

    def add(self, name: str, seed: int | None, temperature: float = 1.0) -> None:
        extra = None if seed is None else {SEED_FIELD: seed}
        state = CachedRequestState(
            req_id=name,
            prompt_token_ids=[1, 2, 3],
            mm_features=[],
            sampling_params=SamplingParams(temperature=temperature, extra_args=extra),
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        self.requests[name] = state
        self.input_batch.add_request(state)

    def remove(self, name: str) -> None:
        self.input_batch.remove_request(name)
        del self.requests[name]

    def settle(self) -> None:
        """What the runner does with changes before each forward pass."""
        self.input_batch.condense()
        self.input_batch.refresh_metadata()

    def seeds(self) -> list[int]:
        params: list[Any] = [self.requests[name].sampling_params for name in self.input_batch.req_ids]
        return [p.extra_args[SEED_FIELD] if p.temperature else 0 for p in params]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    made = Runner()
    read = CounterSampler._seed_of

    def counted(self: CounterSampler, request_id: str) -> int:
        made.reads += 1
        return read(self, request_id)

    monkeypatch.setattr(CounterSampler, "_seed_of", counted)
    return made


def sampler_of(runner: Any, mode: str = "raw_logprobs") -> CounterSampler:
    return CounterSampler(runner, mode)


def test_seeds_follow_every_change_of_the_batch(runner: Runner) -> None:
    """Random rounds of adding, removing and swapping rows, names coming back with other seeds among them."""
    sampler, chance = sampler_of(runner), random.Random(3)
    for _ in range(300):
        batch = runner.input_batch
        for name in chance.sample(batch.req_ids, chance.randint(0, min(3, batch.num_reqs))):
            runner.remove(name)
        free = [f"r{i}" for i in range(16) if f"r{i}" not in batch.req_id_to_index]
        for name in chance.sample(free, chance.randint(0, min(3, len(free)))):
            runner.add(name, chance.getrandbits(63), chance.choice([0.0, 0.7, 1.0]))
        batch.condense()
        if batch.num_reqs > 1 and chance.random() < 0.3:
            batch.swap_states(*chance.sample(range(batch.num_reqs), 2))
        batch.refresh_metadata()
        assert sampler._row_seeds(torch.device("cpu")).tolist() == runner.seeds()


def test_an_unchanged_batch_is_not_read_again(runner: Runner) -> None:
    sampler = sampler_of(runner)
    for i in range(5):
        runner.add(f"r{i}", 100 + i)
    runner.settle()
    logits = torch.randn((5, VOCAB))
    for _ in range(4):
        sampler(logits, {}, None, None)
        runner.settle()
    assert runner.reads == 5
    sampler.forget_rows()
    sampler(logits, {}, None, None)
    assert runner.reads == 10


def test_tokens_and_logprobs(runner: Runner) -> None:
    for i in range(6):
        runner.add(f"r{i}", 7 * i)
    runner.settle()
    logits = torch.randn((6, VOCAB))
    wanted = (logits + gumbel_noise(torch.arange(6) * 7, torch.arange(1, 7), VOCAB)).argmax(dim=-1)
    tokens, kept = sampler_of(runner)(logits.clone(), {}, None, None)
    assert torch.equal(tokens, wanted) and tokens.dtype == torch.int64
    assert kept is None
    tokens, kept = sampler_of(runner, "processed_logprobs")(logits.clone(), {}, None, None)
    assert torch.equal(tokens, wanted)
    assert kept is not None and torch.equal(kept, logits.log_softmax(dim=-1))


def test_what_it_cannot_sample_is_refused(runner: Runner) -> None:
    sampler, logits = sampler_of(runner), torch.zeros((1, VOCAB))
    runner.add("r", None)
    runner.settle()
    for _ in range(2):  # a failed reading is not kept
        with pytest.raises(ValueError, match="request r has no sample seed"):
            sampler(logits, {}, None, None)
    with pytest.raises(ValueError, match="generators are not used"):
        sampler(logits, {0: torch.Generator()}, None, None)
    runner.remove("r")
    runner.add("s", 5)
    runner.settle()
    with pytest.raises(ValueError, match="for each of 3 rows"):
        sampler(torch.zeros((3, VOCAB)), {}, None, None)


def test_warm_up_draws_once(runner: Runner) -> None:
    runner.device = torch.device("cpu")  # type: ignore[attr-defined]
    runner.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)  # type: ignore[attr-defined]
    sampler_of(runner).warm_up()
    assert runner.reads == 0


def test_benchmark_measures_all_four() -> None:
    results = measure([1, 3], 257, 4)
    assert [r["rows"] for r in results] == [1, 3]
    for result in results:
        times = {name: value for name, value in result.items() if name != "rows"}
        assert set(times) == {"stock_ms", "stock_seeded_ms", "ours_ms", "torch_ms"}
        assert all(value > 0 for value in times.values())
    for rows, vocab, repeats in (([0], 8, 1), ([1], 0, 1), ([1], 8, 0)):
        with pytest.raises(ValueError, match="1 or more"):
            measure(rows, vocab, repeats)


NUMBERS: list[Any] = [
    [1 << 62, 3],
    [],
    np.arange(12, dtype=np.int32).reshape(3, 4).T,
    np.broadcast_to(np.arange(3), (2, 3)),  # may not be written
    np.flatnonzero(np.zeros(4)),
]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_go_to_the_device(numbers: Any) -> None:
    found = to_device(numbers, torch.device("cpu"))
    assert found.numpy().tolist() == np.asarray(numbers).tolist() and found.is_contiguous()
    assert found.dtype == (torch.int32 if getattr(numbers, "dtype", None) == np.int32 else torch.int64)
    if isinstance(numbers, np.ndarray) and numbers.size:
        assert not np.shares_memory(found.numpy(), numbers), "the caller may write on"


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_for_a_gpu_they_are_copied_from_pinned_memory(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is pinned when it is taken, and filled after that."""
    pinned: list[bool] = []
    sent: list[tuple[list[int], str, bool]] = []
    empty = torch.empty

    class OnHost(torch.Tensor):
        def to(self, device: torch.device, non_blocking: bool = False) -> Any:  # type: ignore[override]
            sent.append((self.tolist(), device.type, non_blocking))

    def take(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype).as_subclass(OnHost)

    monkeypatch.setattr(torch, "empty", take)
    to_device(numbers, torch.device("cuda"))
    assert pinned == [True] and sent == [(np.asarray(numbers).tolist(), "cuda", True)]
