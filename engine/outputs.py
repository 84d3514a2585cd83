"""A core's outputs, taken apart."""

from __future__ import annotations

import copy

from vllm.v1.engine import EngineCoreOutput


def single_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """An output of several tokens as one of each, in order; the last one has the reason to finish, if there is one."""
    parts = []
    for i, token in enumerate(output.new_token_ids):
        part = copy.copy(output)
        part.new_token_ids = [token]
        if output.new_logprobs is not None:
            part.new_logprobs = output.new_logprobs.slice_request(i, 1)
        if output.routed_experts is not None:
            part.routed_experts = output.routed_experts[i : i + 1]
        if i < len(output.new_token_ids) - 1:
            part.finish_reason = part.stop_reason = None
        parts.append(part)
    return parts
