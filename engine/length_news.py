"""What ranks tell each other about lengths: samples that ended or came, as numbers beside each iteration's counts.

The step loop sums one small tensor over all ranks per iteration. Where the policy learns lengths, that tensor is longer
by SLOTS numbers per rank: each rank writes into its own place and zeros elsewhere, so that the sum holds what all have
written, the same on all ranks, without another exchange. What finds no place waits for the next iteration.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moebius.engine.policy import Finished
from moebius.engine.types import SampleKey

SLOTS = 12  # numbers per rank and iteration

# A number holds, from the lowest bit: what happened (2 bits), tokens or samples (22), and the prompt (38).
_ENDED, _CUT, _CAME = 1, 2, 3
_KINDS, _TOKENS, _PROMPTS = 2, 22, 24


@dataclass(slots=True)
class Lengths:
    """What became known in one exchange: samples that ended, and prompts with how many samples of theirs came."""

    finished: list[Finished] = field(default_factory=list)
    came: dict[int, int] = field(default_factory=dict)

    def add(self, other: Lengths) -> None:
        """Append what became known later."""
        self.finished += other.finished
        self.came = merged([self.came, other.came]) or {}


def merged(groups: Iterable[Mapping[int, int] | None]) -> dict[int, int] | None:
    """Samples by prompt of all ranks; None where none counts them."""
    known = [group for group in groups if group is not None]
    total: Counter[int] = Counter()
    for group in known:
        total.update(group)
    return dict(total) if known else None


def prompt_id(key: SampleKey) -> int:
    """A number of 38 bits that samples of one prompt share, and those of prompts of near steps do not."""
    return ((key.step & 0x3FFF) << _PROMPTS) | (key.prompt & ((1 << _PROMPTS) - 1))


class LengthNews:
    """What this rank has to tell, and what all ranks have told."""

    def __init__(self, rank: int, ranks: int, slots: int = SLOTS) -> None:
        self._rank, self._ranks, self._slots = rank, ranks, slots
        self._waiting: deque[int] = deque()

    def came(self, key: SampleKey) -> None:
        """A sample joined the running step here."""
        number = _number(_CAME, prompt_id(key), 1)
        if self._waiting and self._same_prompt(self._waiting[-1], number):
            self._waiting[-1] += 1 << _KINDS  # samples of a prompt come together
        else:
            self._waiting.append(number)

    def ended(self, key: SampleKey, tokens: int, *, cut: bool) -> None:
        """A sample ended here with so many tokens; `cut`: it would have gone on."""
        self._waiting.append(_number(_CUT if cut else _ENDED, prompt_id(key), tokens))

    def numbers(self) -> list[int]:
        """What is summed over the ranks next: `slots` numbers per rank."""
        row = [0] * (self._ranks * self._slots)
        first = self._rank * self._slots
        for i in range(first, first + min(self._slots, len(self._waiting))):
            row[i] = self._waiting.popleft()
        return row

    def rest(self) -> list[int]:
        """What was never told; for the end of a step."""
        rest = list(self._waiting)
        self._waiting.clear()
        return rest

    @staticmethod
    def _same_prompt(a: int, b: int) -> bool:
        shift = _KINDS + _TOKENS
        return a & 3 == b & 3 == _CAME and a >> shift == b >> shift


def read(numbers: Sequence[int]) -> Lengths:
    """What numbers of all ranks say, in the order of ranks."""
    found = Lengths()
    for number in numbers:
        kind, prompt = number & 3, number >> (_KINDS + _TOKENS)
        count = (number >> _KINDS) & ((1 << _TOKENS) - 1)
        if kind == _CAME:
            found.came[prompt] = found.came.get(prompt, 0) + count
        elif kind:
            found.finished.append(Finished(prompt, count, kind == _ENDED))
    return found


def _number(kind: int, prompt: int, count: int) -> int:
    return (prompt << (_KINDS + _TOKENS)) | (min(count, (1 << _TOKENS) - 1) << _KINDS) | kind
