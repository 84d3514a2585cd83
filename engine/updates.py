"""New weights for both runtimes of a rank: sessions from begin to commit, all or nothing over all ranks.

in_place: every tensor is written where it belongs when it comes. Nothing is held twice, and a session that fails leaves
a mixture that only a full update can mend.

staged: what this rank needs is held in host memory until the commit, which copies it to its place. A session that fails
is dropped, and the old weights serve on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist

from moebius.engine.expert_writer import ExpertWriter
from moebius.engine.layout import Layout, ShardMap
from moebius.engine.runtime import RuntimePair
from moebius.engine.switch import Switcher
from moebius.engine.types import UpdateStats
from moebius.engine.weights import ExpectedWeights, WeightSession

Mode = Literal["in_place", "staged"]
Named = tuple[str, torch.Tensor]
_log = logging.getLogger(__name__)


class NoUpdate(RuntimeError):
    """Tensors or a commit came without a session."""


@dataclass
class _Shadow:
    """Host memory that a staged session fills: this rank's experts as in their slots, all else as it came."""

    w13: list[torch.Tensor]
    w2: list[torch.Tensor]
    rest: list[Named]
    writer: ExpertWriter


@dataclass
class _Open:
    version: int
    session: WeightSession
    shadow: _Shadow | None
    started: float
    nbytes: int = 0


class WeightUpdates:
    """The weights of one rank. `problem` says why they are not whole, and what helps; None when they are."""

    def __init__(self, pair: RuntimePair, switcher: Switcher, group: dist.ProcessGroup, hf_config: Any) -> None:
        self.pair, self.switcher, self._group = pair, switcher, group
        self._hf_config = hf_config
        self._open: _Open | None = None
        self.problem: str | None = None

    @cached_property
    def _expected(self) -> ExpectedWeights:
        return ExpectedWeights.from_hf_config(self._hf_config)

    def _experts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        modules = self.pair.ep.expert_modules
        return [module.w13_weight for module in modules], [module.w2_weight for module in modules]

    def _writer(self, w13: list[torch.Tensor], w2: list[torch.Tensor]) -> ExpertWriter:
        shape = self.pair.shape
        shard = ShardMap(shape, dist.get_world_size(self._group))
        return ExpertWriter(w13, w2, shape.moe_layers, shard.ep_experts(dist.get_rank(self._group)).start)

    @cached_property
    def _slot_writer(self) -> ExpertWriter:
        return self._writer(*self._experts())

    def begin(self, version: int, mode: Mode) -> None:
        """Open a session; one that is still open is dropped."""
        self._open = _Open(version, WeightSession(self._expected), None, time.perf_counter())
        if mode == "staged":
            self._open.shadow = self._make_shadow()
            return
        self.problem = f"the update to policy version {version} was not completed: send a full update"
        self._to_ep()

    def _to_ep(self) -> None:
        """All weights are about to be written in EP layout: no expert need be moved back."""
        self.switcher.experts_in = Layout.EP
        self.pair.shape_attention(Layout.EP)
        self.pair.activate(Layout.EP)

    def _make_shadow(self) -> _Shadow:
        w13, w2 = ([torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in s] for s in self._experts())
        return _Shadow(w13, w2, [], self._writer(w13, w2))

    def tensors(self, tensors: Iterable[Named]) -> None:
        """Take some tensors (HF names, per expert or fused). They may be overwritten when this returns.

        Raises ValueError as WeightSession; the session is over then.
        """
        opened = self._opened()
        try:
            self._take(opened, list(tensors))
        except BaseException as error:
            self._fail(opened, error)
            raise

    def _take(self, opened: _Open, tensors: list[Named]) -> None:
        shadow = opened.shadow
        writer = self._slot_writer if shadow is None else shadow.writer
        rest: list[Named] = []
        for name, tensor in tensors:
            parts = opened.session.accept(name, tensor)
            if not writer.write(name, tensor):
                rest += parts
            opened.nbytes += tensor.numel() * tensor.element_size()
        if shadow is None:
            self._load_rest(rest)
        else:
            shadow.rest += [(name, _on_host(tensor)) for name, tensor in rest]
        if any(tensor.is_cuda for _, tensor in tensors):
            torch.cuda.synchronize()  # copies out of the sender's memory are over

    def _load_rest(self, parts: list[Named]) -> None:
        """What is not an expert goes into both runtimes. TP's experts are the EP slots' bytes after the next switch."""
        ep, tp = self.pair.ep, self.pair.tp
        try:
            for runtime in (ep, tp):
                runtime.install_groups()
                runtime.runner.model.load_weights(iter(parts))
        finally:
            self.pair.active.install_groups()

    def commit(self, problem: str | None = None) -> UpdateStats:
        """End the session on all ranks or on none; a collective. `problem`: why this rank cannot.

        Raises:
            ValueError: weights are missing, or a rank has a problem; the message lists the first of each kind.
        """
        opened = self._opened() if problem is None else self._open
        if opened is not None and problem is None:
            try:
                opened.session.finish()
            except ValueError as error:
                problem = str(error)
        problems: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(problems, problem, group=self._group)
        found = list(dict.fromkeys(p for p in problems if p is not None))
        if found or opened is None:
            failure = ValueError("; ".join(found))
            if opened is not None:
                self._fail(opened, failure)
            raise failure
        if opened.shadow is not None:
            self.problem = f"the update to policy version {opened.version} broke off: send a full update"
            self._swap_in(opened.shadow)
        self._open, self.problem = None, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        mode = "in_place" if opened.shadow is None else "staged"
        return UpdateStats(opened.version, mode, opened.nbytes, time.perf_counter() - opened.started)

    @torch.inference_mode()
    def _swap_in(self, shadow: _Shadow) -> None:
        self._to_ep()
        for slots, held in zip(self._experts(), (shadow.w13, shadow.w2), strict=True):
            for slot, tensor in zip(slots, held, strict=True):
                slot.copy_(tensor, non_blocking=True)
        self._load_rest(shadow.rest)

    def pull(self, version: int, source: Any, arguments: tuple[Any, ...], mode: Mode) -> UpdateStats:
        """A whole session from `source(*arguments)`, which yields lists of names and tensors; a collective.

        The source is read to its end even after a problem: a sender, or other ranks, may wait for every reader.

        Raises:
            ValueError: this or another rank had a problem.
        """
        self.begin(version, mode)
        problem: str | None = None
        try:
            for tensors in source(*arguments):
                if problem is None:
                    try:
                        self.tensors(tensors)
                    except Exception as error:  # noqa: BLE001  (told to all ranks at the commit)
                        problem = self._in_words(error)
        except Exception as error:  # noqa: BLE001  (likewise)
            problem = problem or self._in_words(error)
            if self._open is not None:
                self._fail(self._open, error)
        return self.commit(problem)

    def _in_words(self, error: Exception) -> str:
        _log.error("weight update failed", exc_info=error)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"rank {dist.get_rank(self._group)}: {kind}{error}"

    def drop(self) -> None:
        """End an open session without a commit."""
        if self._open is not None:
            self._fail(self._open, RuntimeError("it was given up"))

    def _opened(self) -> _Open:
        if self._open is None:
            raise NoUpdate("no weight update is open: call begin_update first")
        return self._open

    def _fail(self, opened: _Open, error: BaseException) -> None:
        """Whatever was written, this session can no longer be whole."""
        self._open = None
        if opened.shadow is None:
            self.problem = f"the update to policy version {opened.version} failed ({error}): send a full update"


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.contiguous_format)
    return copy.copy_(tensor)
