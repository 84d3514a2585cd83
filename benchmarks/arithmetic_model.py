"""Trains a small Qwen3-MoE on sums worked out step by step: a model whose samples repeat themselves, and each other.

    python -m benchmarks.arithmetic_model runs/arithmetic            # a CUDA device, about three minutes
    python -m benchmarks.arithmetic_model runs/arithmetic --tiny     # CPU, under a minute; it learns next to nothing

Writes a checkpoint (bf16, 21 MB) with tokenizer, questions.jsonl (problems by another seed) and training.json: losses,
and of some sampled answers how many are right. The text is made here: multiplications and sums with words that vary,
and checks that repeat the calculation a random number of times, so that lengths have a tail. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCAB = 768
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
WHOLE = {
    "vocab_size": VOCAB, "hidden_size": 384, "intermediate_size": 1024, "moe_intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
TINY = WHOLE | {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_attention_heads": 4}
LONGEST = 2048  # tokens of prompt and answer
_SO, _NEXT = ("So", "Thus", "Therefore", "Hence"), ("Then", "Next", "Now", "After that,")


def problem(r: random.Random) -> tuple[int, int, int]:
    """a * b + c."""
    return r.randrange(12, 100), r.randrange(12, 100), r.randrange(100, 1000)


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


def batches(tokenizer: Any, r: random.Random, rows: int, length: int) -> Iterator[tuple[Any, Any]]:
    """Token ids and labels, both [rows, length]: answers one after the other, cut at the end of a row.

    Questions are labelled -100: what is asked is chance, and nothing to learn.
    """
    import torch

    while True:
        ids: list[list[int]] = []
        labels: list[list[int]] = []
        for _ in range(rows):
            row: list[int] = []
            wanted: list[int] = []
            while len(row) < length:
                p = problem(r)
                asked = [tokenizer.bos_token_id, *tokenizer.encode(question(*p))]
                told = [*tokenizer.encode(answer(*p, r)), tokenizer.eos_token_id]
                row += asked + told
                wanted += [-100] * len(asked) + told
            ids.append(row[:length])
            labels.append(wanted[:length])
        yield torch.tensor(ids), torch.tensor(labels)


def loader(tokenizer: Any, seed: int, rows: int, length: int, workers: int) -> Iterator[tuple[Any, Any]]:
    """`batches` from worker processes: on a GPU a step is over before this process could make the next batch."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            info = get_worker_info()
            return batches(tokenizer, random.Random(f"{seed}:{info.id if info else 0}"), rows, length)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    more: dict[str, Any] = {"prefetch_factor": 4, "multiprocessing_context": "fork"} if workers else {}
    return iter(DataLoader(Stream(), batch_size=None, num_workers=workers, **more))


def all_experts(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """A layer's experts as one wide layer: all of them on all tokens, those not chosen with weight 0.

    The same result as one expert after the other, in a few large products instead of many small ones.
    """
    import torch

    weights = torch.zeros(len(hidden_states), self.num_experts, dtype=top_k_weights.dtype, device=hidden_states.device)
    weights = weights.scatter(1, top_k_index, top_k_weights)
    both = torch.nn.functional.linear(hidden_states, self.gate_up_proj.flatten(0, 1))
    gate, up = both.unflatten(-1, (self.num_experts, -1)).chunk(2, dim=-1)
    hidden = self.act_fn(gate) * up * weights[..., None].to(both.dtype)
    return hidden.flatten(1) @ self.down_proj.transpose(1, 2).flatten(0, 1).to(hidden.dtype)


def make_model(tiny: bool) -> Any:
    """In fp32, the optimizer's precision; on a GPU products are in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **(TINY if tiny else WHOLE), decoder_sparse_step=1, norm_topk_prob=True, max_position_embeddings=LONGEST,
        tie_word_embeddings=False, mlp_only_layers=[], architectures=["Qwen3MoeForCausalLM"], pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    for layer in model.model.layers:
        layer.mlp.experts.forward = types.MethodType(all_experts, layer.mlp.experts)
    return model


def train(
    folder: Path,
    *,
    tiny: bool,
    minutes: float,
    seed: int,
    judged: int,
    steps: int | None = None,
    rows: int | None = None,
) -> dict[str, Any]:
    """Write the checkpoint; returns what training.json holds."""
    import torch
    from transformers import GenerationConfig

    r = random.Random(seed)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    tokenizer = make_tokenizer(r)
    model = make_model(tiny).to(device).train()
    last = steps or (20 if tiny else 1_000_000)
    rows, length = rows or (4 if tiny else 32), 256 if tiny else LONGEST
    data = loader(tokenizer, seed, rows, length, min(14, (os.cpu_count() or 4) - 2) if cuda else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01, fused=cuda)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {rows} x {length} tokens a step", flush=True)
    next(data)  # workers have begun
    started, losses, step = time.perf_counter(), [], 0
    while step < last and (spent := (time.perf_counter() - started) / 60) < minutes:
        ids, labels = (part.to(device, non_blocking=True) for part in next(data))
        # A short rise, then down with what is left of time or steps.
        done = max(spent / minutes, step / last)
        rate = 2e-3 * min(1.0, (step + 1) / 100) * max(0.02, 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % (5 if tiny else 50) == 0 or step == 1:
            losses.append((step, round(loss.item(), 4)))  # waits for the device
            seconds = time.perf_counter() - started
            print(f"step {step}, {seconds:.0f} s, {step * rows * length / seconds:,.0f} tokens/s, "
                  f"loss {losses[-1][1]}", flush=True)  # fmt: skip
    if cuda:
        torch.cuda.synchronize()
    log: dict[str, Any] = {
        "steps": step, "tokens": step * rows * length, "minutes": round((time.perf_counter() - started) / 60, 2),
        "parameters": sum(p.numel() for p in model.parameters()), "losses": losses,
    }  # fmt: skip
    fresh = random.Random(f"questions {seed}")
    questions = [problem(fresh) for _ in range(512)]
    if judged:
        log["judged"] = judge(model, tokenizer, questions[:judged], 32 if tiny else 900)
        print(log["judged"], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.to(torch.bfloat16 if cuda else torch.float32).cpu().save_pretrained(str(folder))
    asked = [{"prompt": BOS + question(*p)} for p in questions]
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked), encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return log


def judge(model: Any, tokenizer: Any, questions: list[tuple[int, int, int]], most: int) -> dict[str, float]:
    """One answer to each question at temperature 1: shares that have ended within `most` tokens, and that are right.

    An answer is right if it has the sum, whether or not it checks it yet.
    """
    import torch

    device = next(model.parameters()).device
    texts = [[tokenizer.bos_token_id, *tokenizer.encode(question(*p))] for p in questions]
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        found = model.generate(
            input_ids=ids, attention_mask=(ids != 0).long(), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=most, pad_token_id=0, eos_token_id=2,
        )[:, longest:].tolist()  # fmt: skip
    ended = right = 0
    for (a, b, c), tokens in zip(questions, found, strict=True):
        ended += 2 in tokens
        text = tokenizer.decode([token for token in tokens if token > 2])
        sums = re.findall(rf"{a * b} \+ {c} = (\d+)\.", text)
        right += bool(sums) and all(int(number) == a * b + c for number in sums)
    count = len(questions)
    return {"questions": count, "right": right / count, "ended": ended / count, "tokens": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a smaller model and 20 steps, to see that it works")
    parser.add_argument("--minutes", type=float, default=2.5, help="of training; the start and the end take another")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", type=int, default=48, help="answers that are sampled and judged; 0: none")
    parser.add_argument("--steps", type=int, help="at most; default: what the minutes allow")
    parser.add_argument("--rows", type=int, help="texts in a step; default 32")
    chosen = parser.parse_args()
    train(
        chosen.folder, tiny=chosen.tiny, minutes=chosen.minutes, seed=chosen.seed, judged=chosen.judge,
        steps=chosen.steps, rows=chosen.rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
