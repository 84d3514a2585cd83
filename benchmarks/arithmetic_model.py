"""Trains a small Qwen3-MoE on sums worked out step by step: a model whose samples repeat themselves, and each other.

    python -m benchmarks.arithmetic_model runs/arithmetic            # a CUDA device, a few minutes
    python -m benchmarks.arithmetic_model runs/arithmetic --tiny     # CPU, under a minute; it learns next to nothing

Writes a checkpoint with tokenizer, questions.jsonl (problems that training has not seen) and training.json (losses).
The text is made here: long multiplications and sums with words that vary, and checks that repeat the calculation a
random number of times, so that lengths have a tail. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

VOCAB = 768
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
WHOLE = {
    "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4,
}  # fmt: skip
TINY = WHOLE | {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts": 8,
                "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
LONGEST = 2048  # tokens of prompt and answer
_SO, _NEXT = ("So", "Thus", "Therefore", "Hence"), ("Then", "Next", "Now", "After that,")


def problem(r: random.Random) -> tuple[int, int, int]:
    """a * b + c."""
    return r.randrange(12, 999), r.randrange(12, 999), r.randrange(10, 9999)


def question(a: int, b: int, c: int) -> str:
    """The prompt."""
    return f"What is {a} * {b} + {c}? Answer:"


def answer(a: int, b: int, c: int, r: random.Random) -> str:
    """A worked answer; words, order and the number of checks are random, the arithmetic is right."""
    text = _product(a, b, r)
    text += f" {r.choice(_NEXT)} {_sum(a * b, c, r)}"
    while r.random() < 0.5:
        text += f" Let me check. {_product(b, a, r) if r.random() < 0.5 else _product(a, b, r)}"
        text += f" {r.choice(_NEXT)} {_sum(a * b, c, r)}"
    return f" {text} The answer is {a * b + c}."


def _product(a: int, b: int, r: random.Random) -> str:
    parts = [int(digit) * 10**place for place, digit in enumerate(reversed(str(b))) if digit != "0"]
    if r.random() < 0.5:
        parts.reverse()
    lines = [f"{b} is {' + '.join(map(str, parts))}."]
    total = 0
    for n, part in enumerate(parts):
        lines.append(f"{a} * {part} = {a * part}.")
        if n:
            lines.append(_sum(total, a * part, r))
        total += a * part
    lines.append(f"{r.choice(_SO)} {a} * {b} = {total}.")
    return " ".join(lines)


def _sum(a: int, b: int, r: random.Random) -> str:
    left, right = str(a)[::-1], str(b)[::-1]
    words, carry = [f"Add {a} and {b}:"], 0
    for place in range(max(len(left), len(right))):
        x, y = (int(text[place]) if place < len(text) else 0 for text in (left, right))
        whole = x + y + carry
        words.append(f"{x} + {y} + {carry} = {whole}, write {whole % 10} carry {whole // 10};")
        carry = whole // 10
    return f"{' '.join(words)} {r.choice(_SO)} {a} + {b} = {a + b}."


def make_tokenizer(r: random.Random) -> Any:
    """Byte-level BPE of at most VOCAB tokens, one token per digit."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[PAD, BOS, EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = (question(*p) + answer(*p, r) for p in (problem(r) for _ in range(400)))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=LONGEST
    )


def batch(tokenizer: Any, r: random.Random, rows: int, length: int) -> Any:
    """Token ids [rows, length]: answers one after the other, cut at the end of a row."""
    import torch

    lines = []
    for _ in range(rows):
        ids: list[int] = []
        while len(ids) < length:
            p = problem(r)
            ids += [tokenizer.bos_token_id, *tokenizer.encode(question(*p) + answer(*p, r)), tokenizer.eos_token_id]
        lines.append(ids[:length])
    return torch.tensor(lines)


def train(folder: Path, *, tiny: bool, minutes: float, seed: int) -> None:
    """Write the checkpoint."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    r = random.Random(seed)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = make_tokenizer(r)
    config = Qwen3MoeConfig(
        **(TINY if tiny else WHOLE), decoder_sparse_step=1, norm_topk_prob=True, max_position_embeddings=LONGEST,
        tie_word_embeddings=False, mlp_only_layers=[], architectures=["Qwen3MoeForCausalLM"], pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().to(device).train()
    steps_at_most, rows, length = (20, 4, 256) if tiny else (100_000, 48, 768)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    started, losses, step = time.perf_counter(), [], 0
    while step < steps_at_most and (spent := (time.perf_counter() - started) / 60) < minutes:
        ids = batch(tokenizer, r, rows, length).to(device)
        # A short rise, then down with the time that is left.
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100) * max(0.05, 1 - spent / minutes)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0 or step == 1:
            losses.append((step, round(float(loss), 4)))
            print(f"step {step}, {(time.perf_counter() - started):.0f} s, loss {losses[-1][1]}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model.to(dtype).cpu().save_pretrained(str(folder))
    fresh = random.Random(seed + 1)
    questions = [{"prompt": BOS + question(*problem(fresh))} for _ in range(512)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions), encoding="utf-8")
    minutes_taken = round((time.perf_counter() - started) / 60, 2)
    log = {"steps": step, "minutes": minutes_taken, "parameters": sum(p.numel() for p in model.parameters())}
    (folder / "training.json").write_text(json.dumps(log | {"losses": losses}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a smaller model and 20 steps, to see that it works")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    train(chosen.folder, tiny=chosen.tiny, minutes=chosen.minutes, seed=chosen.seed)


if __name__ == "__main__":
    main()
