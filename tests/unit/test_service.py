"""The service's own logic over a stand-in group (see service_group): queueing, steps, pauses, losses, streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moebius.kernels.noise import derive_seed
from moebius.rollout.errors import BadInput, GroupNotReady, MoebiusError, QueueFull, RankDied
from moebius.rollout.failure_types import Loss
from moebius.rollout.service import RolloutService
from moebius.rollout.service_types import ServiceSettings
from tests.unit.service_group import FakeGroup, sample_of, token

FAST: dict[str, Any] = {"idle_s": 0.05, "quiet_s": 0.05}


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def serve(group: FakeGroup) -> Iterator[Callable[..., RolloutService]]:
    made: list[RolloutService] = []

    def make(**settings: Any) -> RolloutService:
        made.append(RolloutService(group, ServiceSettings(**FAST | settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for service in made:
        service.close(10)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def in_step(group: FakeGroup) -> int:
    step = group.step
    return 0 if step is None else len(step.live)


def tokens(rollout: Any) -> list[list[int]]:
    return [sample.token_ids for sample in rollout.samples]


def test_requests_are_answered_and_the_step_closes(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        rollouts = await asyncio.gather(*(service.generate([i + 1], n=3) for i in range(20)))
        assert [rollout.prompt_token_ids for rollout in rollouts] == [[i + 1] for i in range(20)]
        assert all(len(sample.token_ids) == 4 for rollout in rollouts for sample in rollout.samples)
        assert len({tuple(t) for rollout in rollouts for t in tokens(rollout)}) == 60, "seeds differ"
        await until(lambda: group.step is None)

    asyncio.run(run())
    stats = service.stats()
    assert (stats.requests["ok"], stats.samples["length"], stats.output_tokens, stats.live) == (20, 60, 240, 0)
    assert stats.steps == stats.switches["TP"] == stats.phase_ms[("TP", "kv")] >= 1
    assert service.requests() == []


def test_seeds(group: FakeGroup, serve: Any) -> None:
    """Given: of nothing but themselves. Else of the step and the number in it."""
    service = serve()

    async def run() -> None:
        await service.generate([1])
        own = await service.generate([1], {"seed": 9}, n=2)
        assert tokens(own) == [[token(derive_seed(9, 0, 0, s), i) for i in range(4)] for s in range(2)]
        assert tokens(await service.generate([2], {"seed": 9}, n=2)) == tokens(own)
        assert tokens(await service.generate([2], {"seed": 9}, n=2, step=3)) != tokens(own)
        service.begin_step(2, step=40)
        first, second = await service.generate([1]), await service.generate([1])
        await service.end_step()
        assert [tokens(first), tokens(second)] == [
            [[token(derive_seed(0, 40, number, 0), i) for i in range(4)]] for number in range(2)
        ]

    asyncio.run(run())


def test_announced_steps(group: FakeGroup, serve: Any) -> None:
    reports: list[Any] = []
    service = serve()
    service._driver.on_report = reports.append

    async def run() -> None:
        service.begin_step(3, step=7)
        await service.generate([1], n=2)
        await asyncio.sleep(0.2)
        assert group.step is not None and "filled" not in group.log, "its third sample is still to come"
        await service.generate([2])
        report = await service.end_step()
        assert (report.step, report.samples) == (7, 3)
        assert group.log == ["open 7 expected 3", "filled", "close 7"]
        assert await service.end_step() is None, "nothing has run since"
        service.begin_step(1, step=7)  # used up: steps count on
        await service.generate([3])
        assert (await service.end_step()).step == 8

    asyncio.run(run())
    assert [report.step for report in reports] == [7, 8]


def test_an_announcement_is_extended_and_held(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        service.begin_step(2)
        await service.generate([1])
        service.begin_step(2)
        for _ in range(3):
            await service.generate([1])
        told = [line for line in group.log if not line.startswith("close")]  # it may have been idle for long enough
        assert told[1:] == ["expect 3", "filled"]
        await service.end_step()
        group.log.clear()
        service.begin_step(1, hold=True)
        await service.generate([1])
        await asyncio.sleep(0.2)
        assert group.step is not None and group.log == [f"open {group.step.step} expected None"]
        service.filled()
        await until(lambda: group.step is None)
        assert group.log[1] == "filled"

    asyncio.run(run())


def test_a_step_that_nobody_announced_is_filled_when_requests_stop(group: FakeGroup, serve: Any) -> None:
    service = serve(quiet_s=0.1)

    async def run() -> None:
        group.hold = True
        late = [asyncio.create_task(service.generate([1], {"max_tokens": most})) for most in (2, 2, 10**6)]
        await asyncio.sleep(0.3)
        assert "filled" not in group.log, "nothing has ended yet: no tail"
        group.hold = False
        await asyncio.gather(*late[:2])
        await until(lambda: "filled" in group.log)
        await service.abort()
        assert (await late[2]).samples[0].finish_reason == "abort"

    asyncio.run(run())


def test_too_much(group: FakeGroup, serve: Any) -> None:
    service = serve(max_pending=10)

    async def run() -> None:
        group.hold = True
        held = [asyncio.create_task(service.generate([1], n=5)) for _ in range(2)]
        await until(lambda: in_step(group) == 10)
        with pytest.raises(QueueFull, match="10 unfinished samples"):
            await service.generate([1])
        with pytest.raises(BadInput, match="more than the service takes"):
            await service.generate([1], n=11)
        with pytest.raises(BadInput, match="is empty"):
            await service.generate([])
        group.hold = False
        await asyncio.gather(*held)
        await service.generate([1], n=10)
        pair = [service.prepare([1], n=6), service.prepare([1], n=6)]
        with pytest.raises(QueueFull):
            service.admit(pair)  # neither of them
        await service.generate([1], n=10)
        assert service.stats().requests == {"ok": 4, "refused": 3}

    asyncio.run(run())


def test_pauses(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        with pytest.raises(BadInput, match="park, abort, finish"):
            await service.pause("stop")
        group.hold = True
        for mode in ("park", "abort", "finish"):
            running = asyncio.create_task(service.generate([1], {"seed": 5, "max_tokens": 6}))
            await until(lambda: in_step(group) == 1)
            pausing = asyncio.create_task(service.pause(mode))
            if mode == "finish":
                await asyncio.sleep(0.1)
                assert not pausing.done()
                group.hold = False
            await pausing
            assert group.step is None and service.stats().paused
            assert service.stats().parked == (1 if mode == "park" else 0)
            waiting = asyncio.create_task(service.generate([2]))
            await asyncio.sleep(0.1)
            assert not waiting.done() and service.stats().waiting == 1
            group.hold = False
            await service.resume()
            await waiting
            [sample] = (await running).samples
            assert sample.finish_reason == ("abort" if mode == "abort" else "length")
            if mode != "abort":
                assert sample.token_ids == [token(derive_seed(5, 0, 0, 0), i) for i in range(6)]
            group.hold = True

    asyncio.run(run())


def test_updates_come_between_steps(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        running = asyncio.create_task(service.generate([1], {"max_tokens": 60}))
        await until(lambda: group.step is not None and any(len(s[1]) > 2 for s in list(group.step.live.values())))
        await service.update_weights({}, 3)
        assert service.version == 3
        [sample] = (await running).samples
        assert (len(sample.token_ids), sample.policy_version) == (60, 3)
        service.set_version(77)
        assert service.version == service.stats().version == 77

    asyncio.run(run())
    assert [line.split()[0] for line in group.log[:4]] == ["open", "park", "update", "open"]


def test_parked_requests_can_be_aborted(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        group.hold = True
        running = asyncio.create_task(service.generate([1], n=2, request_id="a"))
        await until(lambda: in_step(group) == 2)
        await service.pause("park")
        waiting = asyncio.create_task(service.generate([1], request_id="b"))
        await until(lambda: service.stats().waiting == 1)
        assert await service.abort(["a", "b", "c"]) == 2
        assert {s.finish_reason for s in (await running).samples + (await waiting).samples} == {"abort"}
        assert not group.parked

    asyncio.run(run())


def test_cancelling_aborts(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        group.hold = True
        running = asyncio.create_task(service.generate([1], request_id="a"))
        await until(lambda: in_step(group) == 1)
        with pytest.raises(BadInput, match="unfinished request"):
            await service.generate([1], request_id="a")
        running.cancel()
        await until(lambda: service.stats().requests["aborted"] == 1)
        group.hold = False
        await service.generate([1], request_id="a")

    asyncio.run(run())


def test_losses_are_made_good(group: FakeGroup, serve: Any) -> None:
    """What was live is drawn anew with the same seeds, also what was parked; twice lost is given up."""
    service = serve()

    async def run() -> None:
        group.hold = True
        running = [asyncio.create_task(service.generate([1], {"max_tokens": 6})) for _ in range(3)]
        await until(lambda: in_step(group) == 3)
        seeds = [s[0] for s in group.step.live.values()]  # type: ignore[union-attr]
        await service.pause("park")
        await service.resume()
        await until(lambda: in_step(group) == 3)
        group.lose()
        group.hold = False
        rollouts = await asyncio.gather(*running)
        assert [t for r in rollouts for t in tokens(r)] == [[token(seed, i) for i in range(6)] for seed in seeds]
        group.hold = True
        unlucky = asyncio.create_task(service.generate([1]))
        for _ in range(2):
            await until(lambda: in_step(group) == 1)
            group.lose()
            await until(lambda: group.fail_next is None)
        with pytest.raises(RankDied):
            await unlucky
        group.hold = False
        await service.generate([2])
        assert service.stats().restarts == 3 and service.stats().dead is None

    asyncio.run(run())
    assert group.log.count("restart") == 3


def test_a_step_that_goes_on_after_a_loss(group: FakeGroup, serve: Any) -> None:
    """What was not streamed is drawn again by the step itself; what was streamed cannot be."""
    service = serve()

    async def run() -> None:
        stream = service.stream([service.prepare([1], {"max_tokens": 50})])
        await anext(aiter(stream))
        group.hold = True
        other = asyncio.create_task(service.generate([2]))
        await until(lambda: in_step(group) == 2)
        group.step.losses.append(Loss("step 0", "rank 1 died", 1, "prefill", 0.0, 0.0))  # type: ignore[union-attr]
        with pytest.raises(RankDied, match="rank 1 died; what was streamed cannot be drawn again"):
            async for _ in stream:
                pass
        group.hold = False
        assert len((await other).samples[0].token_ids) == 4
        assert service.stats().restarts == 1 and "restart" not in group.log

    asyncio.run(run())


def test_a_prompt_that_was_given_up_is_an_error(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        group.hold = True
        running = asyncio.create_task(service.generate([1], n=2))
        await until(lambda: in_step(group) == 2)
        step = group.step
        assert step is not None
        for key in list(step.live):
            del step.live[key]
            sample = sample_of(key, [], "failed", 0)
            sample.stop_reason = "given up, since ranks were lost"
            step.ready.append((key, sample))
        with pytest.raises(MoebiusError, match="given up"):
            await running
        group.hold = False
        await service.generate([2])

    asyncio.run(run())


def test_a_group_that_gave_up_is_not_restarted(group: FakeGroup, serve: Any) -> None:
    service = serve(on_loss="raise")

    async def run() -> None:
        group.hold = group.gave_up = True
        running = asyncio.create_task(service.generate([1]))
        await until(lambda: in_step(group) == 1)
        group.lose()
        with pytest.raises(RankDied):
            await running
        await until(lambda: service.stats().dead is not None)

    asyncio.run(run())
    assert "restart" not in group.log and "no replay" in group.log


def test_no_more_restarts(group: FakeGroup, serve: Any) -> None:
    service = serve(max_restarts=1, max_losses=5)

    async def run() -> None:
        group.hold = True
        running = asyncio.create_task(service.generate([1]))
        for _ in range(2):
            await until(lambda: in_step(group) == 1)
            group.lose()
            await until(lambda: group.fail_next is None)
        with pytest.raises(GroupNotReady, match="rank 1 died"):
            await running
        with pytest.raises(GroupNotReady, match="rank 1 died"):
            await service.generate([1])
        with pytest.raises(GroupNotReady, match="rank 1 died"):
            await service.end_step()

    asyncio.run(run())


def test_requests_wait_for_weights(group: FakeGroup, serve: Any) -> None:
    service = serve()
    group.problem = "the last update failed; send a full update"

    async def run() -> None:
        waiting = asyncio.create_task(service.generate([1]))
        await until(lambda: service.stats().blocked is not None)
        assert "full update" in service.stats().blocked
        await service.update_weights({}, 1)
        await waiting
        assert service.stats().blocked is None

    asyncio.run(run())


def test_streams(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        tickets = [service.prepare([1], {"max_tokens": 50, "seed": i}, n=2) for i in range(2)]
        pieces: dict[tuple[int, int], list[Any]] = {}
        stream = service.stream(tickets)
        async for index, piece in stream:
            pieces.setdefault((index, piece.sample_index), []).append(piece)
            if len(pieces) == 4 and not group.log.count("update 1"):
                await service.update_weights({}, 1)  # parks: pieces go on where they were
        for (index, sample), own in pieces.items():
            drawn = [t for piece in own for t in piece.token_ids]
            assert drawn == [token(derive_seed(index, 0, 0, sample), i) for i in range(50)]
            assert "".join(piece.text for piece in own) == "".join(f"{t}," for t in drawn)
            assert len([lp for piece in own for lp in piece.logprobs]) == 50
            assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
            assert len(own) > 10
        group.hold = True
        stream = service.stream([service.prepare([1])])
        await until(lambda: in_step(group) == 1)
        stream.close()
        await until(lambda: service.stats().requests["aborted"] == 1)

    asyncio.run(run())


def test_long_steps_are_parked_and_go_on(group: FakeGroup, serve: Any) -> None:
    service = serve(step_max_s=0.2)

    async def run() -> None:
        [sample] = (await service.generate([1], {"max_tokens": 40, "seed": 1})).samples
        assert sample.token_ids == [token(derive_seed(1, 0, 0, 0), i) for i in range(40)]

    asyncio.run(run())
    assert len([line for line in group.log if line.startswith("park")]) >= 2


def test_closing_ends_everything(group: FakeGroup, serve: Any) -> None:
    service = serve()

    async def run() -> None:
        group.hold = True
        running = asyncio.create_task(service.generate([1]))
        await until(lambda: in_step(group) == 1)
        await asyncio.to_thread(service.close)
        assert (await running).samples[0].finish_reason == "abort"
        with pytest.raises(GroupNotReady, match="closed"):
            await service.generate([1])
        with pytest.raises(GroupNotReady, match="closed"):
            await service.resume()

    asyncio.run(run())
    assert group.step is None
