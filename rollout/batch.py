"""One step's input and output: checks prompts and settings before anything is sent, spreads samples over ranks, and
puts the results back in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebius.engine.layout import distribute
from moebius.engine.types import SampleKey, SampleRequest, SampleResult
from moebius.kernels.noise import derive_seed
from moebius.rollout.errors import BadInput, IncompleteStep
from moebius.rollout.types import LengthTrace, Sample, Sampling

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_IMBALANCE = 1.1  # fullest rank over the mean, up to which whole prompts stay on one rank


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take."""

    max_model_len: int  # tokens of prompt + output
    vocab_size: int
    has_tokenizer: bool


def to_token_ids(prompt: Prompt, index: int, limits: Limits, tokenizer: Callable[[], Any]) -> list[int]:
    """Token ids of one prompt: ids, a text, or chat messages (which get the tokenizer's chat template).

    `tokenizer()` is called only for texts and messages. Raises BadInput naming the prompt by its index.
    """
    where = f"prompt {index}"
    if isinstance(prompt, str):
        ids = list(tokenizer().encode(prompt))
    elif isinstance(prompt, Mapping | bytes) or not hasattr(prompt, "__len__") or not hasattr(prompt, "__iter__"):
        raise BadInput(f"{where}: expected token ids, a text or chat messages, got {type(prompt).__name__}")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        ids = _chat_ids(prompt, where, tokenizer())  # type: ignore[arg-type]
    else:
        ids = [_token_id(token, where) for token in prompt]
    if not ids:
        raise BadInput(f"{where} is empty: it needs at least one token")
    outside = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise BadInput(f"{where}: token id {outside} is outside the model's vocabulary of {limits.vocab_size}")
    if len(ids) + 1 > limits.max_model_len:
        raise BadInput(
            f"{where} has {len(ids)} tokens, which leaves no room for output in max_model_len={limits.max_model_len}; "
            "shorten it or raise engine.max_model_len"
        )
    return ids


def _token_id(token: Any, where: str) -> int:
    value = token.item() if getattr(token, "ndim", None) == 0 else token  # numpy and torch scalars
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise BadInput(f"{where}: token ids must be integers, got {token!r}")


def _chat_ids(messages: Sequence[Mapping[str, Any]], where: str, tokenizer: Any) -> list[int]:
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadInput(f"{where}: chat message {position} needs a 'role' and a 'content', got {message!r}")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(f"{where}: the model's tokenizer has no chat template; give a text or token ids instead")
    try:
        chat = [dict(message) for message in messages]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates are programs of the model's author and raise what they like
        raise BadInput(f"{where}: the chat template refuses these messages: {error}") from error
    return list(ids)


def check_sampling(sampling: Sampling, limits: Limits) -> None:
    """Check settings against the engine. Raises BadInput."""
    for field in ("stop", "bad_words"):
        if getattr(sampling, field) and not limits.has_tokenizer:
            raise BadInput(f"sampling.{field}: the model folder has no tokenizer; use stop_token_ids instead")
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        outside = [token for token in getattr(sampling, field) or () if not 0 <= token < limits.vocab_size]
        if outside:
            raise BadInput(
                f"sampling.{field}: token id {outside[0]} is outside the model's vocabulary of {limits.vocab_size}"
            )


def build_requests(
    prompts: Sequence[list[int]],
    n: int,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    limits: Limits,
    lengths: LengthTrace | None = None,
    first: int = 0,
) -> list[SampleRequest]:
    """One request per (prompt, sample), ordered by key. `lengths` replays traced output lengths exactly.

    `first` is the number of the first prompt.

    Output is limited to what fits in max_model_len; raises BadInput where that contradicts `min_tokens` or the trace.
    """
    requests = []
    for p, ids in enumerate(prompts, first):
        room = limits.max_model_len - len(ids)
        for s in range(n):
            own = sampling if lengths is None else lengths.forced(sampling, p, s)
            needed = own.min_tokens if lengths is None else own.max_tokens
            if needed > room:
                what = "min_tokens asks for" if lengths is None else "the length trace has"
                raise BadInput(
                    f"prompt {p}, sample {s}: {what} {needed} output tokens, max_model_len leaves room for {room}; "
                    "raise engine.max_model_len"
                )
            fields = own.engine_fields() | {"max_tokens": min(own.max_tokens, room)}
            requests.append(SampleRequest(SampleKey(p, s, step), ids, fields, derive_seed(seed, step, p, s)))
    return requests


def assign(requests: Sequence[SampleRequest], ranks: int) -> list[list[SampleRequest]]:
    """The requests of each rank, balanced by expected tokens (prompt + most output).

    Samples of one prompt share its cached prefix only on one rank, so whole prompts are spread as long as the fullest
    rank stays within 10 % of the mean; otherwise single samples are.
    """
    costs = [float(len(r.prompt_token_ids) + r.sampling["max_tokens"]) for r in requests]
    by_prompt: dict[int, float] = {}
    for request, cost in zip(requests, costs, strict=True):
        by_prompt[request.key.prompt] = by_prompt.get(request.key.prompt, 0.0) + cost
    rank_of_prompt = dict(zip(by_prompt, distribute(list(by_prompt.values()), ranks), strict=True))
    chosen = [rank_of_prompt[request.key.prompt] for request in requests]
    loads = [0.0] * ranks
    for rank, cost in zip(chosen, costs, strict=True):
        loads[rank] += cost
    if max(loads) > _IMBALANCE * sum(loads) / ranks:
        chosen = distribute(costs, ranks)
    return [[r for r, to in zip(requests, chosen, strict=True) if to == rank] for rank in range(ranks)]


def check_complete(came: Iterable[SampleKey], expected: Iterable[SampleKey], step: int) -> None:
    """Raise IncompleteStep unless every expected sample has come back exactly once, and no other has."""
    # Keys without the step, unless it is another one.
    counts = Counter(tuple(key)[: 2 if key.step == step else 3] for key in came)
    wanted = {tuple(key)[: 2 if key.step == step else 3] for key in expected}
    faults: dict[str, list[tuple[int, ...]]] = {
        "missing": sorted(wanted - counts.keys()),
        "not asked for": sorted(counts.keys() - wanted),
        "double": sorted(key for key, count in counts.items() if count > 1),
    }
    if any(faults.values()):
        words = "; ".join(f"{kind}: {_listed(keys)}" for kind, keys in faults.items() if keys)
        raise IncompleteStep(f"step {step}, samples as (prompt, sample): {words}")


def to_sample(r: SampleResult) -> Sample:
    """What the engine sent, as users see it."""
    return Sample(
        r.key.sample, r.token_ids, r.logprobs, r.top_logprobs, r.text, r.finish_reason, r.stop_reason,
        r.policy_version, r.rank, r.versions, r.routed_experts, r.layouts,
    )  # fmt: skip


def _listed(keys: Sequence[tuple[int, ...]], most: int = 10) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(str(key) for key in keys[:most]) + more
