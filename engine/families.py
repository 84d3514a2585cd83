"""Which model families the switch is made for, told from a config alone. No vLLM here.

A switch moves the experts and the KV of ordinary attention. A model that keeps state elsewhere (a window, a recurrence,
scales of quantized weights) would go on with wrong numbers after a switch, so it is refused before anything starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)

# Tokens of these are compared with the stock engine's, in both layouts, through switches and weight updates.
CHECKED = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe")

# Their checkpoints keep all experts of a layer in names and shapes that weight updates do not know.
_OTHER_EXPERT_NAMES = ("granitemoe", "granitemoeshared", "jetmoe")
# Config keys that only models with recurrent or convolutional layers have.
_STATE_KEYS = (
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "attn_type_list",
    "attn_layer_period",
    "hybrid_override_pattern",
    "conv_L_cache",
)


def refusal(values: Mapping[str, Any]) -> str | None:
    """Why a model with this config cannot be switched, and what to do; None if nothing is in the way."""
    if values.get("kv_lora_rank"):
        return (
            "uses multi-head latent attention (kv_lora_rank is set), whose KV cache has no heads to split over TP "
            "ranks. Choose a model with multi-head or grouped-query attention."
        )
    if values.get("quantization_config") or values.get("compression_config"):
        return (
            "is quantized (quantization_config is set): scales and packed weights do not move with the experts. "
            "Choose the bf16 checkpoint of the model."
        )
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    state = [key for key in _STATE_KEYS if values.get(key)]
    if any("sliding" in kind or "chunked" in kind for kind in kinds) or _window(values):
        return (
            "has layers that attend to a window only, whose KV pages are freed and reused as the window moves on; only "
            "full attention is supported. Where no sequence is longer than the window, set "
            "engine.hf_overrides.sliding_window=null; else choose a model with full attention in all layers."
        )
    if kinds or state:
        found = f"layer_types has {', '.join(kinds)}" if kinds else f"its config has {', '.join(state)}"
        return (
            f"has layers with a state other than a KV cache ({found}), which a switch does not move. Choose a model "
            "with full attention in all layers."
        )
    value_dim, head_dim = values.get("v_head_dim"), values.get("head_dim")
    if value_dim and head_dim and value_dim != head_dim:
        return (
            f"has values of another size than keys (v_head_dim {value_dim}, head_dim {head_dim}); a switch splits KV "
            "pages as if they were equal. Choose a model where they are."
        )
    if values.get("model_type") in _OTHER_EXPERT_NAMES:
        return (
            "keeps its experts under names that weight updates do not know (expected are ...experts.gate_up_proj and "
            f"...experts.down_proj, or one name per expert). Families that are known to work: {', '.join(CHECKED)}."
        )
    return None


def warn_if_unchecked(model_type: str) -> None:
    """Log that nobody has compared this family's tokens, unless it is one of CHECKED."""
    if model_type not in CHECKED:
        _log.warning(
            "model type %r: its tokens have not been compared with a stock engine's. Compare some before relying on "
            "it; families that are checked: %s",
            model_type,
            ", ".join(CHECKED),
        )


def _window(values: Mapping[str, Any]) -> bool:
    """Whether the config turns on a window. `layer_types`, where given, is the last word."""
    if values.get("layer_types"):
        return False
    windowed = bool(values.get("sliding_window")) and values.get("use_sliding_window") is not False
    return windowed or bool(values.get("attention_chunk_size"))
