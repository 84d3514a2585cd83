"""Chat messages as the model's template writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.rollout.server_types import ChatBody


def render_chat(body: ChatBody, tokenizer: Any) -> list[int]:
    """Token ids of a chat. Raises BadInput when there is no template, or it refuses the messages."""
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("the model's tokenizer has no chat template: use /v1/completions")
    kwargs = dict(body.chat_template_kwargs or {})
    own = {"tokenize", "return_dict", "add_generation_prompt", "continue_final_message", "chat_template", "tools"}
    if not own.isdisjoint(kwargs):
        raise BadInput(f"chat_template_kwargs: {', '.join(sorted(own & kwargs.keys()))} cannot be set there")
    try:
        ids = tokenizer.apply_chat_template(
            [message.plain() for message in body.messages],
            tools=body.tools,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **kwargs,
        )
    except Exception as error:  # templates are programs of the model's author and raise what they like
        raise BadInput(f"the chat template refuses these messages: {error}") from error
    return list(ids)
