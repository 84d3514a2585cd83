"""The part of a step report that tells what speculative decoding in the tail came to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from pydantic import BaseModel, ConfigDict, Field

from moebius.engine.types import DraftStats, SampleResult


class DraftsEntry(BaseModel):
    """Drafts of the step's iterations in TP; the same on all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mode: str = Field(description="Where drafts came from: ngram, suffix or siblings.")
    drafted: int = Field(ge=0, description="Drafted tokens that were verified, also those behind a wrong one.")
    verified: list[int] = Field(description="By position in a draft: tokens verified there, all before them right.")
    accepted: list[int] = Field(description="By position: those of them that were right.")
    iterations: int = Field(ge=0, description="Iterations in TP.")
    with_drafts: int = Field(ge=0, description="Iterations in which something was verified.")
    tokens: int = Field(ge=0, description="Tokens sampled in TP.")
    tokens_per_iteration: float = Field(ge=0, description="Of one sample in an iteration in TP; 1 without drafts.")
    plain_s: float | None = Field(
        None,
        ge=0,
        description="Seconds in TP without drafts for the same tokens: by costs, on the scale of iterations without "
        "drafts; null: none was timed.",
    )
    saved_s: float | None = Field(None, description="plain_s less the tail's seconds; null: no plain_s.")
    ahead: int = Field(0, ge=0, description="Iterations scheduled ahead, as they are without drafts.")
    changes: int = Field(0, ge=0, description="Times that TP went from there to drafting, or back.")
    problem: str | None = Field(None, description="Why there are no drafts any more; null: nothing has failed.")
    drafted_by_sample: list[int] | None = Field(
        None, description="Drafted tokens verified for each sample, in the order of samples; null: several replicas."
    )
    accepted_by_sample: list[int] | None = Field(None, description="And those of them that were right.")


def drafts_entry(stats: DraftStats | None, results: Sequence[SampleResult], tail_s: float) -> DraftsEntry | None:
    """The entry of a step whose results are sorted by key; None where TP has no drafts."""
    if stats is None:
        return None
    return DraftsEntry(
        mode=stats.mode,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        iterations=stats.iterations,
        with_drafts=stats.with_drafts,
        tokens=stats.tokens,
        tokens_per_iteration=stats.tokens / stats.rows if stats.rows else 0.0,
        plain_s=stats.plain_s,
        saved_s=None if stats.plain_s is None else stats.plain_s - tail_s,
        ahead=stats.ahead,
        changes=stats.changes,
        problem=stats.problem,
        drafted_by_sample=[result.drafted for result in results],
        accepted_by_sample=[result.accepted for result in results],
    )


def merged_drafts(entries: Sequence[DraftsEntry]) -> DraftsEntry | None:
    """Of several replicas together. Their tails run beside each other, so no seconds are added up."""
    if not entries:
        return None
    rows = [entry.tokens / entry.tokens_per_iteration for entry in entries if entry.tokens]
    return DraftsEntry(
        mode=entries[0].mode,
        drafted=sum(entry.drafted for entry in entries),
        verified=[sum(n) for n in zip_longest(*(entry.verified for entry in entries), fillvalue=0)],
        accepted=[sum(n) for n in zip_longest(*(entry.accepted for entry in entries), fillvalue=0)],
        iterations=sum(entry.iterations for entry in entries),
        with_drafts=sum(entry.with_drafts for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        tokens_per_iteration=sum(entry.tokens for entry in entries) / sum(rows) if rows else 0.0,
        ahead=sum(entry.ahead for entry in entries),
        changes=sum(entry.changes for entry in entries),
        problem=next((entry.problem for entry in entries if entry.problem), None),
    )


def drafts_words(entry: DraftsEntry) -> str:
    """One line about a step's drafts."""
    if entry.problem:
        return f"drafts ({entry.mode}): {entry.problem}"
    if not entry.drafted:
        return f"drafts ({entry.mode}): none verified in {entry.iterations:,} iterations of the tail"
    rates = ", ".join(
        f"{100 * right / tried:.0f}" for right, tried in zip(entry.accepted, entry.verified, strict=True) if tried
    )
    line = (
        f"drafts ({entry.mode}): {entry.tokens_per_iteration:.2f} tokens per sample and iteration of the tail; "
        f"{sum(entry.accepted):,} of {entry.drafted:,} drafted tokens right; by position {rates} %; "
        f"{entry.ahead:,} of {entry.iterations:,} iterations without"
    )
    if entry.saved_s is not None:
        verb = "saved" if entry.saved_s >= 0 else "lost"
        line += f"; about {abs(entry.saved_s):.2f} s {verb}"
    return line
