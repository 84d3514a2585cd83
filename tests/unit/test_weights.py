"""Weight updates: both naming schemes, and every way to get one wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebius.engine.weights import ExpectedWeights, WeightSession

EXPERTS, WIDTH, HIDDEN, LAYERS = 4, 8, 16, 2
BLOCK = "model.layers.0.mlp.experts"


def make_config(**overrides: Any) -> Any:
    from transformers import Qwen3MoeConfig

    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**(fields | overrides))


@pytest.fixture(scope="module")
def expected() -> ExpectedWeights:
    return ExpectedWeights.from_hf_config(make_config())


@pytest.fixture(scope="module")
def fused() -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return dict(AutoModelForCausalLM.from_config(make_config()).state_dict())


def split(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under per-expert names, written out independently of the code under test."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        prefix = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for e in range(EXPERTS):
                out[f"{prefix}.{e}.gate_proj.weight"] = tensor[e, :WIDTH]
                out[f"{prefix}.{e}.up_proj.weight"] = tensor[e, WIDTH:]
        elif name.endswith("experts.down_proj"):
            out.update({f"{prefix}.{e}.down_proj.weight": tensor[e] for e in range(EXPERTS)})
        else:
            out[name] = tensor
    return out


def send(session: WeightSession, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(piece for name, tensor in weights.items() for piece in session.accept(name, tensor))


def test_fused_and_per_expert_updates_give_the_same_tensors(expected, fused):
    per_expert = split(fused)
    for sent in (fused, per_expert):
        session = WeightSession(expected)
        got = send(session, sent)
        session.finish()
        assert got.keys() == per_expert.keys()
        assert all(torch.equal(got[name], per_expert[name]) for name in got)


def test_fused_weights_come_back_as_views(expected, fused):
    pieces = expected.normalise(f"{BLOCK}.gate_up_proj", fused[f"{BLOCK}.gate_up_proj"])
    storage = fused[f"{BLOCK}.gate_up_proj"].untyped_storage().data_ptr()
    assert len(pieces) == 2 * EXPERTS
    assert all(view.untyped_storage().data_ptr() == storage for _, view in pieces)


def test_the_two_schemes_may_be_mixed(expected, fused):
    per_expert = split(fused)
    down = f"{BLOCK}.down_proj"
    mixed = {n: t for n, t in per_expert.items() if not (n.startswith(BLOCK) and "down_proj" in n)}
    session = WeightSession(expected)
    send(session, mixed)
    assert session.missing() == [down]
    session.accept(down, fused[down])
    session.finish()


def test_meta_shapes_take_no_memory():
    big = make_config(hidden_size=4096, moe_intermediate_size=1536, num_experts=128, num_hidden_layers=4)
    expected = ExpectedWeights.from_hf_config(big)
    assert expected.shapes[f"{BLOCK}.gate_up_proj"] == (128, 3072, 4096)
    assert expected.shape_of(f"{BLOCK}.127.down_proj.weight") == (4096, 1536)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.0.self_attn.q_porj.weight", (16, 16), "nearest known name is 'model.layers.0.self_attn.q_proj"),
        (f"{BLOCK}.1.gate_porj.weight", (8, 16), f"nearest known name is '{BLOCK}.1.gate_proj.weight'"),
        (f"{BLOCK}.4.gate_proj.weight", (8, 16), "experts 0 to 3 only"),
        ("xyz", (1,), "not part of this model"),
        (f"{BLOCK}.0.gate_proj.weight", (16, 8), r"expected shape \[8, 16\], got \[16, 8\]"),
        (f"{BLOCK}.0.down_proj.weight", (8, 16), r"expected shape \[16, 8\], got \[8, 16\]"),
        (f"{BLOCK}.gate_up_proj", (2, 16, 16), r"expected shape \[4, 16, 16\], got \[2, 16, 16\]"),
        ("model.norm.weight", (17,), r"expected shape \[16\], got \[17\]"),
    ],
)
def test_wrong_tensors_are_refused_in_words(expected, name, shape, words):
    session = WeightSession(expected)
    before = session.missing()
    with pytest.raises(ValueError, match=words):
        session.accept(name, torch.zeros(shape))
    assert session.missing() == before


def test_integer_tensors_are_refused(expected):
    with pytest.raises(ValueError, match="floating-point"):
        WeightSession(expected).accept("model.norm.weight", torch.zeros(16, dtype=torch.int8))


def test_duplicates_are_refused(expected, fused):
    session = WeightSession(expected)
    session.accept("model.norm.weight", fused["model.norm.weight"])
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' was sent twice in one update$"):
        session.accept("model.norm.weight", fused["model.norm.weight"])
    session.accept(f"{BLOCK}.2.up_proj.weight", torch.zeros(WIDTH, HIDDEN))
    with pytest.raises(ValueError, match=r"gate_up_proj' was sent twice .*experts\.2\.up_proj"):
        session.accept(f"{BLOCK}.gate_up_proj", fused[f"{BLOCK}.gate_up_proj"])
    # the refused fused tensor counts for nothing
    assert f"{BLOCK}.2.gate_proj.weight" in session.missing()


def test_missing_names_are_listed(expected, fused):
    session = WeightSession(expected)
    left_out = {"model.norm.weight", f"{BLOCK}.down_proj"}
    send(session, {n: t for n, t in fused.items() if n not in left_out})
    with pytest.raises(ValueError, match="2 weights are missing") as error:
        session.finish()
    assert all(name in str(error.value) for name in left_out)
    with pytest.raises(ValueError, match=r"\d+ weights are missing .* and \d+ more"):
        WeightSession(expected).finish()


def test_tied_lm_head_is_optional_but_checked():
    config = make_config(tie_word_embeddings=True)
    expected = ExpectedWeights.from_hf_config(config)
    session = WeightSession(expected)
    send(session, {n: torch.zeros(s) for n, s in expected.shapes.items() if n != "lm_head.weight"})
    session.finish()
    assert session.accept("lm_head.weight", torch.zeros(64, HIDDEN)) == []
    with pytest.raises(ValueError, match="sent twice"):
        session.accept("lm_head.weight", torch.zeros(64, HIDDEN))
    with pytest.raises(ValueError, match="expected shape"):
        WeightSession(expected).accept("lm_head.weight", torch.zeros(65, HIDDEN))


def test_untied_lm_head_is_needed(expected):
    assert "lm_head.weight" in WeightSession(expected).missing()


@pytest.mark.parametrize(
    "shapes",
    [
        {"l.experts.gate_up_proj": (4, 16, 8), "l.experts.down_proj": (4, 4, 16)},  # transposed
        {"l.experts.gate_up_proj": (4, 16, 8)},  # no down projection
        {"l.experts.gate_up_proj": (4, 16, 8), "l.experts.down_proj": (4, 8, 8), "l.experts.down_proj_bias": (4, 8)},
    ],
)
def test_other_expert_layouts_are_refused(shapes):
    with pytest.raises(ValueError, match="support"):
        ExpectedWeights(shapes)


def test_shared_experts_are_ordinary_weights():
    expected = ExpectedWeights({"l.mlp.shared_experts.gate_proj.weight": (8, 16)})
    name = "l.mlp.shared_experts.gate_proj.weight"
    [(got, tensor)] = expected.normalise(name, torch.ones(8, 16))
    assert got == name and tensor.shape == (8, 16)


def make_mixtral_config() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
    )


def test_mixtral_may_be_sent_by_module_and_by_checkpoint_names(tmp_path):
    """The checkpoint's names are those that transformers writes."""
    from safetensors.torch import load_file
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM(make_mixtral_config())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert f"model.layers.1.block_sparse_moe.experts.{EXPERTS - 1}.w3.weight" in saved
    expected = ExpectedWeights.from_model(str(tmp_path))
    for sent in (saved, dict(model.state_dict())):
        session = WeightSession(expected)
        got = send(session, sent)
        session.finish()
        assert got.keys() == saved.keys()
        assert all(torch.equal(got[name], saved[name]) for name in got)


def test_mistakes_in_mixtral_names_are_found():
    session = WeightSession(ExpectedWeights.from_hf_config(make_mixtral_config()))
    block = "model.layers.0.block_sparse_moe.experts"
    with pytest.raises(ValueError, match=r"expected shape \[16, 8\], got \[8, 16\]"):
        session.accept(f"{block}.0.w2.weight", torch.zeros(WIDTH, HIDDEN))
    with pytest.raises(ValueError, match="not part of this model"):
        session.accept(f"{block}.0.w4.weight", torch.zeros(WIDTH, HIDDEN))
    session.accept(f"{block}.0.w1.weight", torch.zeros(WIDTH, HIDDEN))
    with pytest.raises(ValueError, match="sent twice"):
        session.accept(f"{BLOCK}.gate_up_proj", torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN))


def test_a_family_without_known_expert_names_is_refused():
    from transformers import GraniteMoeConfig

    config = GraniteMoeConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'granitemoe'.*experts cannot be updated"):
        ExpectedWeights.from_hf_config(config)
