"""When TP decodes ahead and when it drafts; the two ways to run it, and their graphs, without a device."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from moebius.engine.draft_mode import ENTER, EVIDENCE, OVERHEAD, PROBE, SELDOM, TRIAL, ModeChoice
from moebius.engine.tail_drafts import _FAILED, TailDrafts
from moebius.engine.tail_graphs import CONFIG_KEY, TailDispatcher, prepare
from moebius.engine.tail_modes import AheadScheduler, TailModes

WIDTH = 4


def timed() -> ModeChoice:
    """A choice that knows what iterations without drafts take: twice their costs."""
    choice = ModeChoice(WIDTH)
    choice.begin()
    for ms in (20.0, 20.0, 90.0, 20.0):  # one hiccup
        choice.timed_ahead(ms, 10.0)
    return choice


def promise(choice: ModeChoice, gain: float, judged: float = EVIDENCE) -> bool:
    choice.probed(gain, judged)
    return choice.change(fits=True)


def drafted(choice: ModeChoice, speed: float, count: int) -> None:
    """Iterations of 4 requests that give so many times the tokens per ms."""
    for _ in range(count):
        choice.timed_drafting(30.0, 10.0, 12.0, 4, round(4 * 1.5 * speed))


def test_drafting_begins_when_it_is_expected_to_pay() -> None:
    choice = timed()
    assert choice.scale == 2 and choice.overhead == OVERHEAD
    assert not promise(choice, 5.0, judged=EVIDENCE - 1), "too little is known"
    assert not promise(choice, OVERHEAD * ENTER * 0.99)
    assert promise(choice, OVERHEAD * ENTER * 1.01)
    assert not choice.change(fits=False), "there are too many samples, or no texts"
    choice.changed()
    assert choice.drafting and not choice.change(fits=True) and choice.change(fits=False)


def test_a_disturbed_machine_promises_nothing() -> None:
    """Iterations ahead that were held up make the synchronous ones look fast: drafts that gain nothing stay off."""
    choice = ModeChoice(WIDTH)
    for _ in range(9):
        choice.timed_ahead(30.0, 1.0)  # three times what they take
    choice.drafting, choice.force = True, True
    for _ in range(9):
        choice.timed_drafting(12.0, 1.0, 1.0, 4, 4)
    assert choice.overhead == 1.0
    choice.drafting, choice.force = False, None
    assert not promise(choice, 1.0)
    assert promise(choice, 1.0 + 2 * (ENTER - 1.0))


def test_nothing_is_expected_before_an_iteration_was_timed() -> None:
    choice = ModeChoice(WIDTH)
    choice.begin()
    assert not promise(choice, 5.0)


def test_drafting_ends_when_it_has_not_paid() -> None:
    choice = timed()
    promise(choice, 5.0)
    choice.changed()
    drafted(choice, 0.9, TRIAL - 1)
    assert not choice.change(fits=True)
    drafted(choice, 0.9, 1)
    assert choice.change(fits=True) and choice.seen < 1
    choice.changed()
    assert choice.overhead == pytest.approx(30 / (2 * 12)), "what synchronous iterations take is known now"
    assert choice.changes == 2 and not choice.drafting


def test_drafting_goes_on_while_it_pays_and_ends_at_once_when_it_is_hopeless() -> None:
    choice = timed()
    promise(choice, 5.0)
    choice.changed()
    drafted(choice, 2.0, 100)
    assert not choice.change(fits=True) and choice.seen == pytest.approx(2, rel=0.1)
    other = timed()
    promise(other, 5.0)
    other.changed()
    drafted(other, 0.5, TRIAL // 2)
    assert other.change(fits=True)


def test_guesses_become_seldom_where_they_promise_nothing() -> None:
    choice, at, now = timed(), [], 0
    while now < 1000:
        choice.passed()
        now += 1
        if choice.is_due:
            at.append(now)
            choice.probed(1.0, EVIDENCE)
    gaps = np.diff(at)
    assert at[0] == 1 and gaps[:2].tolist() == [WIDTH + 2] * 2
    assert gaps[2] == 2 * PROBE and gaps[-1] == SELDOM and sorted(gaps.tolist()) == gaps.tolist()


def test_a_forced_mode_is_not_asked_about() -> None:
    choice = timed()
    choice.force = True
    assert not choice.is_due and choice.change(fits=True) and not choice.change(fits=False)
    choice.changed()
    drafted(choice, 0.1, 50)
    assert not choice.change(fits=True)
    choice.force = False
    assert choice.change(fits=True)


def test_two_ranks_choose_alike() -> None:
    def rank() -> list[bool]:
        r, choice, found = np.random.default_rng(1), timed(), []
        for _ in range(300):
            choice.passed()
            if choice.is_due:
                choice.probed(float(r.uniform(0.8, 3)), 100.0)
            if choice.change(fits=True):
                choice.changed()
            if choice.drafting:
                choice.timed_drafting(float(r.uniform(20, 60)), 10.0, 12.0, 4, int(r.integers(4, 12)))
            else:
                choice.timed_ahead(float(r.uniform(15, 30)), 10.0)
            found.append(choice.drafting)
        return found

    first, second = rank(), rank()
    assert first == second and True in first and False in first


# ---- the two ways to run ---------------------------------------------------------------------------------------------


class Core:
    """What of vLLM's engine core the modes touch."""

    def __init__(self, queue: deque[Any] | None) -> None:
        self.batch_queue, self.async_scheduling = queue, queue is not None
        self.scheduler: Any = object.__new__(AheadScheduler)
        self.scheduler.__dict__ |= {"requests": {}, "max_num_running_reqs": 8, "ended": []}
        self.step_fn: Any = None

    def step(self) -> None: ...

    def step_with_batch_queue(self) -> None: ...


def runner_of(texts: dict[str, list[int]], prompt: int, known: int) -> Any:
    """A runner that knows `known` output tokens of each request, and the rest as placeholders."""
    table = np.zeros((len(texts), 32), dtype=np.int32)
    states = {}
    for row, (name, text) in enumerate(texts.items()):
        outputs = [*text[prompt : prompt + known], *[-1] * (len(text) - prompt - known)]
        table[row, : len(text)] = [*text[:prompt], *outputs]
        states[name] = SimpleNamespace(output_token_ids=outputs, prev_num_draft_len=3)
    batch = SimpleNamespace(
        req_id_to_index={name: row for row, name in enumerate(texts)},
        num_prompt_tokens=np.full(len(texts), prompt),
        num_tokens_no_spec=np.zeros(len(texts), dtype=np.int32),
        token_ids_cpu=table,
        prev_sampled_token_ids="last", prev_req_id_to_index={},
        sampled_token_ids_cpu="last", async_copy_ready_event="event",
    )  # fmt: skip
    return SimpleNamespace(
        input_batch=batch, requests=states, use_async_scheduling=True, speculative_config="speculation",
        use_async_spec_decode=True, num_accepted_tokens_event="event",
    )  # fmt: skip


@pytest.mark.parametrize("queue", [deque(maxlen=2), None], ids=["asynchronous", "synchronous"])
def test_modes_and_back(queue: deque[Any] | None) -> None:
    core: Any = Core(queue)
    runner = runner_of({}, 1, 0)
    runner.use_async_scheduling = queue is not None
    told: list[str] = []
    steady = SimpleNamespace(take_over=lambda: told.append("ahead"), step_aside=lambda: told.append("aside"))
    modes = TailModes(core, runner, WIDTH, steady)
    for turn in range(2):
        assert not modes.drafting and core.batch_queue is queue and core.async_scheduling is (queue is not None)
        assert core.step_fn == (core.step if queue is None else core.step_with_batch_queue)
        assert runner.speculative_config is None and runner.use_async_scheduling is (queue is not None)
        assert core.scheduler.dynamic_sd_lookup == [0] * 9
        assert isinstance(core.scheduler, AsyncScheduler) is (queue is not None)
        modes.draft()
        assert modes.drafting and core.batch_queue is None and core.step_fn == core.step
        assert runner.speculative_config == "speculation" and not runner.use_async_scheduling
        assert core.scheduler.dynamic_sd_lookup == [WIDTH] * 9 and not isinstance(core.scheduler, AsyncScheduler)
        core.scheduler.requests = {"a": SimpleNamespace(spec_token_ids=[1], _output_token_ids=[])}
        modes.ahead()
        assert core.scheduler.requests["a"].spec_token_ids == []
        assert told == ["ahead", *["aside", "ahead"] * (turn + 1)]


def test_tokens_sampled_ahead_are_told_to_the_runner() -> None:
    texts = {"a": list(range(1, 12)), "b": list(range(20, 25)), "ended": [7, 8, 9]}
    core: Any = Core(deque(maxlen=2))
    runner = runner_of(texts, 2, 1)
    held = {name: state.output_token_ids for name, state in runner.requests.items()}
    modes = TailModes(core, runner, WIDTH)
    assert all(state.prev_num_draft_len == 0 for state in runner.requests.values())
    requests = {name: SimpleNamespace(_output_token_ids=texts[name][2:], spec_token_ids=[]) for name in "ab"}
    core.scheduler.requests = requests
    modes.draft()
    batch = runner.input_batch
    for row, name in enumerate("ab"):
        assert batch.token_ids_cpu[row, : len(texts[name])].tolist() == texts[name]
        assert held[name] == texts[name][2:], "the batch holds this very list"
        assert batch.num_tokens_no_spec[row] == len(texts[name])
    assert held["ended"] == [9], "it is known from before"
    assert batch.prev_sampled_token_ids is None and batch.async_copy_ready_event is None


def test_tokens_that_requests_got_in_tp() -> None:
    """One ends, one is left, one joined; in both ways to run."""
    core: Any = Core(deque(maxlen=2))
    modes = TailModes(core, runner_of({}, 1, 0), WIDTH)
    modes.begin({"a": 5, "b": 7})
    core.scheduler.ended += [("a", 9), ("joined", 3)]
    modes.draft()
    core.scheduler.requests = {"b": SimpleNamespace(num_output_tokens=17, spec_token_ids=[], _output_token_ids=[])}
    modes.end()
    assert not modes.drafting and modes.take_lengths() == [4, 3, 10] and modes.take_lengths() == []
    core.scheduler.requests = {}
    modes.end()
    assert modes.take_lengths() == []


def test_no_drafting_with_a_batch_in_flight() -> None:
    queue: deque[Any] = deque(maxlen=2)
    modes = TailModes(Core(queue), runner_of({}, 1, 0), WIDTH)
    queue.append("batch")
    with pytest.raises(RuntimeError, match="in flight"):
        modes.draft()


# ---- their graphs ----------------------------------------------------------------------------------------------------

DECODE, DRAFTS = [1, 2, 4, 8, 16], [8, 16, 24, 32, 48]


def dispatcher(drafts: list[int], mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> TailDispatcher:
    sizes = sorted({*DECODE, *DRAFTS, 64})
    compilation = CompilationConfig(mode=3, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    compilation.max_cudagraph_capture_size = sizes[-1]
    compilation.set_splitting_ops_for_v1("allgather_reducescatter")
    config: Any = SimpleNamespace(
        compilation_config=compilation, num_speculative_tokens=WIDTH, lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=20),
    )  # fmt: skip
    found = TailDispatcher(config, DECODE, drafts)
    found.initialize_cudagraph_keys(mode, 1 + WIDTH)
    return found


def test_every_captured_graph_is_the_one_its_batch_is_given() -> None:
    """As vLLM's capture asks for it: size, kind, mode."""
    graphs = dispatcher(DRAFTS)
    captured = [(mode, key) for mode, keys in graphs.get_capture_descs() for key in keys]
    assert len(captured) == len(DECODE) + len(DRAFTS) + 1, "and piecewise only above the drafts' sizes"
    for mode, key in captured:
        assert graphs.dispatch(key.num_tokens, uniform_decode=key.uniform) == (mode, key)


def test_batches_without_drafts_have_the_graphs_of_an_engine_without() -> None:
    graphs = dispatcher(DRAFTS)
    for batch in range(1, 17):
        mode, key = graphs.dispatch(batch, uniform_decode=True)
        assert mode is CUDAGraphMode.FULL and key.uniform
        assert key.num_tokens == key.num_reqs == min(size for size in DECODE if size >= batch)


def test_batches_with_drafts_have_full_graphs() -> None:
    graphs = dispatcher(DRAFTS)
    for tokens in range(1, 49):
        mode, key = graphs.dispatch(tokens, uniform_decode=False)
        assert mode is CUDAGraphMode.FULL and not key.uniform
        assert key.num_tokens == min(size for size in DRAFTS if size >= tokens) and key.num_reqs == min(
            key.num_tokens, 20
        )
    assert graphs.dispatch(20, uniform_decode=True)[1].num_tokens == 24, "a decode batch beyond the decode sizes"
    assert graphs.dispatch(60, uniform_decode=False)[0] is CUDAGraphMode.PIECEWISE
    assert graphs.dispatch(65, uniform_decode=False)[0] is CUDAGraphMode.NONE


def test_backends_that_cannot_keep_piecewise_graphs() -> None:
    graphs = dispatcher([])
    assert graphs.dispatch(9, uniform_decode=False)[0] is CUDAGraphMode.PIECEWISE
    assert graphs.dispatch(20, uniform_decode=True)[0] is CUDAGraphMode.PIECEWISE
    mode, key = graphs.dispatch(9, uniform_decode=True)
    assert mode is CUDAGraphMode.FULL and key.num_tokens == 16
    only = dispatcher(DRAFTS, CUDAGraphMode.PIECEWISE)
    assert only.dispatch(9, uniform_decode=False)[0] is CUDAGraphMode.PIECEWISE


def test_only_runners_that_ask_for_them_are_changed() -> None:
    runner = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}), cudagraph_dispatcher="vLLM's")
    prepare(runner, [], [])
    assert runner.cudagraph_dispatcher == "vLLM's"
    config = dispatcher(DRAFTS).vllm_config
    untyped: Any = config
    untyped.additional_config = {CONFIG_KEY: {"decode": DECODE, "drafts": DRAFTS}}
    runner = SimpleNamespace(vllm_config=config, uniform_decode_query_len=5)
    prepare(runner, [], [])
    assert runner.uniform_decode_query_len == 1 and isinstance(runner.cudagraph_dispatcher, TailDispatcher)


# ---- ranks agree -----------------------------------------------------------------------------------------------------


def test_a_failure_on_one_rank_ends_drafts_on_all() -> None:
    drafts: Any = object.__new__(TailDrafts)
    drafts._world, drafts._build, drafts.problem = 3, None, None
    adopted: list[bool] = []
    drafts.adopt = lambda: adopted.append(True)
    drafts.told(2)
    assert not adopted and drafts.problem is None
    drafts.told(3)
    assert adopted
    drafts.told(2 + _FAILED)
    assert "1 rank(s)" in drafts.problem and len(adopted) == 1
