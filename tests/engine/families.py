"""Tiny random checkpoints of mixture-of-experts families, as their trainers save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moebius.rollout.demo_assets import HEAD_DIM, VOCAB_SIZE, save_random_model

# What the families have in common; 4 heads of HEAD_DIM, 2 of them for keys and values.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 4 * HEAD_DIM,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
# By family: the transformers class, and what is its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"num_experts": 8, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "head_dim": HEAD_DIM}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "head_dim": HEAD_DIM,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
}


def make_family_model(family: str, directory: Path, seed: int = 0, **changes: Any) -> str:
    """Write a random fp32 checkpoint of `family`, no weight of which is left at a default. Returns the folder."""
    import torch
    import transformers

    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **(_SIZES | own | changes), architectures=[f"{name}ForCausalLM"], pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 1:  # norms: the rest is drawn below
            weight.data.uniform_(0.7, 1.3, generator=generator)
    return str(save_random_model(directory, model, seed=seed))
