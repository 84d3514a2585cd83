"""What the engine tests run inside rank processes, and how they compare outcomes."""

from __future__ import annotations

import hashlib
import random
import threading
from typing import Any, ClassVar

from moebius.engine.config import EngineConfig, PolicyConfig
from moebius.engine.types import SampleKey, SampleRequest, StepOutcome
from moebius.kernels.noise import derive_seed

EP, TP = PolicyConfig(kind="static_ep"), PolicyConfig(kind="static_tp")


def config(model: str, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "kv_cache_bytes": 32 << 20,
        "enable_prefix_caching": False,
    }
    return EngineConfig(**(settings | changes))


def make_engine(settings: EngineConfig) -> Any:
    from moebius.engine.engine import MoebiusEngine

    return MoebiusEngine(settings)


def run(engine: Any, policy: PolicyConfig, requests: list[SampleRequest]) -> StepOutcome:
    """One step under `policy`."""
    engine.policy.config = policy
    return engine.run_step(requests)


class Alternating:
    """A policy that switches to the other layout at each of these iterations, as long as something is live."""

    config = PolicyConfig(kind="scheduled")
    keeps_layout = waits_for_burst = learns_lengths = False
    log: ClassVar[list[Any]] = []

    def __init__(self, iterations: list[int]) -> None:
        self.iterations = sorted(iterations)

    def begin_step(self, start: Any) -> None:
        self._left = list(self.iterations)

    def end_step(self, *, broken_off: bool = False) -> None:
        pass

    def expects_tp(self, seen: Any) -> bool:
        return bool(self._left)  # where switches are prepared, all are

    def decide(self, seen: Any) -> Any:
        from moebius.engine.layout import Layout
        from moebius.engine.policy import Decision

        other = Layout.TP if seen.layout is Layout.EP else Layout.EP
        return Decision(other if self._left and seen.iteration >= self._left[0] else None, "scripted")

    def switched(self) -> None:
        self._left.pop(0)

    def cancelled(self, iteration: int) -> None:
        self._left.pop(0)


def free_pages(engine: Any) -> tuple[int, int]:
    """Of the EP and of the TP pool."""
    return engine.pair.ep.free_pages, engine.pair.tp.free_pages


def usable_pages(engine: Any) -> tuple[int, int]:
    """Of the EP and of the TP pool."""
    return engine.pair.ep.usable_pages, engine.pair.tp.usable_pages


def run_with_a_reserved_page_in_use(
    engine: Any, policy: PolicyConfig, page: int, requests: list[SampleRequest]
) -> StepOutcome:
    """One step from whose first iteration to its ninth rank 0 holds a page, counted from the end, as a sample might."""
    pool = engine.pair.ep.scheduler.kv_cache_manager.block_pool
    held = [pool.blocks[-page]] if engine.rank == 0 else []
    passed = 0

    def on_iteration(*seen: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == 1:
            pool.touch(held)
        if passed == 9:
            pool.free_blocks(held)

    engine.policy.config = policy
    return engine.run_step(requests, on_iteration=on_iteration)


def stage_at_most(engine: Any, layers: int) -> int:
    """From now on. Returns the bytes that a layer sends."""
    engine.switcher.staging.most = layers
    w13, w2 = (p.numel() * p.element_size() for p in engine.switcher.staging._tensors(0)[:2])
    return (w13 + w2) // engine.world_size * (engine.world_size - 1)


def tp_expert_hashes(engine: Any) -> list[str]:
    """SHA-256 of each layer's experts in TP, where they must stand."""
    from moebius.engine.layout import Layout

    assert engine.switcher.experts_in is Layout.TP
    return [
        hashlib.sha256(module.w13_weight.numpy().tobytes() + module.w2_weight.numpy().tobytes()).hexdigest()
        for module in engine.pair.tp.expert_modules
    ]


def run_alternating(engine: Any, iterations: list[int], requests: list[SampleRequest]) -> StepOutcome:
    """One step that switches at each of `iterations`."""
    kept, engine.policy = engine.policy, Alternating(iterations)
    try:
        return engine.run_step(requests)
    finally:
        engine.policy = kept


def run_open(
    engine: Any,
    switches: list[int] | PolicyConfig,
    waves: list[tuple[int, list[SampleRequest]]],
    late: list[SampleRequest],
) -> StepOutcome:
    """An open step: each wave is submitted after so many iterations, `late` when everything else has long ended.

    `switches` are iterations to switch at, or a policy.
    """
    iteration = 0
    results: list[Any] = []
    waves = sorted(waves, key=lambda wave: wave[0])

    def on_iteration(done: int, live: int, layout: str, tokens: int) -> None:
        nonlocal iteration
        iteration += 1
        while waves and waves[0][0] <= iteration:
            engine.inbox.submit(waves.pop(0)[1])

    def end() -> None:
        for _, wave in waves:
            engine.inbox.submit(wave)
        waves.clear()
        engine.inbox.submit(late)
        engine.inbox.close()

    kept = engine.policy
    if isinstance(switches, PolicyConfig):
        engine.policy.config = switches
    else:
        engine.policy = Alternating(switches)
    engine.inbox.open()
    engine.inbox.submit(waves.pop(0)[1])
    timer = threading.Timer(4.0, end)
    timer.start()
    try:
        outcome = engine.run_step([], on_iteration=on_iteration, on_results=results.extend)
    finally:
        timer.cancel()
        engine.inbox.close()
        engine.policy = kept
    assert not outcome.results
    outcome.results = results
    return outcome


def split(requests: list[SampleRequest], ranks: int, rule: str = "round") -> list[tuple[list[SampleRequest]]]:
    """Per-rank argument lists for Fleet.call: round robin, or all on rank 0, or skewed."""
    parts: list[list[SampleRequest]] = [[] for _ in range(ranks)]
    for i, request in enumerate(requests):
        parts[{"round": i % ranks, "first": 0, "skew": 0 if i % 5 else 1}[rule]].append(request)
    return [(part,) for part in parts]


def collect(outcomes: list[StepOutcome]) -> dict[SampleKey, tuple[Any, ...]]:
    """Every sample's outcome by key; fails on a sample that came back twice."""
    merged: dict[SampleKey, tuple[Any, ...]] = {}
    for outcome in outcomes:
        for r in outcome.results:
            assert r.key not in merged, f"{r.key} came back twice"
            merged[r.key] = (r.token_ids, r.finish_reason, r.stop_reason, r.text, r.logprobs)
    return merged


def assert_same(got: dict[SampleKey, Any], want: dict[SampleKey, Any], tolerance: float = 2e-3) -> None:
    """Tokens, finish and stop reasons and text equal; logprobs of sampled tokens within `tolerance`."""
    assert sorted(got) == sorted(want)
    for key in want:
        assert got[key][:4] == want[key][:4], f"{key}: {got[key][:4]} instead of {want[key][:4]}"
        a, b = got[key][4], want[key][4]
        assert (a is None) == (b is None)
        if a:
            worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
            assert worst <= tolerance, f"{key}: logprobs differ by {worst}"


def rich_sampling(i: int, max_tokens: int) -> dict[str, Any]:
    """The i-th of a cycle over everything a sampling request can ask for."""
    base: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 0}
    return [
        base | {"temperature": 0.0, "ignore_eos": True},
        base | {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "ignore_eos": True},
        base | {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        base | {"temperature": 1.0, "logit_bias": {5: 2.0, 9: -3.0}, "min_tokens": max_tokens // 2,
                "stop_token_ids": list(range(200, 330))},
        base | {"temperature": 1.2, "allowed_token_ids": list(range(20, 300)), "logprobs": 3, "ignore_eos": True},
        base | {"temperature": 1.0, "stop": ["e", "th", "12"], "min_tokens": 3},
        base | {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(100, 260))},
        base | {"temperature": 0.7, "top_p": 0.95, "bad_words": ["the"]},
    ][i % 8]  # fmt: skip


def rich_requests(count: int, seed: int = 0, step: int = 0, samples: int = 2, longest: int = 60) -> list[SampleRequest]:
    """`count` prompts with `samples` samples each, of all sampling kinds, prompts of 1..90 tokens."""
    r = random.Random(seed)
    requests = []
    for p in range(count):
        prompt = [r.randrange(3, 512) for _ in range(r.randrange(1, 90))]
        for s in range(samples):
            fields = rich_sampling(p, r.randrange(8, longest))
            requests.append(SampleRequest(SampleKey(p, s), prompt, fields, derive_seed(seed, step, p, s)))
    return requests


def expert_hashes(engine: Any, layout: str) -> list[str]:
    """Hash of each layer's expert bytes in `layout`."""
    runtime = engine.pair.ep if layout == "EP" else engine.pair.tp
    return [
        hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in (m.w13_weight, m.w2_weight))).hexdigest()
        for m in runtime.expert_modules
    ]


def run_with_aborts(
    engine: Any,
    policy: PolicyConfig,
    aborts: dict[str, list[SampleKey]],
    requests: list[SampleRequest],
) -> StepOutcome:
    """A step in which `aborts[moment]` are aborted: moment is "before", "switch" or the number of an iteration."""
    iteration = 0

    def on_iteration(done: int, live: int, layout: str, tokens: int) -> None:
        nonlocal iteration
        iteration += 1
        engine.abort(aborts.get(str(iteration), []))

    switch = type(engine.switcher).to_tp

    def aborting_switch(*args: Any, **more: Any) -> Any:
        engine.abort(aborts.get("switch", []))
        return switch(engine.switcher, *args, **more)

    engine.policy.config = policy
    engine.switcher.to_tp = aborting_switch
    engine.abort(aborts.get("before", []))
    try:
        return engine.run_step(requests, on_iteration=on_iteration)
    finally:
        del engine.switcher.to_tp


def addresses(engine: Any) -> tuple[list[int], list[int]]:
    return engine.pair.ep.addresses(), engine.pair.tp.addresses()


def round_trip_hashes(engine: Any) -> tuple[list[str], list[str]]:
    """Expert hashes in EP before and after EP->TP->EP, whatever the slots in between held."""
    from moebius.engine.layout import Layout

    before = expert_hashes(engine, "EP")
    engine.switcher.reshard(Layout.TP)
    engine.switcher.reshard(Layout.EP)
    return before, expert_hashes(engine, "EP")


def run_checking_kv(engine: Any, policy: PolicyConfig, requests: list[SampleRequest]) -> tuple[StepOutcome, int]:
    """A step whose switch is checked: every live page equals its source's heads, all other TP pages are poisoned.

    Returns the outcome and how many bytes of KV were compared on this rank.
    """
    import torch
    import torch.distributed as dist

    from moebius.kernels.plan import kv_head_ranges

    move, compared = type(engine.switcher)._kv_to_tp, 0

    def checked_move(placement: Any) -> int:
        nonlocal compared
        ep, tp = engine.pair.ep.kv, engine.pair.tp.kv
        of_rank = torch.from_numpy(placement.source[placement.owner == engine.rank]).to(ep[0].device)
        gathered: list[Any] = [None] * engine.world_size
        dist.all_gather_object(gathered, [kv[of_rank].cpu() for kv in ep], group=engine.switcher.cpu_group)
        sent = move(engine.switcher, placement)
        start, stop = kv_head_ranges(engine.pair.shape.num_kv_heads, engine.world_size)[engine.rank]
        live = set(placement.target.tolist())
        assert len(live) == len(placement.target), "a target page was given twice"
        dead = [page for page in range(tp[0].shape[0]) if page not in live]
        for layer, kv in enumerate(tp):
            for rank, layers in enumerate(gathered):
                target = torch.from_numpy(placement.target[placement.owner == rank]).to(kv.device)
                want = layers[layer][:, start:stop]
                assert torch.equal(kv[target].cpu(), want), f"pages of rank {rank}, layer {layer}"
                compared += want.numel() * want.element_size()
            kv[dead] = 1e4
        return sent

    engine.policy.config = policy
    engine.switcher._kv_to_tp = checked_move
    try:
        return engine.run_step(requests), compared
    finally:
        del engine.switcher._kv_to_tp


def run_and_park(
    engine: Any,
    switches: list[int] | PolicyConfig,
    park_at: int | None,
    requests: list[SampleRequest],
    waves: list[tuple[int, list[SampleRequest]]] = [],  # noqa: B006  (never changed)
    keep_kv: bool = False,
) -> StepOutcome:
    """A step that rank 0 asks to park after so many iterations; None: it runs to its end. Waves as in `run_open`."""
    iteration = 0
    left = sorted(waves, key=lambda wave: wave[0])

    def on_iteration(done: int, live: int, layout: str, tokens: int) -> None:
        nonlocal iteration
        iteration += 1
        while left and left[0][0] <= iteration:
            engine.inbox.submit(left.pop(0)[1])
        if not left and park_at is not None and iteration >= park_at and engine.rank == 0:
            engine.park()

    kept, config = engine.policy, engine.config
    engine.config = config.model_copy(update={"park_keeps_kv": keep_kv})
    if isinstance(switches, PolicyConfig):
        engine.policy.config = switches
    else:
        engine.policy = Alternating(switches)
    if left:
        engine.inbox.open()
    try:
        return engine.run_step(requests, on_iteration=on_iteration)
    finally:
        engine.policy, engine.config = kept, config


def pages_in_use(engine: Any) -> tuple[int, int]:
    return tuple(r.usable_pages - r.free_pages for r in (engine.pair.ep, engine.pair.tp))


def abort_parked(engine: Any, keys: list[SampleKey] | None) -> list[Any]:
    return engine.abort_parked(keys)


def run_failing(engine: Any, rank: int, requests: list[SampleRequest]) -> StepOutcome:
    """A step in which a function given to it raises an error on one rank, after some iterations."""
    iteration = 0

    def on_iteration(done: int, live: int, layout: str, tokens: int) -> None:
        nonlocal iteration
        iteration += 1
        if iteration == 5 and engine.rank == rank:
            raise ZeroDivisionError("of the caller")

    engine.policy.config = EP
    return engine.run_step(requests, on_iteration=on_iteration)


def run_aborting(engine: Any, keys: list[SampleKey] | None, at: int, requests: list[SampleRequest]) -> StepOutcome:
    """A step in which rank 0 and all others ask to abort these samples after so many iterations."""
    iteration = 0

    def on_iteration(done: int, live: int, layout: str, tokens: int) -> None:
        nonlocal iteration
        iteration += 1
        if iteration == at:
            engine.abort(keys)

    engine.policy.config = EP
    return engine.run_step(requests, on_iteration=on_iteration)
