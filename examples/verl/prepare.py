"""Data for the verl examples, as verl's parquet files: DeepMath-103K, or a tiny model with sums to try things out.

    python examples/verl/prepare.py deepmath data/deepmath          # from the hub, or --source FILE_OR_FOLDER
    python examples/verl/prepare.py smoke runs/verl_smoke

Each folder gets train.parquet and val.parquet; `smoke` also model/, random and small enough for a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moebius.rollout.datasets import Question
from moebius.rollout.deepmath import load_source
from moebius.rollout.demo_assets import WEIGHT_STD, make_tiny_model
from moebius.rollout.job_config import DataSettings

DEEPMATH = "zwhe99/DeepMath-103K"
VALIDATION = 500  # questions that are not trained on
ASK = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(question: str, answer: str, source: str, split: str, index: int, extra: dict[str, Any]) -> dict[str, Any]:
    """One row in verl's columns."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **extra},
    }


def deepmath(folder: Path, source: str, limit: int | None) -> None:
    """DeepMath in a fixed random order, its last questions for validation."""
    questions: list[Question] = load_source(DataSettings(source=source, limit=limit))
    random.Random(0).shuffle(questions)
    held_out = min(VALIDATION, max(1, len(questions) // 10))
    for split, part in (("train", questions[:-held_out]), ("val", questions[-held_out:])):
        rows = [
            row(str(q.prompt) + ASK, q.answer, DEEPMATH, split, i, {"difficulty": float(q.meta.get("difficulty") or 0)})
            for i, q in enumerate(part)
        ]
        write(folder / f"{split}.parquet", rows)


def smoke(folder: Path, shape: argparse.Namespace) -> None:
    """A small random model and sums."""
    heads = max(2, shape.hidden // 64)
    model = make_tiny_model(
        folder / "model",
        num_experts=shape.experts,
        num_layers=shape.layers,
        heads=heads,
        kv_heads=4 if heads % 4 == 0 else 2,
        hidden=shape.hidden,
        moe_intermediate=shape.intermediate,
        max_len=512,
        layer_std=shape.layer_std,
    )
    speak_chatml(model)
    # The random model would hardly ever end by itself.
    generation = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    generation["eos_token_id"] = [generation["eos_token_id"], *range(shape.first_stop, shape.first_stop + shape.stops)]
    (model / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    rng = random.Random(1)
    for split, count in (("train", shape.prompts), ("val", 4)):
        sums = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
        rows = [row(f"What is {a} + {b}?", str(a + b), "sums", split, i, {}) for i, (a, b) in enumerate(sums)]
        write(folder / f"{split}.parquet", rows)


def speak_chatml(model: Path) -> None:
    """Give the tiny model's tokenizer the marks of Qwen's chats, which verl looks for in models of that family."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text(encoding="utf-8")
        text = text.replace("<bos>", "<|im_start|>").replace("<eos>", "<|im_end|>")
        (model / name).write_text(text, encoding="utf-8")
    (model / "chat_template.jinja").write_text(CHATML, encoding="utf-8")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """One parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} prompts")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("deepmath", "smoke"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default=DEEPMATH, help="parquet or JSON lines instead of the hub's data set")
    parser.add_argument("--layers", type=int, default=2, help="of smoke's model")
    parser.add_argument("--hidden", type=int, default=64, help="its width, 64 for each attention head")
    parser.add_argument("--experts", type=int, default=4, help="of each layer, 2 of them active")
    parser.add_argument("--intermediate", type=int, default=32, help="width of an expert")
    parser.add_argument(
        "--layer-std", type=float, default=WEIGHT_STD, help="of its layers' matrices; 0.02 in wide ones"
    )
    parser.add_argument("--stops", type=int, default=30, help="tokens of 512 that end a sample")
    parser.add_argument("--first-stop", type=int, default=300, help="the first of them")
    parser.add_argument("--prompts", type=int, default=16, help="smoke's questions for training")
    parser.add_argument("--limit", type=int, help="take only so many questions")
    arguments = parser.parse_args()
    if arguments.what == "smoke":
        smoke(arguments.folder, arguments)
    else:
        deepmath(arguments.folder, arguments.source, arguments.limit)


if __name__ == "__main__":
    main()
