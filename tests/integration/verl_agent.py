"""An agent loop of two turns, without tools: what comes back is the second request of a trajectory."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class TwoTurns(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        await asyncio.sleep(0.05)  # a tool
        said = output.prompt_ids + output.response_ids
        more = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=said, sampling_params=sampling_params
        )
        assert output.response_logprobs is not None
        output.response_ids = (output.response_ids + more.token_ids)[: self.response_length]
        output.response_logprobs = (output.response_logprobs + more.log_probs)[: self.response_length]
        output.response_mask = [1] * len(output.response_ids)
        output.num_turns = 4
        return output
