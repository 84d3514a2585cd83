"""Expert tensors of an update land where a loader written out by hand puts them."""

from __future__ import annotations

import pytest
import torch

from moebius.engine.expert_writer import ExpertWriter

EXPERTS, WIDTH, HIDDEN, LAYERS = 4, 3, 5, (1, 3)


@pytest.fixture
def checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in LAYERS:
        for expert in range(EXPERTS):
            for proj, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight"
                tensors[name] = torch.randn(shape, generator=generator)
    return tensors


def slots(held: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    poison = float("nan")
    return (
        [torch.full((held, 2 * WIDTH, HIDDEN), poison) for _ in LAYERS],
        [torch.full((held, HIDDEN, WIDTH), poison) for _ in LAYERS],
    )


def expected(
    checkpoint: dict[str, torch.Tensor], layer: int, first: int, held: int
) -> tuple[torch.Tensor, torch.Tensor]:
    def of(expert: int, proj: str) -> torch.Tensor:
        return checkpoint[f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight"]

    here = range(first, first + held)
    return (
        torch.stack([torch.cat([of(e, "gate"), of(e, "up")]) for e in here]),
        torch.stack([of(e, "down") for e in here]),
    )


@pytest.mark.parametrize("names", ["per expert", "mixtral", "fused"])
@pytest.mark.parametrize(("first", "held"), [(0, 4), (0, 2), (2, 2), (3, 1)])
def test_every_expert_of_the_rank_arrives(
    checkpoint: dict[str, torch.Tensor], first: int, held: int, names: str
) -> None:
    w13, w2 = slots(held)
    writer = ExpertWriter(w13, w2, LAYERS, first)
    if names == "mixtral":
        short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        for name, tensor in checkpoint.items():
            head, proj, tail = name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 2)
            assert writer.write(f"{head}.{short[proj]}.{tail}", tensor)
    elif names == "fused":
        for layer in LAYERS:
            gate_up, down = expected(checkpoint, layer, 0, EXPERTS)
            assert writer.write(f"model.layers.{layer}.mlp.experts.gate_up_proj", gate_up)
            assert writer.write(f"model.layers.{layer}.mlp.experts.down_proj", down)
    else:
        for name, tensor in checkpoint.items():
            assert writer.write(name, tensor)
    for ordinal, layer in enumerate(LAYERS):
        want13, want2 = expected(checkpoint, layer, first, held)
        assert torch.equal(w13[ordinal], want13) and torch.equal(w2[ordinal], want2)


def test_other_weights_are_left_to_the_loader() -> None:
    w13, w2 = slots(4)
    writer = ExpertWriter(w13, w2, LAYERS, 0)
    for name in (
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.mlp.shared_expert.down_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "lm_head.weight",
    ):
        assert not writer.write(name, torch.zeros(1))
    assert all(torch.isnan(t).all() for t in (*w13, *w2))
