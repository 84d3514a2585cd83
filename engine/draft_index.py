"""Drafts from text seen before: which tokens followed, earlier, what a sequence ends with now. No vLLM here.

The structure is that of LZ77 compressors (Ziv and Lempel 1977, with the hash chains of RFC 1951, section 4): a ring of
tokens, a hash table from the last `GRAM` tokens to the newest place they ended at, and at each place the one before it
with the same hash; and the same once more for the last `LONG` tokens, since in much text about one thing the newest
places of a short match are not the best. An entry also points to the tokens before and after it in its own sequence, so
that sequences which grow at the same time may lie in the ring in any order. Adding a token costs the same whatever the
ring holds; when the ring is full its oldest tokens are overwritten, so memory is bounded from the start.

A draft follows the continuations of the longest matches, which vote with the squares of their lengths (as suffix
decoding does by counts, arXiv 2411.04975). Everything is integer arithmetic but one division per token: equal inputs
give equal drafts in every process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

GRAM = 2  # tokens that must match before a place counts
LONG = 5  # tokens of a match that is looked for first
LONGEST = 24  # matches are not followed further back
PLACES = 32  # newest places looked at, of long matches and of short ones
ENOUGH = 3  # long matches beside which short ones are not looked for
_DOUBT = GRAM * GRAM  # weight of what has never been seen

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Drafts:
    """Guesses for a batch, one row each."""

    tokens: npt.NDArray[np.int32]  # [rows, k]
    chance: npt.NDArray[np.float64]  # [rows, k]: that a token is right if all before it are
    counts: npt.NDArray[np.int32]  # [rows]: tokens of the row that are guesses


class DraftIndex:
    """Texts in `capacity` tokens (a power of two), and `slots` sequences that grow. All positions are absolute."""

    def __init__(self, capacity: int, slots: int) -> None:
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"the capacity must be a power of two, got {capacity}")
        self.text = np.zeros(capacity, dtype=np.int32)
        self.links = np.full((capacity, 4), -1, dtype=np.int64)  # before, after, same hash of GRAM, and of LONG
        self.heads = np.full((2, capacity), -1, dtype=np.int64)  # by hash of GRAM, and of LONG
        self.clock = np.zeros(1, dtype=np.int64)  # tokens added so far
        self.last = np.full(slots, -1, dtype=np.int64)  # by slot: its newest token's position
        self.known = np.zeros(slots, dtype=np.int64)  # by slot: tokens added
        self.scopes = np.zeros(slots, dtype=np.int64)  # by slot

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(a.nbytes for a in (self.text, self.links, self.heads, self.last, self.known, self.scopes))

    def forget(self) -> None:
        """Everything in the ring is overwritten, as it were; what had a slot must begin anew."""
        self.clock += len(self.text)

    def add(self, scope: int, tokens: npt.NDArray[np.int32]) -> None:
        """A text that does not grow. Texts of other scopes are hardly ever found (by an equal hash only)."""
        _add(self.text, self.links, self.heads, self.clock, scope, tokens)

    def begin(self, slot: int, scope: int) -> None:
        """A sequence that will grow takes `slot`; what was in it stays in the ring."""
        self.last[slot], self.known[slot], self.scopes[slot] = -1, 0, scope

    def extend(self, slots: Ints, table: npt.NDArray[np.int32], rows: Ints, lengths: Ints) -> None:
        """Add what is new of sequences: sequence i, in slot slots[i], has its tokens in table[rows[i], :lengths[i]]."""
        _extend(
            self.text, self.links, self.heads, self.clock, self.last, self.known, self.scopes,
            slots, table, rows, lengths,
        )  # fmt: skip

    def append(self, slots: Ints, tokens: npt.NDArray[np.int32], ends: Ints) -> None:
        """Add to sequences: the one in slots[i] gets tokens[ends[i - 1] : ends[i]]."""
        _append(self.text, self.links, self.heads, self.clock, self.last, self.known, self.scopes, slots, tokens, ends)

    def drafts(self, slots: Ints, limits: Ints, width: int) -> Drafts:
        """Guesses for the sequences in `slots`, at most limits[i] (and `width`) tokens for sequence i."""
        rows = len(slots)
        found = Drafts(np.zeros((rows, width), dtype=np.int32), np.zeros((rows, width)), np.zeros(rows, dtype=np.int32))
        _drafts(
            self.text, self.links, self.heads, self.clock, self.last,
            slots, limits, found.tokens, found.chance, found.counts,
        )  # fmt: skip
        return found


@numba.njit(nogil=True)
def _put(text, links, heads, clock, scope, token, before):
    """Add one token behind `before` (-1: it is the first); returns its position."""
    mask = len(text) - 1
    here = clock[0]
    clock[0] = here + 1
    at = here & mask
    text[at] = token
    links[at, 0], links[at, 1], links[at, 2], links[at, 3] = before, -1, -1, -1
    oldest = here - len(text)  # positions up to it are overwritten
    if before >= 0 and before > oldest:
        links[before & mask, 1] = here
    # FNV-1a over scope and the last GRAM tokens, and on to LONG.
    key = (np.uint64(14695981039346656037) ^ np.uint64(scope)) * np.uint64(1099511628211)
    place = here
    for n in range(LONG):
        if place < 0 or place <= oldest:
            return here
        key = (key ^ np.uint64(text[place & mask])) * np.uint64(1099511628211)
        place = links[place & mask, 0]
        if n == GRAM - 1 or n == LONG - 1:
            slot = np.int64((key ^ (key >> np.uint64(29))) & np.uint64(mask))
            kind = np.int64(n == LONG - 1)
            links[at, 2 + kind] = heads[kind, slot]
            heads[kind, slot] = here
    return here


@numba.njit(nogil=True)
def _add(text, links, heads, clock, scope, tokens):
    before = np.int64(-1)
    for token in tokens:
        before = _put(text, links, heads, clock, scope, token, before)


@numba.njit(nogil=True)
def _extend(text, links, heads, clock, last, known, scopes, slots, table, rows, lengths):
    for i in range(len(slots)):
        slot = slots[i]
        before = last[slot]
        for n in range(known[slot], lengths[i]):
            before = _put(text, links, heads, clock, scopes[slot], table[rows[i], n], before)
        last[slot] = before
        known[slot] = max(known[slot], lengths[i])


@numba.njit(nogil=True)
def _append(text, links, heads, clock, last, known, scopes, slots, tokens, ends):
    start = np.int64(0)
    for i in range(len(slots)):
        slot = slots[i]
        before = last[slot]
        for n in range(start, ends[i]):
            before = _put(text, links, heads, clock, scopes[slot], tokens[n], before)
        last[slot] = before
        known[slot] += max(np.int64(0), ends[i] - start)
        start = ends[i]


@numba.njit(nogil=True)
def _match(text, links, clock, one, other):
    """How many tokens up to `one` and up to `other` are the same, at most LONGEST."""
    mask = len(text) - 1
    oldest = clock[0] - 1 - len(text)
    length = 0
    while length < LONGEST and one > oldest and other > oldest and one >= 0 and other >= 0:
        if text[one & mask] != text[other & mask]:
            break
        length += 1
        one, other = links[one & mask, 0], links[other & mask, 0]
    return length


@numba.njit(nogil=True)
def _drafts(text, links, heads, clock, last, slots, limits, tokens, chance, counts):
    mask = len(text) - 1
    oldest = clock[0] - 1 - len(text)
    width = tokens.shape[1]
    place = np.empty(PLACES, dtype=np.int64)  # where each match stands: a position, or -2 - n for draft token n
    length = np.empty(PLACES, dtype=np.int64)
    word = np.empty(PLACES, dtype=np.int32)  # what it says comes next
    for row in range(len(slots)):
        end = last[slots[row]]
        limit = min(limits[row], width)
        counts[row] = 0
        if limit <= 0 or end < 0 or end <= oldest:
            continue
        matches = 0
        # Short ones where there are few long ones; then all long ones are known.
        for kind in range(1, -1, -1):
            other = links[end & mask, 2 + kind] if matches < ENOUGH else np.int64(-1)
            for _ in range(PLACES):
                if other < 0 or other <= oldest or matches == PLACES:
                    break
                same = _match(text, links, clock, end, other)
                if same >= LONG if kind else GRAM <= same < LONG:
                    place[matches], length[matches] = other, same
                    matches += 1
                other = links[other & mask, 2 + kind]
        for n in range(limit):
            # What every match says. One that has come to the end of this very text goes on with the draft.
            alive = 0
            for m in range(matches):
                at = place[m]
                if at == end:
                    at = np.int64(-2)
                    token = tokens[row, 0]
                elif at <= -2:
                    at -= 1
                    token = tokens[row, -2 - at]
                else:
                    at = links[at & mask, 1]
                    if at < 0 or at <= oldest:
                        continue
                    token = text[at & mask]
                place[alive], length[alive], word[alive] = at, length[m] + 1, token
                alive += 1
            matches = alive
            if matches == 0:
                break
            best = np.int64(0)
            winner = word[0]
            total = np.int64(_DOUBT)
            alike = True
            for m in range(matches):
                total += (length[m] - 1) * (length[m] - 1)
                alike = alike and word[m] == winner
            if alike:  # as mostly: nothing to count
                best = total - _DOUBT
            for m in range(0 if alike else matches):
                weight = np.int64(0)
                for o in range(matches):
                    if word[o] == word[m]:
                        weight += (length[o] - 1) * (length[o] - 1)
                if weight > best:  # of equal ones the first, which is the newest
                    best, winner = weight, word[m]
            tokens[row, n] = winner
            chance[row, n] = best / total
            counts[row] = n + 1
            alive = 0
            for m in range(matches):
                if word[m] == winner:
                    place[alive], length[alive] = place[m], length[m]
                    alive += 1
            matches = alive
