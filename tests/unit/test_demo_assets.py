"""The tiny model, its tokenizer, the questions and the reward of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moebius.rollout.datasets import load_questions
from moebius.rollout.demo import advantages, demo_config, load_weights, perturb, run_demo
from moebius.rollout.demo_assets import EOS, VOCAB_SIZE, make_questions, make_tiny_model, math_reward
from moebius.rollout.errors import BadInput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=2)


def test_tokenizer_fits_the_model_and_encodes_any_text(model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    for text in ("What is 12 + 7?", "Größe 東京 🚀\n\ttab", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    config = AutoConfig.from_pretrained(model)
    assert config.vocab_size == VOCAB_SIZE
    eos = tokenizer.convert_tokens_to_ids(EOS)
    assert eos == tokenizer.eos_token_id == config.eos_token_id == GenerationConfig.from_pretrained(model).eos_token_id
    assert list(demo_config(model).sampling.logit_bias or {}) == [eos]


def test_tokenizer_learned_merges(model: Path) -> None:
    from transformers import AutoTokenizer

    text = "What is 12 plus 7? The answer is 19."
    assert len(AutoTokenizer.from_pretrained(model).encode(text)) < len(text) / 2


def test_chat_template_marks_the_turn_of_the_model(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<bos>user: What is 1 + 1?\nassistant:"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_model_loads_in_fp32_and_computes_finite_logits(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    with torch.inference_mode():
        logits = loaded(torch.tensor([[1, 57, 315, 266]])).logits
    assert logits.shape == (1, 4, VOCAB_SIZE) and bool(logits.isfinite().all())


def test_seed_decides_the_weights(model: Path, tmp_path: Path) -> None:
    first = load_weights(model)
    again = load_weights(make_tiny_model(tmp_path / "again", num_layers=2))
    other = load_weights(make_tiny_model(tmp_path / "other", num_layers=2, seed=1))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_spread_of_the_matrices_inside_the_layers(model: Path, tmp_path: Path) -> None:
    narrow = load_weights(make_tiny_model(tmp_path / "narrow", num_layers=2, layer_std=0.02))
    for name, weight in load_weights(model).items():
        inside = ".layers." in name and weight.dim() > 1 and not name.endswith("mlp.gate.weight")
        assert torch.equal(narrow[name], weight) is not inside, name
        if inside:
            torch.testing.assert_close(narrow[name], weight / 4)


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="heads=6, kv_heads=4"):
        make_tiny_model(tmp_path, heads=6, kv_heads=4)
    with pytest.raises(BadInput, match="steps, prompts and n"):
        run_demo(tmp_path / "run", steps=0)


def test_questions_load_and_their_answers_earn_the_full_reward(tmp_path: Path) -> None:
    questions = load_questions(make_questions(tmp_path / "q" / "questions.jsonl", 40))
    assert len(questions) == 40
    for question in questions:
        assert isinstance(question.prompt, str)
        assert eval(question.prompt.removeprefix("What is ").removesuffix("?")) == int(question.answer)
        assert math_reward(f"I think it is {question.answer}.", question.answer) == 1.0
        assert set(question.meta) == {"topic", "difficulty"} and 1 <= question.meta["difficulty"] <= 3
    with pytest.raises(BadInput, match="count"):
        make_questions(tmp_path / "none.jsonl", 0)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so \boxed{19}, not 20", "19", 1.0),
        (r"\boxed{x+1}", "x+1", 1.0),
        ("first 3, then 19", "19", 1.0),
        ("it is 19.0", "19", 1.0),
        ("-4", "-4", 1.0),
        ("first 19, then 20", "19", 0.25),
        ("it is 4", "-4", 0.5 / 9),
        ("no idea", "19", 0.0),
        ("", "19", 0.0),
        ("19", "x+1", 0.0),
    ],
)
def test_reward(text: str, answer: str, reward: float) -> None:
    assert math_reward(text, answer) == pytest.approx(reward)


def test_perturbation_grows_with_the_spread_of_advantages(model: Path) -> None:
    before = load_weights(model)

    def moved(rewards: list[list[float]]) -> dict[str, float]:
        weights = {name: tensor.clone() for name, tensor in before.items()}
        names = perturb(weights, advantages(rewards), seed=3)
        change = {name: float((weights[name] - before[name]).norm()) for name in weights}
        assert {name for name, size in change.items() if size > 0} == set(names)
        return change

    small, large = moved([[0.5, 0.5]]), moved([[0.0, 1.0]])
    assert large["lm_head.weight"] == pytest.approx(6 * small["lm_head.weight"], rel=1e-3)
    assert any("experts" in name and size > 0 for name, size in small.items())
