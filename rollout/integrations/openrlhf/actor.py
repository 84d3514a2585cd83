"""The rollout actor of OpenRLHF: its calls on one side, a rollout service over a group on the other.

Methods and arguments are those of openrlhf.trainer.ray.vllm_engine.RolloutRayActor, so that OpenRLHF's generators and
trainers cannot tell the two apart.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.integrations.openrlhf import transfer
from moebius.rollout.integrations.openrlhf.burst import Burst
from moebius.rollout.integrations.openrlhf.place import find_place
from moebius.rollout.integrations.openrlhf.settings import OpenRlhfSettings, group_config, sampling_of
from moebius.rollout.integrations.waiting import unless_blocked
from moebius.rollout.ranks import RankError
from moebius.rollout.transports import trainer
from moebius.rollout.types import Rollout

if TYPE_CHECKING:
    import torch
    from vllm import RequestOutput, SamplingParams

    from moebius.rollout.config import RolloutConfig
    from moebius.rollout.service import RolloutService

_log = logging.getLogger(__name__)


class RolloutActor:
    """An asyncio actor; `create_vllm_engines` makes it, with `settings` from the stand-in that `install` puts there."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it, as it does OpenRLHF's own
        self,
        settings: OpenRlhfSettings,
        *,
        bundle_indices: Sequence[int] | None = None,
        num_gpus: float = 1,
        agent_func_path: str | None = None,
        remote_rm_url: str | list[str] | None = None,
        mm_pad_token_ids: Any = None,
        **engine: Any,
    ) -> None:
        """Arguments but the first are `create_vllm_engines`'. Takes minutes with a large model. Raises MoebiusError."""
        from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
        from openrlhf.utils.agent import SingleTurnAgentExecutor

        self.executor = (
            _load_agent_executor(agent_func_path) if agent_func_path else SingleTurnAgentExecutor(remote_rm_url)
        )
        placement = ray.util.get_current_placement_group()
        bundles = bundle_indices or []
        if placement is None or not bundles:
            raise BadInput("an engine's actor must be in a placement group, as create_vllm_engines makes one")

        def start() -> tuple[RolloutConfig, RolloutService]:
            from moebius.rollout.group import RolloutGroup
            from moebius.rollout.service import RolloutService

            place, device_bytes = find_place(placement, bundles, num_gpus)
            config = group_config(settings, engine, place, device_bytes=device_bytes)
            return config, RolloutService(RolloutGroup(config), settings.service)

        self.config, self._service = await asyncio.to_thread(start)
        self._ray_group: str | None = None  # of weight transfer
        self._updating = False
        self._requests = 0  # without an answer
        self._ending: asyncio.Future[Any] | None = None  # of the last step
        policy = self.config.engine.policy
        self._burst = Burst(
            self._announce, self._service.filled, quiet_s=settings.service.quiet_s, threshold=policy.threshold,
            turns=agent_func_path is not None,
        )  # fmt: skip

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """`num_samples` independent trajectories of a prompt, with rewards, as OpenRLHF's agent executors make them."""
        if self._ending is not None:  # the step before has to be closed first
            await self._ending
        self._burst.came(num_samples)

        async def trajectory() -> dict[str, Any]:
            try:
                return dict(
                    await self.executor.execute(
                        prompt=prompt, label=label, sampling_params=sampling_params, max_length=max_length,
                        hf_tokenizer=hf_tokenizer, llm_engine=self, images=images,
                    )
                )  # fmt: skip
            finally:
                self._burst.ended()
                # By the last one: a call that fails returns before its other trajectories have ended.
                if self._burst.unfinished == 0 and self._ending is None:
                    self._ending = asyncio.ensure_future(self._end_step())

        return await asyncio.gather(*[trajectory() for _ in range(num_samples)])

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        """One sample of one prompt, token ids in and out; what agent executors call. Waits while paused or asleep.

        Raises BadInput, MoebiusError.
        """
        if multi_modal_data:
            raise BadInput("models with images are not supported; use a text model")
        ids = [int(token) for token in prompt_token_ids]
        sampling = sampling_of(sampling_params, len(ids), self._service.group.max_model_len)
        request_id = f"openrlhf-{uuid.uuid4().hex}"
        self._requests += 1
        try:
            answer = asyncio.ensure_future(self._service.generate(ids, sampling, request_id=request_id))
            return output_of(request_id, await unless_blocked(self._service, answer))
        finally:
            self._requests -= 1

    def get_num_unfinished_requests(self) -> int:
        """Trajectories and requests that have not ended: OpenRLHF spreads prompts by it."""
        return max(self._requests, self._burst.unfinished)

    def _announce(self, trajectories: int) -> None:
        # Held: that as many have come as were announced so far does not mean that all have.
        self._service.begin_step(trajectories, hold=True)

    async def _end_step(self) -> None:
        try:
            await self._service.end_step()
        except MoebiusError as error:
            _log.warning("the step ended without a report: %s", error)
        finally:
            self._ending = None

    # ---- pauses and memory ----------------------------------------------------------------------------------------

    async def pause_generation(self) -> None:
        """Sample nothing until `resume_generation`; what is live goes on then, under the weights of then."""
        await self._service.pause("park")

    async def resume_generation(self) -> None:
        """Go on."""
        await self._service.resume()

    async def sleep(self, level: int = 1) -> None:
        """Give memory back; requests wait. Level 1 keeps the weights in host memory, 2 does not keep them."""
        await self._service.sleep(keep_weights=level == 1)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: "weights", "kv_cache"; None: both."""
        await self._service.wake_up(tags)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes. The end of an update does so by itself."""
        if not self._updating:
            await self._service.clear_kv_cache()

    # ---- weights --------------------------------------------------------------------------------------------------

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,
    ) -> None:
        """Have the ranks join the trainer's group for weights; the trainer joins at the same time.

        `use_ray`: a group of Ray's collectives, else NCCL's own, or, with the backend gloo, one of
        moebius.rollout.transports.trainer. Raises BadInput.
        """
        ranks = self.config.ranks
        members = range(rank_offset, rank_offset + ranks)
        if use_ray:
            calls: list[tuple[Any, ...]] = [(backend, world_size, member, group_name) for member in members]
            await self._service.on_ranks(transfer.JOIN, calls)
        else:
            calls = [(backend, master_address, master_port, member, world_size) for member in members]
            await self._service.on_ranks(trainer.JOIN, calls)
        self._ray_group, self._backend = (group_name if use_ray else None), backend

    async def update_weight(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Receive one tensor, which the trainer broadcasts at the same time.

        The first one opens an update, and requests wait; the last one, with `empty_cache`, ends it: all or nothing.
        Raises BadInput for an unknown name or a wrong shape, and at the end when weights are missing.
        """
        kind = str(dtype).removeprefix("torch.")
        if self._ray_group is not None:
            await self._take(transfer.RECEIVE, (self._ray_group, name, kind, list(shape)), last=empty_cache)
        else:
            call = (self._backend, [name], [kind], [list(shape)], False, trainer.BUFFER_BYTES)
            await self._take(trainer.RECEIVE, call, last=empty_cache)

    async def update_weight_cuda_ipc(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        ipc_handles: Mapping[str, Any],
        empty_cache: bool = False,
    ) -> None:
        """As `update_weight`, but every rank reads the tensor in the memory of the trainer's process on its own GPU."""
        await self._take(transfer.READ, (dict(ipc_handles), name), last=empty_cache)

    async def _take(self, source: str, call: tuple[Any, ...], *, last: bool) -> None:
        try:
            if not self._updating:
                self._updating = True
                await self._service.begin_update(self._service.group.policy_version + 1)
            await self._service.pull_tensors(source, [call] * self.config.ranks)
            if last:
                self._updating = False
                report = await self._service.commit_update()
                _log.info("weights of version %d came in %.2f s", report.version, report.seconds)
        except BaseException as error:
            self._updating = False  # the next tensor begins anew
            if isinstance(error, RankError):  # its cause may not go through Ray
                raise MoebiusError(str(error)) from None
            raise


def output_of(request_id: str, rollout: Rollout) -> RequestOutput:
    """The one sample of a rollout as vLLM would return it. Raises BadInput when the engine has refused the request."""
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import Logprob

    [sample] = rollout.samples
    if sample.finish_reason == "abort" and isinstance(sample.stop_reason, str):
        raise BadInput(f"the engine refuses the request: {sample.stop_reason}")
    logprobs: Any = None
    if sample.logprobs is not None:
        tops: Sequence[Mapping[int, float]] = sample.top_logprobs or [{}] * len(sample.token_ids)
        logprobs = [
            {token: Logprob(logprob) for token, logprob in {**top, own: own_logprob}.items()}
            for own, own_logprob, top in zip(sample.token_ids, sample.logprobs, tops, strict=True)
        ]
    output = CompletionOutput(
        index=0,
        text=sample.text or "",
        token_ids=list(sample.token_ids),
        cumulative_logprob=None if sample.logprobs is None else sum(sample.logprobs),
        logprobs=logprobs,
        routed_experts=sample.routed_experts,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )
    return RequestOutput(request_id, None, list(rollout.prompt_token_ids), None, [output], True)
