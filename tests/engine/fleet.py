"""Real engines for tests: one process per rank, driven over pipes. No Ray here."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, reduction
from multiprocessing.context import BaseContext
from typing import Any

import torch

from moebius.rollout.shm import clean_leftovers, make_ident, name_python_segments, parse_ident, remove_own

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_KV_CACHE_LAYOUT": "HND",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    # On GPU hosts: no NVLink multicast, and the samplers both engines share.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TRITON_F32_DEFAULT": "ieee",  # else products of fp32 experts and attention run in TF32
}

# What a rank on CPU imports until its engine is there: all that takes long.
IMPORTS = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.qwen3_moe",
    "moebius.engine.engine",
)

if not torch.cuda.is_available():
    ENVIRONMENT["TORCHDYNAMO_DISABLE"] = "1"  # eager anyway; compiling the sampler helpers takes longer than the tests


def sharing_gpus(ranks: int) -> bool:
    """Whether so many ranks have to share GPUs."""
    return torch.cuda.is_available() and torch.cuda.device_count() < ranks


def _device_of(rank: int, ranks: int) -> dict[str, str]:
    """Each rank a GPU of its own, or a shared one where there are too few.

    NCCL takes two ranks on one GPU only if they seem to be on different hosts; it then talks over sockets. Slow, and
    good enough to compare tokens.
    """
    if not sharing_gpus(ranks):
        return {"LOCAL_RANK": str(rank)}
    device = rank % torch.cuda.device_count()
    return {"LOCAL_RANK": str(device), "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _context() -> BaseContext:
    """Where rank processes come from: on CPU, a process that has imported vLLM, which takes longer than the rest of a
    start, and is forked. With CUDA, which does not live through a fork, each rank is a new process.
    """
    if torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([*IMPORTS, "tests.engine.frozen"])
    with _environment(ENVIRONMENT):  # what is imported reads some of it
        forkserver.ensure_running()
    return context


class _Output:
    """Where this process writes to, for a child that is forked from another: pytest shows it where a test fails."""

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(fd) for fd in (1, 2)]

    def __setstate__(self, here: list[Any]) -> None:
        for fd, copy in zip((1, 2), here, strict=True):
            if (own := copy.detach()) != fd:  # a new process has it under the same number already
                os.dup2(own, fd)
                os.close(own)


def _serve(
    pipe: Any, output: _Output, environment: dict[str, str], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)  # a forked process has that of the one it was forked from
    ident = parse_ident(environment["MOEBIUS_GROUP_ID"])
    assert ident is not None
    name_python_segments(ident)
    try:
        subject = make(*arguments)
        pipe.send((True, None))
        while (message := pipe.recv()) is not None:
            function, args = message
            try:
                pipe.send((True, function(subject, *args)))
            except Exception as error:  # reported to the test, which decides
                pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    except Exception as error:
        pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class RankError(AssertionError):
    """A call failed on a rank; `kind` is the exception's class name there."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Fleet:
    """`make(*arguments)` in every rank process; `call` runs a picklable function on the result in all of them."""

    def __init__(self, ranks: int, make: Callable[..., Any], *arguments: Any, timeout_s: float = 240) -> None:
        context: Any = _context()
        port = str(free_port())
        clean_leftovers()
        self.ident = make_ident()
        self.timeout_s = timeout_s
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            environment = ENVIRONMENT | {
                "RANK": str(rank),
                **_device_of(rank, ranks),
                "WORLD_SIZE": str(ranks),
                "MASTER_PORT": port,
                "MOEBIUS_GROUP_ID": str(self.ident),
            }
            process = context.Process(
                target=_serve, args=(theirs, _Output(), environment, make, arguments), daemon=True
            )
            with _environment(environment):  # torch reads some of it when it is imported, before anything else runs
                process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self._collect()

    def call(
        self, function: Callable[..., Any], *args: Any, per_rank: list[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Results by rank. `per_rank[r]` are further arguments for rank r."""
        for rank, pipe in enumerate(self.pipes):
            pipe.send((function, (*args, *(per_rank[rank] if per_rank else ()))))
        return self._collect()

    def _collect(self) -> list[Any]:
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(self.timeout_s):
                self.kill()
                raise RankError(rank, "Timeout", f"no answer within {self.timeout_s} s", "")
            ok, value = pipe.recv()
            if not ok:
                # The other ranks may wait in a collective for this one.
                for other in self.pipes[rank + 1 :]:
                    if other.poll(5):
                        other.recv()
                raise RankError(rank, *value)
            results.append(value)
        return results

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
        remove_own(self.ident)

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                continue  # that rank has ended already
        for process in self.processes:
            process.join(10)
        self.kill()
