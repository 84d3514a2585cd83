"""How many drafted tokens of each request are worth verifying now. Plain arithmetic on arrays, no vLLM here.

An iteration of B requests that verifies n drafted tokens yields B + G(n) tokens on average and takes T(n) ms, where
G(n) is the sum of the n largest gains. The gain of a request's j-th drafted token is the chance that it and all before
it are right, c_1 * ... * c_j, so gains fall along a draft and the n largest always are whole beginnings of drafts. The
best n has the most tokens per ms, (B + G(n)) / T(n); it is 0 unless it beats B / T(0) by `MARGIN`.

The chance c of a token is the drafter's own estimate times how far it has been right with this request lately:
(accepted + w * r) / (estimated + w) over the tokens judged, where older ones count less. A token is judged if all
before it were accepted. w = `PRIOR` makes the first few count little; until then r counts, the same share over all
requests. A request whose drafts do not pay is tried again, with one token, every `RETRY` iterations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

MARGIN = 0.01
PRIOR = 2.0
MEMORY = 0.97  # what a judged token counts after the next one
RETRY = 32

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Cost = Callable[[int, float, Ints], Floats]  # requests, their mean context, tokens in all -> ms


def best_lengths(chance: Floats, counts: npt.NDArray[np.int32], ms: Floats) -> Ints:
    """Drafted tokens to verify, int64 [B].

    `chance` is [B, k]: of each drafted token, if those before it are right; row i has counts[i] of them. ms[n] is what
    an iteration with n drafted tokens takes; its length less one is the most that may be verified in all.
    """
    order, rates = _rates(chance, counts, ms)
    best = int(rates.argmax())
    if not best or rates[best] <= rates[0] * (1 + MARGIN):
        return np.zeros(len(chance), dtype=np.int64)
    return np.bincount(order[:best] // chance.shape[1], minlength=len(chance))


def best_gain(chance: Floats, counts: npt.NDArray[np.int32], ms: Floats) -> float:
    """Tokens per ms with the best number of drafted tokens, in those without any; arguments as of `best_lengths`."""
    _, rates = _rates(chance, counts, ms)
    return float(rates.max() / rates[0]) if len(chance) else 1.0


def _rates(chance: Floats, counts: npt.NDArray[np.int32], ms: Floats) -> tuple[Ints, Floats]:
    """Drafted tokens (their places in `chance`) by falling gain, and tokens per ms with the first n of them."""
    rows, width = chance.shape
    room = len(ms) - 1
    if rows == 0 or width == 0 or room <= 0:
        return np.empty(0, dtype=np.int64), np.array([rows / ms[0] if len(ms) else 0.0])
    there = np.arange(width)[None] < counts[:, None]
    # minimum, maximum and methods: np.clip and its like take several times as long for so few numbers.
    gains = (np.minimum(np.maximum(chance, 0.0), 1.0).cumprod(axis=1) * there).ravel()
    order = (-gains).argsort(kind="stable")[:room]  # of equal gains the earlier token first
    falling = gains[order]
    sums = np.concatenate([[0.0], falling.cumsum()])
    order = order[: np.count_nonzero(falling > 0)]
    return order, (rows + sums[: len(order) + 1]) / ms[: len(order) + 1]


class Acceptance:
    """How far each request's drafts have been right lately, by slot."""

    def __init__(self, slots: int) -> None:
        self._right = np.zeros(slots)
        self._hoped = np.zeros(slots)
        self._waited = np.zeros(slots, dtype=np.int64)  # iterations without a draft
        self._all = np.zeros(2)  # right and hoped for, over all requests

    @property
    def judged(self) -> float:
        """Right tokens that the estimates promised of those judged lately, over all requests: how much is known."""
        return float(self._all[1])

    def fade(self, most: float) -> None:
        """Let what is known over all requests count as that of `most` promised tokens, if it is more."""
        if self._all[1] > most:
            self._all *= most / self._all[1]

    def begin(self, slot: int) -> None:
        """A new request is in `slot`."""
        self._right[slot] = self._hoped[slot] = 0.0
        self._waited[slot] = 0

    def judge(self, slots: Ints, chance: Floats, drafted: Ints, accepted: Ints) -> None:
        """Row i had drafted[i] tokens of chances chance[i] verified, of which the first accepted[i] were right."""
        judged = np.minimum(accepted + 1, drafted)
        seen = np.arange(chance.shape[1])[None] < judged[:, None]
        fade = MEMORY**judged
        self._right[slots] = self._right[slots] * fade + accepted
        self._hoped[slots] = self._hoped[slots] * fade + (chance * seen).sum(axis=1)
        self._waited[slots] = np.where(drafted > 0, 0, self._waited[slots] + 1)
        # A request's memory of its last 1 / (1 - MEMORY) tokens, and the same many of each of them together.
        self._all *= MEMORY ** (float(judged.sum()) / max(1, len(slots)))
        self._all += (float(accepted.sum()), float((chance * seen).sum()))

    def wait(self, slots: Ints) -> None:
        """As `judge` of rows none of which had a draft."""
        self._waited[slots] += 1

    def ratio(self, slots: Ints) -> Floats:
        """What the drafter's estimates are to be multiplied with."""
        common = (self._all[0] + PRIOR) / (self._all[1] + PRIOR)
        found: Floats = (self._right[slots] + PRIOR * common) / (self._hoped[slots] + PRIOR)
        return found

    def is_due(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """Requests to be tried again."""
        found: npt.NDArray[np.bool_] = self._waited[slots] >= RETRY
        return found


def roofline(
    dense: float, experts: int, chosen: int, expert_bytes: float, kv_bytes_per_token: float, fixed: float = 0.0
) -> Cost:
    """Where nothing was measured: the bytes a rank must read, on a scale of its own.

    `dense` bytes always; of each layer's `experts` those that at least one of n tokens chooses, of expert_bytes in all
    when all are, 1 - (1 - chosen / experts)**n of them if tokens choose independently; and the KV of the requests.
    Tokens of one text choose alike, so that verifying costs less than this: a cautious guess. `fixed` is what takes its
    time whatever the number of tokens (launches, all-reduces), as bytes that could be read meanwhile.
    """

    def ms(requests: int, context: float, tokens: Ints) -> Floats:
        touched = 1.0 - (1.0 - chosen / experts) ** tokens.astype(np.float64)
        found: Floats = (fixed + dense + expert_bytes * touched + kv_bytes_per_token * requests * context) / 1e9
        return found

    return ms
