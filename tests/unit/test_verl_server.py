"""verl's calls on a server, over a service that stands in for the real one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moebius.engine.config import EngineConfig
from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.integrations import waiting
from moebius.rollout.integrations.verl import server as module
from moebius.rollout.integrations.verl.agent_loop import _trajectories
from moebius.rollout.integrations.verl.settings import VerlSettings
from moebius.rollout.types import Rollout, Sample
from tests.unit.reports import step_report
from tests.unit.test_verl_settings import rollout


class Service:
    """Notes what is asked of it; samples end when `finish` says so."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(max_model_len=96)
        self.version = 5
        self.asked: list[tuple[Any, ...]] = []
        self.open: list[tuple[list[int], asyncio.Future[Rollout]]] = []
        self.broken = False
        self.blocked: str | None = None

    async def generate(self, prompt: list[int], sampling: Any, request_id: str) -> Rollout:
        self.asked.append(("generate", prompt, sampling.max_tokens, request_id))
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self.open.append((prompt, future))
        return await future

    def finish(
        self, reason: str = "stop", versions: tuple[tuple[int, int], ...] = ((5, 2),), why: str | None = None
    ) -> None:
        for prompt, future in self.open:
            layouts = [("EP", 1), ("TP", 1)]
            sample = Sample(0, [7, 8], [-0.5, -1.5], None, None, reason, why, 5, 0, list(versions), layouts=layouts)
            future.set_result(Rollout(0, prompt, [sample]))
        self.open.clear()

    def stats(self) -> Any:
        return SimpleNamespace(live=len(self.open), waiting=1, parked=0, blocked=self.blocked)

    async def pause(self, mode: str) -> None:
        self.asked.append(("pause", mode))
        self.finish("abort")

    async def pull_update(self, version: int, source: str, args: list[tuple[Any, ...]]) -> None:
        self.asked.append(("pull_update", version, source, args))
        if self.broken:
            raise MoebiusError("a rank failed")

    def begin_step(self, expected: int, step: int | None = None, *, hold: bool = False) -> None:
        self.asked.append(("begin_step", expected, hold))

    def filled(self) -> None:
        self.asked.append(("filled",))

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.asked.append((name, *args, *kwargs.items()))

        return call


def make(mode: str = "hybrid", calls: Path | None = None, **changes: Any) -> tuple[module.MoebiusServer, Service]:
    config = RolloutConfig(ranks=2, engine=EngineConfig(model="m", policy={"threshold": 2}), sampling={"max_tokens": 1})
    settings = VerlSettings(calls=None if calls is None else str(calls))
    options = rollout(**changes)
    options.free_cache_engine = True
    server = module.MoebiusServer(config, settings, options, mode)
    server._service = service = Service()
    return server, service


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tokens_in_and_out() -> None:
    async def main() -> None:
        server, service = make()
        call = asyncio.ensure_future(server.generate([1, 2, 3], {"temperature": 1.0, "logprobs": True}, "r"))
        await settle()
        assert service.asked == [("generate", [1, 2, 3], 32, "r")]
        service.finish(versions=((4, 1), (5, 1)))
        output = await call
        assert (output.token_ids, output.log_probs, output.stop_reason) == ([7, 8], [-0.5, -1.5], "completed")
        assert output.extra_fields == {
            "global_steps": 5, "min_global_steps": 4, "max_global_steps": 5, "tp_tokens": 1, "layouts": "EP:1 TP:1"
        }  # fmt: skip

    asyncio.run(main())


def test_images_are_refused() -> None:
    server, _ = make()
    with pytest.raises(BadInput, match="not supported"):
        asyncio.run(server.generate([1], {}, "r", image_data=["picture"]))


def test_an_abort_returns_what_there_is_and_expects_the_rest_again() -> None:
    async def main() -> None:
        server, service = make()
        await server.begin_step(4)
        running = [asyncio.ensure_future(server.generate([1, i], {}, f"r{i}")) for i in range(4)]
        await settle()
        assert await server.abort_all_requests() == {"aborted_count": 5, "request_ids": []}
        outputs = await asyncio.gather(*running)
        assert {output.stop_reason for output in outputs} == {"aborted"}
        assert all(output.token_ids == [7, 8] for output in outputs)
        await server.begin_step(3)
        assert [call for call in service.asked if call[0] == "begin_step"] == [
            ("begin_step", 4, False), ("begin_step", 3 + 4, False)
        ]  # fmt: skip

    asyncio.run(main())


def test_a_refused_request_is_an_error_and_no_abort() -> None:
    async def main() -> None:
        server, service = make()
        call = asyncio.ensure_future(server.generate([1], {}, "r"))
        await settle()
        service.finish("abort", why="too long")
        with pytest.raises(BadInput, match="refuses the request: too long"):
            await call

    asyncio.run(main())


def test_a_server_that_leaves_rejects() -> None:
    async def main() -> None:
        server, service = make()
        await server.set_global_steps(9)
        await server.abort_all_requests(reject_request=True)
        output = await server.generate([1], {}, "r")
        assert (output.token_ids, output.stop_reason) == ([], "aborted")
        assert output.extra_fields["global_steps"] == 9
        await server.resume_generation()
        call = asyncio.ensure_future(server.generate([1], {}, "r"))
        await settle()
        assert service.asked[-1][0] == "generate"
        service.finish()
        assert (await call).stop_reason == "completed"

    asyncio.run(main())


def test_several_turns_are_in_when_few_trajectories_are_left() -> None:
    async def main() -> None:
        server, service = make()
        await server.begin_step(4, multi_turn=True)
        calls = [asyncio.ensure_future(server.generate([1, i], {}, f"r{i}")) for i in range(6)]
        await settle()
        assert ("filled",) not in service.asked
        await server.trajectories_ended()
        assert ("filled",) not in service.asked
        await server.trajectories_ended()  # 2 of 4 are left, the threshold
        assert ("filled",) in service.asked
        assert ("begin_step", 4, True) in service.asked
        service.finish()
        await asyncio.gather(*calls)

    asyncio.run(main())


def test_numbers_are_taken_once() -> None:
    async def main() -> None:
        server, _ = make()
        server._reports.append(step_report(0, lengths=(1, 3), switch_at=1))
        assert (await server.take_metrics())["engine_steps"] == 1
        assert (await server.take_metrics())["engine_steps"] == 0

    asyncio.run(main())


def test_a_validation_is_in_no_numbers() -> None:
    async def main() -> None:
        server, service = make()
        report = step_report(0, lengths=(1, 3))
        await server.begin_step(2)
        server._reports.append(report)
        await server.begin_step(4, validate=True)
        server._reports += [report, report]
        await server.begin_step(2)
        server._reports.append(report)
        call = asyncio.ensure_future(server.generate([1], {}, "r"))
        await settle()
        before = service.asked.count(("end_step",))
        assert (await server.take_metrics())["engine_steps"] == 2
        assert service.asked.count(("end_step",)) == before, "a step with live requests must not be waited for"
        service.finish()
        await call
        await server.take_metrics()
        assert service.asked.count(("end_step",)) == before + 1

    asyncio.run(main())


def test_requests_fail_where_only_new_weights_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)

    async def main() -> None:
        server, service = make()
        call = asyncio.ensure_future(server.generate([1], {}, "r"))
        await asyncio.sleep(0.05)
        assert not call.done()
        service.blocked = "the group was restarted"
        with pytest.raises(MoebiusError, match="before the next weights: the group was restarted"):
            await call

    asyncio.run(main())


def test_memory_by_mode() -> None:
    async def calls(mode: str) -> list[tuple[Any, ...]]:
        server, service = make(mode)
        await server.sleep()
        await server.wake_up(["weights"])
        await server.release_kv_cache()
        await server.resume_kv_cache()
        return service.asked

    assert asyncio.run(calls("hybrid")) == [
        ("sleep", ("keep_weights", False)), ("wake_up", ["weights"]), ("sleep", ("kv_cache",)),
        ("wake_up", ("kv_cache",)),
    ]  # fmt: skip
    assert asyncio.run(calls("colocated")) == [("sleep", ("keep_weights", True)), ("wake_up", ["weights"])]
    assert asyncio.run(calls("standalone")) == [("sleep", ("kv_cache",)), ("wake_up", ("kv_cache",))]


def test_every_rank_reads_its_own_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drained = []
    monkeypatch.setattr(module, "drain", lambda address, wait_s: drained.append(address))

    async def main() -> None:
        server, service = make(calls=tmp_path / "calls")
        await server.update_weights(["a", "b"], True, 3)
        file = str(tmp_path / "calls")
        want = ("pull_update", 3, "moebius.rollout.integrations.verl.transfer:receive")
        assert service.asked == [(*want, [("a", True, file), ("b", True, file)])]
        await server.update_weights(["a"], True, None)
        assert service.asked[-1][1] == service.version
        assert not drained
        service.broken = True
        with pytest.raises(MoebiusError, match="a rank failed"):
            await server.update_weights(["a", "b"], False, 4)
        assert sorted(drained) == ["a", "b"]

    asyncio.run(main())
    lines = [json.loads(line)["call"] for line in (tmp_path / "calls").read_text().splitlines()]
    assert lines == ["update_weights", "updated"] * 2 + ["update_weights"]


def test_how_many_trajectories_a_batch_becomes() -> None:
    options = SimpleNamespace(n=4, val_kwargs=SimpleNamespace(n=2))

    class Batch(dict):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 3

    assert _trajectories(Batch(), options) == (12, False)
    assert _trajectories(Batch(validate=True), options) == (6, True)
    assert _trajectories(Batch(__rollout_n__=[1, 2, 5]), options) == (8, False)
