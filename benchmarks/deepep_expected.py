"""What deep_ep is expected to save per EP iteration on a number of GPUs, by the planner's model. Nothing is measured.

    python -m benchmarks.deepep_expected --model qwen3-30b-a3b --gpus 8

The all-gather brings every token to every rank. deep_ep sends a token only to ranks that have one of its experts, each
rank once: with k experts per token, chosen evenly, another rank is one of them with probability 1 - (1 - 1/G)**k. The
model counts bytes between ranks at the link's rate; latencies are in its floor per layer, which is taken to be equal.
"""

from __future__ import annotations

import argparse

from moebius.engine.layout import Layout
from moebius.rollout.plan_model import H200, ITEM, Gpu, PlanModel, iteration_ms, load_gpu, load_model, work


def share_sent(ranks: int, topk: int) -> float:
    """Bytes that deep_ep sends to other ranks over those of the all-gather."""
    return 1.0 - (1.0 - 1.0 / ranks) ** topk


def saved_ms(model: PlanModel, gpu: Gpu, ranks: int, batch: int) -> float:
    """Milliseconds of an iteration by which less is sent, dispatch and combine together."""
    moe = len(model.shape.moe_layers)
    hidden_bytes = batch * model.shape.hidden * ITEM * (ranks - 1) / ranks
    return (1 - share_sent(ranks, model.top_k)) * 2 * moe * hidden_bytes / (gpu.link_gb_s * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batches", default="256,1024,4096,8192")
    parser.add_argument("--context", type=int, default=1000)
    given = parser.parse_args()
    model, gpu = load_model(given.model, given.gpus), load_gpu(given.gpu)
    sent = 100 * share_sent(given.gpus, model.top_k)
    print(f"{model.name} on {given.gpus} {gpu.name}: deep_ep sends {sent:.1f} % of the all-gather's bytes")
    for batch in (int(part) for part in given.batches.split(",")):
        ms = iteration_ms(work(model, gpu, given.gpus, Layout.EP, batch, given.context), H200, Layout.EP)
        saved = H200.compute * saved_ms(model, gpu, given.gpus, batch)
        share = 100 * saved / ms
        print(f"batch {batch:6d}: expected {ms:7.2f} ms, with deep_ep {saved:5.2f} ms or {share:4.1f} % less")


if __name__ == "__main__":
    main()
