"""`engine.steady` beside vLLM's own code: two schedulers, runners' batches and fronts live through the same events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.gpu_model_runner as vllm_runner
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import InputBatch

from moebius.engine import steady_runner, vllm_patches
from moebius.engine.tail_modes import AheadScheduler, TailModes
from tests.unit.steady_world import LONGEST, PAGE, VOCAB, World, drawn, live, plain_data

ROWS, TOKENS = 8, 64
KINDS = pytest.mark.parametrize("kind", [AsyncScheduler, AheadScheduler])


@KINDS
def test_all_is_as_with_vllm_alone(kind: type) -> None:
    """Arrivals, ends, aborts, preemption, prefix hits, parking, hand-over, and drafting now and then in one of them."""
    taken = preempted = switched = 0
    for seed in range(100):
        fast, plain = live(seed, kind, World)
        assert [plain_data(r) for r in fast.results] == [plain_data(r) for r in plain.results], f"seed {seed}"
        assert fast.tokens == plain.tokens and fast.freed == plain.freed
        assert [r.layouts for r in fast.results] == [fast.layouts_of(r) for r in fast.results], f"seed {seed}"
        switched += sum(len(r.layouts) > 1 for r in fast.results)
        audience = fast.front.audience
        assert not (audience.behind or audience.logprobs or audience.quiet or audience.tokens), "nothing stays behind"
        assert fast.steady is not None
        taken, preempted = taken + fast.steady.taken, preempted + fast.preempted
    assert taken > 500 and preempted > 20 and switched > 50


class Runner:
    """Of vLLM's runner, what prepares a pass and what notes its tokens."""

    _update_states = vllm_runner.GPUModelRunner._update_states
    _compute_prev_positions = vllm_runner.GPUModelRunner._compute_prev_positions
    _prepare_input_ids = vllm_runner.GPUModelRunner._prepare_input_ids
    _bookkeeping_sync = vllm_runner.GPUModelRunner._bookkeeping_sync
    use_async_scheduling = True
    is_pooling_model = uses_mrope = enable_prompt_embeds = routed_experts_initialized = use_async_spec_decode = False
    uses_xdrope_dim = prev_num_spec_tokens = 0
    max_num_reqs, max_model_len, device, _draft_token_ids = ROWS, LONGEST, torch.device("cpu"), None

    def __init__(self, *, drafts: bool) -> None:
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.encoder_cache: dict[str, Any] = {}
        self.late_interaction_runner = SimpleNamespace(
            on_requests_finished=lambda names: None, register_request=lambda *told: None
        )
        self.speculative_config = SimpleNamespace(use_ngram_gpu=lambda: False) if drafts else None
        nothing: Any = None
        processors = LogitsProcessors([MinTokensLogitsProcessor(nothing, self.device, False)])
        pages = LONGEST // PAGE + 1
        self.input_batch: Any = InputBatch(
            ROWS, LONGEST, TOKENS, self.device, VOCAB, [PAGE], [PAGE], [pages], logitsprocs=processors
        )
        self.prev_positions = CpuGpuBuffer(ROWS, dtype=torch.int64, device=self.device)
        self.input_ids = CpuGpuBuffer(TOKENS, dtype=torch.int32, device=self.device)
        self.discard_request_mask = CpuGpuBuffer(ROWS, dtype=torch.bool, device=self.device)

    def _may_reorder_batch(self, scheduled: Any) -> None:
        pass

    def _get_prompt_logprobs_dict(self, *args: Any) -> dict[str, Any]:
        return {}

    def _to_list(self, tokens: torch.Tensor) -> list[list[int]]:
        return tokens.tolist()


class RunnerWorld(World):
    """With a runner's batch, whose rows, pages and tokens are checked before each pass."""

    def __init__(self, kind: type, pages: int, *, is_steady: bool) -> None:
        super().__init__(kind, pages, is_steady=is_steady)
        self.runner = self.runtime.runner = Runner(drafts=kind is AheadScheduler)
        self.penalized = 0
        if self.steady is not None:
            steady_runner.SteadyRunner(self.runner, self.steady)
        if kind is AheadScheduler:
            core = SimpleNamespace(scheduler=self.scheduler, batch_queue=self.flights, async_scheduling=True)
            core.step = core.step_with_batch_queue = core.step_fn = None
            self.modes = TailModes(core, self.runner, 3, self.steady)

    def draft(self, *, on: bool) -> None:
        self.drain()
        (self.modes.draft if on else self.modes.ahead)()

    @torch.inference_mode()
    def launch(self, scheduled: Any) -> None:
        runner, batch = self.runner, self.runner.input_batch
        runner._update_states(scheduled)
        if not (total := scheduled.total_num_scheduled_tokens):
            return
        names, rows = list(batch.req_ids), batch.num_reqs
        counts = np.array([scheduled.num_scheduled_tokens[name] for name in names])
        before = batch.num_computed_tokens_cpu[:rows].copy()
        spans = [np.arange(start, start + count) for start, count in zip(before, counts, strict=True)]
        places = np.repeat(np.arange(rows), counts), np.concatenate(spans)
        runner.input_ids.gpu.fill_(-77)
        runner.input_ids.cpu[:total] = torch.from_numpy(batch.token_ids_cpu[places])
        runner._compute_prev_positions(rows)
        known = np.array([runner.requests[name].num_tokens for name in names])
        runner.discard_request_mask.np[:rows] = before + counts < known
        runner._prepare_input_ids(scheduled, rows, total, np.cumsum(counts))
        drafts = [scheduled.scheduled_spec_decode_tokens.get(name, []) for name in names]
        want, sampled = [], []
        for row, name in enumerate(names):
            prompt, draft, end = runner.requests[name].prompt_token_ids, drafts[row], int(before[row] + counts[row])
            first = end - len(draft)
            want += [prompt[i] if i < len(prompt) else drawn(name, i) for i in range(before[row], first)] + draft
            truth = [drawn(name, first + i) for i in range(len(draft) + 1)]
            right = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(draft))
            sampled.append([*truth[: right + 1], *[-1] * 4][: max(map(len, drafts)) + 1])
            (pages,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            assert batch.block_table[0].block_table.np[row, : len(pages)].tolist() == pages
            assert runner.requests[name].block_ids[0] == pages
        assert runner.input_ids.gpu[:total].tolist() == want
        batch.update_async_output_token_ids()
        for name, tokens in zip(names, batch.sampling_metadata.output_token_ids, strict=False):
            if runner.requests[name].sampling_params.repetition_penalty != 1.0:
                start = len(runner.requests[name].prompt_token_ids)
                assert tokens == [drawn(name, start + i) for i in range(len(tokens))]
                self.penalized += len(tokens)
        batch.prev_sampled_token_ids = None
        came = SimpleNamespace(sampled_token_ids=torch.tensor(sampled, dtype=torch.int32), logprobs_tensors=None)
        runner._bookkeeping_sync(scheduled, came, None, torch.empty(0), total)
        if runner.use_async_scheduling:
            batch.set_async_sampled_token_ids(came.sampled_token_ids, SimpleNamespace(synchronize=lambda: None))
        lengths = batch.num_tokens_no_spec[:rows].tolist()
        assert [len(tokens) for tokens in batch.req_output_token_ids] == [
            length - len(runner.requests[name].prompt_token_ids) for name, length in zip(names, lengths, strict=True)
        ]


@KINDS
def test_the_runner_is_given_what_was_sampled(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, pages and the tokens that penalties look at, over all that happens to a batch."""
    monkeypatch.setattr(vllm_runner, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    patched = vllm_patches._as_many_output_ids_as_before(InputBatch.update_async_output_token_ids)
    monkeypatch.setattr(InputBatch, "update_async_output_token_ids", patched)
    penalized = 0
    for seed in range(40):
        fast, plain = live(seed, kind, RunnerWorld)
        assert isinstance(fast, RunnerWorld) and isinstance(plain, RunnerWorld)
        assert fast.penalized == plain.penalized
        penalized += fast.penalized
    assert penalized > 1000
