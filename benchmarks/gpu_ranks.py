"""Processes of a benchmark that measures memory or kernels alone: one per GPU of this host, joined over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

END_S = 10.0  # for a process to end when all is over; then it is killed


@contextmanager
def gpu_ranks(run: Callable[..., None], ranks: int, *arguments: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Start `run(rank, ranks, port, *arguments, queue)` per rank; gives (queue, processes), and ends all in the end."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=run, args=(rank, ranks, port, *arguments, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        yield queue, processes
    finally:
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()


def join_ranks(rank: int, ranks: int, port: int) -> None:
    """In a process of `gpu_ranks`: take GPU `rank`, and join the others in the default group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
