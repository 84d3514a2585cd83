"""Python's garbage collector where it has much to look through and little to find: the import and the end of vLLM.

A full collection looks at every object there is, most of which vLLM's modules hold. vLLM asks for four of them while
two runtimes are built, and for four more when they are shut down.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_kept() -> Iterator[None]:
    """What is imported in the block stays as long as the process: it is never looked through."""
    gc.collect()  # else what is garbage already would stay, too
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # gc.disable() would not last: some modules call gc.enable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collections that are asked for in the block do not happen: for a process that ends and gives all back.

    On CPU only. CUDA graphs have to be gone before the communicators that they use.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    collect, unfreeze = gc.collect, gc.unfreeze
    gc.collect = lambda generation=2: 0
    gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.collect, gc.unfreeze = collect, unfreeze
