"""Single measurements inside a rank process: weight updates, memory, reloads and captures. Called through `Fleet`."""

from __future__ import annotations

import time
from typing import Any

from moebius.rollout.bench.rank import Ours, Stock


def full_update_s(engine: Ours | Stock) -> float:
    """Seconds to load a whole set of weights that lie on the rank's device already, in the trainer's names and shapes.

    All tensors are views of one buffer as large as the largest of them, so the numbers loaded mean nothing.
    """
    import torch

    from moebius.engine.weights import ExpectedWeights

    runner = engine.runners()[0]
    expected = ExpectedWeights.from_hf_config(runner.model_config.hf_config)
    dtype, device = runner.model_config.dtype, runner.device
    sizes = {name: torch.Size(shape).numel() for name, shape in expected.shapes.items()}
    flat = torch.empty(max(sizes.values()), dtype=dtype, device=device).normal_(0.0, 0.02)
    names = [name for name in expected.shapes if name not in expected.optional]

    def tensors() -> Any:
        for name in names:
            tensor = flat[: sizes[name]].view(expected.shapes[name])
            yield from expected.normalise(name, tensor)

    _synchronize()
    started = time.perf_counter()
    engine.load_all(tensors())
    _synchronize()
    return time.perf_counter() - started


def memory(engine: Ours | Stock) -> dict[str, float]:
    """GiB of this rank: parameters and KV pages; on CUDA also what torch holds, and the device's use and size."""
    import torch

    storages: dict[int, int] = {}
    kv: dict[int, int] = {}
    for runner in engine.runners():
        for parameter in runner.model.parameters():
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        for tensor in runner.kv_caches:
            storage = tensor.untyped_storage()
            kv[storage.data_ptr()] = storage.nbytes()
    weights_and_kv = sum((storages | kv).values())
    figures = {"weights_and_kv": weights_and_kv}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        figures |= {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "driver_used": total - free,
            "device": total,
        }
    return {name: value / 2**30 for name, value in figures.items()}


def start_and_account(engine: Ours) -> dict[str, Any]:
    """What this rank's start took, and where its memory goes at rest; overheads over static engines in bytes."""
    from dataclasses import asdict

    account = engine.engine.memory_account()
    overhead = {layout: account.overhead(layout) for layout in ("EP", "TP")}
    return {"startup": asdict(engine.engine.startup), "account": asdict(account), "overhead_bytes": overhead}


def reload_from_host_s(engine: Stock) -> float:
    """Seconds to write every parameter once from pinned host memory, in chunks of one buffer of at most 1 GiB."""
    import torch

    (runner,) = engine.runners()
    parameters = [parameter.data.view(-1) for parameter in runner.model.parameters() if parameter.is_contiguous()]
    dtype = runner.model_config.dtype
    chunk = (1 << 30) // torch.empty(0, dtype=dtype).element_size()
    host = torch.empty(chunk, dtype=dtype, pin_memory=True).normal_(0.0, 0.02)
    _synchronize()
    started = time.perf_counter()
    with torch.inference_mode():  # whether or not the parameters were made in it
        for parameter in parameters:
            for part in parameter.split(chunk):
                part.copy_(host[: part.numel()], non_blocking=True)
    _synchronize()
    return time.perf_counter() - started


def recapture_s(engine: Stock) -> float:
    """Seconds to drop all CUDA graphs and capture them again; a collective."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import set_current_vllm_config

    (runner,) = engine.runners()
    _synchronize()
    started = time.perf_counter()
    CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    with set_current_vllm_config(runner.vllm_config):
        runner.capture_model()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
