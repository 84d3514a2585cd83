"""Finished samples kept to draft from, by prompt, and how ranks tell each other theirs. No vLLM here."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Tokens = npt.NDArray[np.int32]
Text = tuple[int, Tokens]  # scope, tokens


def scope_of(mode: str, prompt: Sequence[int] | Tokens, request: str) -> int:
    """Texts of one scope are drafted from together: of one request, of all, or of one prompt. A 63-bit number."""
    if mode == "suffix":
        return 0
    content = request.encode() if mode == "ngram" else np.asarray(prompt, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


class DraftLibrary:
    """Samples of this rank, at most `capacity` tokens. Scopes not used for longest go first, then older samples."""

    def __init__(self, mode: str, capacity: int) -> None:
        self.mode, self.capacity = mode, capacity
        self.tokens = 0
        self._texts: OrderedDict[int, deque[Tokens]] = OrderedDict()

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keep a finished sample's output (`ngram` needs none)."""
        if self.mode == "ngram" or not output or len(output) > self.capacity:
            return
        scope = scope_of(self.mode, prompt, "")
        text = np.asarray(output, dtype=np.int32)
        self._texts.setdefault(scope, deque()).append(text)
        self._texts.move_to_end(scope)
        self.tokens += len(text)
        while self.tokens > self.capacity:
            oldest, texts = next(iter(self._texts.items()))
            self.tokens -= len(texts.popleft())
            if not texts:
                del self._texts[oldest]

    def of(self, scopes: set[int], limit: int) -> list[Text]:
        """Texts of these scopes, at most `limit` tokens, older ones first; the newest are kept."""
        found: list[Text] = []
        newest = {scope: list(texts) for scope, texts in self._texts.items() if scope in scopes}
        depth = 1
        while newest and limit > 0:  # in turn from every scope, so that each has something
            for scope, texts in list(newest.items()):
                if depth > len(texts) or len(texts[-depth]) > limit:
                    del newest[scope]
                    continue
                found.append((scope, texts[-depth]))
                limit -= len(texts[-depth])
            depth += 1
        return found[::-1]


def share(texts: Sequence[Text], group: dist.ProcessGroup) -> list[Text]:
    """The texts of all ranks, by rank; the same on each. A collective of `group` (gloo)."""
    head = np.array([value for scope, tokens in texts for value in (scope, len(tokens))], dtype=np.int64)
    body = np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens in texts)])
    flat = torch.from_numpy(np.concatenate([head.view(np.int32), body]))
    sizes = [torch.empty(2, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(texts), len(flat)]), group=group)
    longest = max(int(size[1]) for size in sizes)
    padded = torch.zeros(max(1, longest), dtype=torch.int32)
    padded[: len(flat)] = flat
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    found: list[Text] = []
    for size, part in zip(sizes, parts, strict=True):
        count = int(size[0])
        values = part.numpy()
        heads = values[: 4 * count].view(np.int64).reshape(count, 2)
        start = 4 * count
        for scope, length in heads.tolist():
            found.append((scope, values[start : start + length]))
            start += length
    return found
