"""A tiny mixture-of-experts model, questions and a reward, made on the spot: the demo and tests need no download."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # token ids 0, 1, 2
HEAD_DIM = 64  # the smallest head that vLLM's attention on CPU takes
WEIGHT_STD = 0.08  # wide enough that the tiny model's tokens depend visibly on its input
_ROUTERS = (".gate.weight", ".router.weight")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_SENTENCES = (
    "user: What is {a} + {b}?",
    "assistant: {a} plus {b} is {c}. The answer is {c}.",
    "Compute {a} - {b} and give the final answer as a number.",
    "There are {a} boxes with {b} apples each. How many apples are there in all?",
    "Let x be {a}. Then x times {b} equals {c}, because multiplication is repeated addition.",
    "First we add the ones, then the tens; therefore the sum of {a} and {b} is {c}.",
    "Step by step: {a} = {b} + {c}. Is the result even or odd? We check the remainder.",
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def make_tiny_model(
    directory: str | Path,
    *,
    num_experts: int = 8,
    num_layers: int = 4,
    heads: int = 8,
    kv_heads: int = 2,
    hidden: int = 128,
    moe_intermediate: int = 64,
    seed: int = 0,
    max_len: int = 1024,
    layer_std: float = WEIGHT_STD,
) -> Path:
    """Write a random fp32 Qwen3-MoE checkpoint with a tokenizer and chat template; equal arguments, equal weights.

    Args:
        directory: folder to write to, made if missing.
        num_experts: experts per layer, of which 2 are active per token.
        heads, kv_heads: attention heads of HEAD_DIM each; heads must be a multiple of kv_heads.
        hidden, moe_intermediate: widths of the model and of one expert.
        max_len: most tokens of prompt and output.
        layer_std: standard deviation of the matrices inside the layers; see `save_random_model`.

    Returns:
        The folder. It loads with AutoModelForCausalLM and AutoTokenizer without a network. The vocabulary has
        VOCAB_SIZE entries, and every token id of the tokenizer is below that.

    Raises:
        BadInput: the sizes do not fit each other.
    """
    if num_experts < 2 or heads % kv_heads:
        raise BadInput(
            f"the tiny model needs at least 2 experts and heads that kv_heads divides, "
            f"got num_experts={num_experts}, heads={heads}, kv_heads={kv_heads}"
        )
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=moe_intermediate,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        mlp_only_layers=[],
        architectures=["Qwen3MoeForCausalLM"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save_random_model(directory, Qwen3MoeForCausalLM(config), seed=seed, max_len=max_len, layer_std=layer_std)


def save_random_model(
    directory: str | Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    max_len: int = 1024,
    layer_std: float = WEIGHT_STD,
) -> Path:
    """Give a transformers causal LM random fp32 weights and write it with the tokenizer of `train_tokenizer`.

    Matrices and biases are drawn, norms stay at one, routers' correction biases are small: equal seeds, equal weights.

    `layer_std` is the standard deviation of attention's and experts' matrices; embeddings, `lm_head`, routers and
    biases have WEIGHT_STD whatever it is. In wide models WEIGHT_STD makes every layer grow rounding errors: in bfloat16
    their log-probabilities say nothing about the code that computed them. With 0.02, as models begin their training,
    they do.
    """
    import torch
    from transformers import GenerationConfig

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(max_len)
    tokenizer.save_pretrained(str(directory))
    model = model.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.dim() >= 2 or name.endswith("bias"):  # norms stay at one
                inside = weight.dim() >= 2 and ".layers." in name and not name.endswith(_ROUTERS)
                weight.normal_(0.0, layer_std if inside else WEIGHT_STD, generator=generator)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(str(directory))
    return directory


def train_tokenizer(max_len: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most VOCAB_SIZE tokens, trained on sentences of small sums. Any text encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_len,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> Iterator[str]:
    rng = random.Random(0)
    for i in range(400):
        a, b = rng.randrange(100), rng.randrange(1, 100)
        yield _SENTENCES[i % len(_SENTENCES)].format(a=a, b=b, c=a + b)


def make_questions(path: str | Path, count: int, seed: int = 0) -> Path:
    """Write `count` sums as .jsonl with DeepMath's columns: question, final_answer, topic, difficulty (1 to 3)."""
    if count < 1:
        raise BadInput(f"count must be at least 1, got {count}")
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        difficulty = rng.randint(1, 3)
        a, b = (rng.randrange(1, 10**difficulty) for _ in range(2))
        topic, sign, answer = rng.choice(
            [("Addition", "+", a + b), ("Subtraction", "-", a - b), ("Multiplication", "*", a * b)]
        )
        rows.append(
            {
                "question": f"What is {a} {sign} {b}?",
                "final_answer": str(answer),
                "topic": f"Arithmetic -> {topic}",
                "difficulty": float(difficulty),
            }
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def math_reward(text: str, answer: str) -> float:
    """1.0 when the answer given in `text` is `answer`, else up to 0.5 for a number near it, 0.0 for none.

    The answer given is what stands in the last \\boxed{...}, or else the last number. For two numbers at distance d,
    partial credit is 0.5 / (1 + d): it gives an untrained model's samples rewards that differ.
    """
    boxed = _BOXED.findall(text)
    if boxed and boxed[-1].strip() == answer.strip():
        return 1.0
    given = _NUMBER.findall(boxed[-1] if boxed else text)
    if not given or not _NUMBER.fullmatch(answer.strip()):
        return 0.0
    distance = abs(float(given[-1]) - float(answer))
    return 1.0 if distance == 0 else 0.5 / (1.0 + distance)
