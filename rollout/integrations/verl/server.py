"""The actor of one replica: verl's calls on one side, a rollout service over a group on the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from moebius.rollout.config import RolloutConfig
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.integrations.verl.metrics import Metrics, step_metrics
from moebius.rollout.integrations.verl.settings import VerlSettings, sampling_of
from moebius.rollout.integrations.verl.steps import Trajectories
from moebius.rollout.integrations.verl.transfer import SOURCE, drain, note
from moebius.rollout.integrations.waiting import unless_blocked
from moebius.rollout.report import StepReport
from moebius.rollout.types import Sample

DRAIN_S = 10.0  # after a failed update, for a trainer process to begin sending what nobody reads

_log = logging.getLogger(__name__)


class MoebiusServer:
    """An asyncio actor; `MoebiusReplica` makes it. Methods and arguments are those of verl's rollout servers.

    What `mode` means for sleeping is verl's: "hybrid" gives everything back and gets all weights anew, "colocated"
    (reward models, teachers) keeps its weights in host memory, "standalone" never sleeps.
    """

    def __init__(self, config: RolloutConfig, settings: VerlSettings, rollout: Any, mode: str) -> None:
        self.config, self.settings, self.rollout, self.mode = config, settings, rollout, mode
        self.global_steps: int | None = None
        self._service: Any = None
        self._reports: list[StepReport] = []
        self._trajectories = Trajectories(config.engine.policy.threshold)
        self._rejecting = False
        self._running = 0  # requests without an answer
        self._kept: int | None = None  # while validating: how many reports came before

    async def launch(self) -> None:
        """Start the group; takes minutes with a large model. Raises MoebiusError."""
        from moebius.rollout.group import RolloutGroup
        from moebius.rollout.service import RolloutService

        def start() -> RolloutService:
            return RolloutService(RolloutGroup(self.config), self.settings.service, on_report=self._reports.append)

        self._note("launch", mode=self.mode, ranks=self.config.ranks)
        self._service = await asyncio.to_thread(start)

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """One turn of one trajectory, as token ids in and out. Waits while generation is paused or memory given back.

        A request that was ended early has the tokens it got and `stop_reason` "aborted"; ask again with prompt and
        tokens for the rest. `extra_fields["global_steps"]` is the step whose weights drew the last token;
        "tp_tokens" of the tokens were drawn in TP, and "layouts" says which ("EP:120 TP:31": the first 120 in EP).

        Raises BadInput, MoebiusError.
        """
        if any(data for data in (image_data, video_data, audio_data)):
            raise BadInput("images, video and audio are not supported by rollout.name=moebius")
        if self._rejecting:
            return self._aborted()
        ids = [int(token) for token in prompt_ids]
        sampling = sampling_of(sampling_params, len(ids), self.rollout, self._service.group.max_model_len)
        self._note("generate", prompt=len(ids), sampling=sampling.model_dump(exclude_defaults=True))
        answer = asyncio.ensure_future(self._service.generate(ids, sampling, request_id=str(request_id)))
        self._trajectories.arrived()
        self._look_at_burst()
        self._running += 1
        try:
            output = self._output((await unless_blocked(self._service, answer)).samples[0])
        finally:
            self._running -= 1
        if output.stop_reason == "aborted":
            self._trajectories.sent_back()
        self._note("generated", tokens=len(output.token_ids), stop=output.stop_reason, **output.extra_fields)
        return output

    def _output(self, sample: Sample) -> TokenOutput:
        if sample.finish_reason == "abort" and isinstance(sample.stop_reason, str):
            # As an abort it would be asked for again and again.
            raise BadInput(f"the engine refuses the request: {sample.stop_reason}")
        versions = [version for version, _ in sample.versions]
        return TokenOutput(
            token_ids=sample.token_ids,
            log_probs=sample.logprobs,
            routed_experts=sample.routed_experts,
            stop_reason="aborted" if sample.finish_reason == "abort" else "completed",
            extra_fields={
                "global_steps": versions[-1] if versions else self.global_steps,
                **({"min_global_steps": min(versions), "max_global_steps": max(versions)} if versions else {}),
                **_layouts(sample),
            },
        )

    def _aborted(self) -> TokenOutput:
        return TokenOutput(
            token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps}
        )

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all running requests with the tokens they have. Until `resume_generation` requests wait, or come back
        empty with `reject_request`.
        """
        before = self._service.stats()
        running = before.live + before.waiting + before.parked
        self._note("abort_all_requests", running=running, reject=reject_request)
        self._rejecting = reject_request
        await self._service.pause("abort")
        return {"aborted_count": running, "request_ids": []}

    async def resume_generation(self) -> None:
        """Sample again."""
        self._note("resume_generation")
        self._rejecting = False
        await self._service.resume()

    # ---- steps ----------------------------------------------------------------------------------------------------

    async def begin_step(self, trajectories: int, multi_turn: bool = False, validate: bool = False) -> None:
        """So many trajectories were sent out to this replica, about. Those of a validation are in no metrics."""
        self._note("begin_step", expected=trajectories, multi_turn=multi_turn, validate=validate)
        await self._end_if_idle()
        if validate and self._kept is None:
            self._kept = len(self._reports)
        elif not validate and self._kept is not None:
            del self._reports[self._kept :]
            self._kept = None
        if trajectories > 0:
            # Trajectories of several turns come back with requests: no number of them says that the burst is in.
            self._service.begin_step(self._trajectories.begin(trajectories), hold=multi_turn)

    async def trajectories_ended(self, trajectories: int = 1) -> None:
        """So many agent loops are over, with or without success."""
        self._trajectories.ended(trajectories)
        self._look_at_burst()

    def _look_at_burst(self) -> None:
        if self._trajectories.few_left:
            self._service.filled()

    async def take_metrics(self) -> Metrics:
        """Numbers of the engine steps since the last call."""
        await self._end_if_idle()
        reports, self._reports[:] = list(self._reports), []
        return step_metrics(reports)

    async def _end_if_idle(self) -> None:
        """Close the engine step, if nothing runs in it: it reports when it is closed."""
        if not self._running:
            await self._service.end_step()

    # ---- memory ---------------------------------------------------------------------------------------------------

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: "weights", "kv_cache"; None: both."""
        self._note("wake_up", tags=tags)
        if self.mode != "standalone":
            await self._service.wake_up(tags)

    async def sleep(self) -> None:
        """Give all memory back; requests wait until it is taken again."""
        self._note("sleep")
        if self.mode != "standalone" and self.rollout.free_cache_engine:
            await self._service.sleep(keep_weights=self.mode == "colocated")

    async def release_kv_cache(self) -> None:
        """Give the KV's memory back, for the time of an update."""
        self._note("release_kv_cache")
        if self.rollout.free_cache_engine and self.mode != "colocated":
            await self._service.sleep(("kv_cache",))

    async def resume_kv_cache(self) -> None:
        """Take the KV's memory again."""
        self._note("resume_kv_cache")
        if self.rollout.free_cache_engine and self.mode != "colocated":
            await self._service.wake_up(("kv_cache",))

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes. An update of the weights has done so already."""
        self._note("clear_kv_cache")
        await self._service.clear_kv_cache()

    # ---- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, addresses: Sequence[str], shared_memory: bool, global_steps: int | None) -> None:
        """Have rank r read all weights from the sender at `addresses[r]`. All or nothing over all ranks.

        Whatever happens, every sender gets to its end. Raises BadInput, MoebiusError.
        """
        version = self._service.version if global_steps is None else global_steps
        self._note("update_weights", version=version)
        args = [(address, shared_memory, self.settings.calls) for address in addresses]
        try:
            await self._service.pull_update(version, SOURCE, args)
        except MoebiusError:
            # Trainer processes wait for someone to read, or the job would hang instead of ending with this error.
            await asyncio.gather(*[asyncio.to_thread(drain, address, DRAIN_S) for address in addresses])
            raise
        self._note("updated", version=version)

    async def set_global_steps(self, global_steps: int) -> None:
        """The trainer step that the weights belong to."""
        self._note("set_global_steps", step=global_steps)
        self.global_steps = global_steps

    # ---- the rest of verl's interface -----------------------------------------------------------------------------

    async def start_profile(self, **kwargs: Any) -> None:
        """verl's profiler does not reach the ranks; `engine.profile` traces switches."""
        _log.warning("verl's profiler does not reach the ranks; set engine_kwargs.moebius.engine.profile instead")

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    def _note(self, call: str, **facts: Any) -> None:
        note(self.settings.calls, call, **facts)


def _layouts(sample: Sample) -> dict[str, Any]:
    """Scalars: verl's trainers put what they do not know into arrays of objects, and join those of several batches."""
    return {
        "tp_tokens": sum(count for layout, count in sample.layouts if layout == "TP"),
        "layouts": " ".join(f"{layout}:{count}" for layout, count in sample.layouts),
    }
