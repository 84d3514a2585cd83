"""What benchmarks.draft_sources counts, with drafts that are known; and our own ring on repeated text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import draft_sources
from benchmarks.draft_sources import MODES, Ring, Sample, Tokens, replay


class Fixed:
    """Drafts the truth for two tokens, and then something else."""

    def __init__(self, live: list[Sample]) -> None:
        self.live = {sample.name: sample for sample in live}
        self.calls: list[list[int]] = []

    def begin(self, finished: list[Sample], live: list[Sample], at: int) -> None:
        assert [len(sample.output) for sample in finished] == [3, 4]
        self.names, self.known = [sample.name for sample in live], [at] * len(live)

    def draft(self, new: list[Tokens], rows: list[int], limits: list[int]) -> list[list[int]]:
        self.calls.append(rows)
        found = []
        for row, tokens, limit in zip(rows, new, limits, strict=True):
            output = self.live[self.names[row]].output
            assert tokens.tolist() == output[self.known[row] : self.known[row] + len(tokens)].tolist()
            self.known[row] += len(tokens)
            assert limit == len(output) - self.known[row] - 1
            found.append([*output[self.known[row] :][:2].tolist(), 99][:limit])
        return found


def sample(name: str, length: int) -> Sample:
    return Sample(name, np.array([1, 2], dtype=np.int32), np.arange(10, 10 + length, dtype=np.int32))


def test_a_tail_is_replayed_to_its_end() -> None:
    live = [sample("a", 11), sample("b", 8)]
    source = Fixed(live)
    numbers = replay(source, [sample("c", 3), live[0], sample("d", 4), live[1]], 2)
    # From 4 tokens on: three more for both; three for a, and b's last; a's last. There is no draft for a last token.
    assert source.calls == [[0, 1], [0, 1], [1]]
    assert numbers["tokens_per_iteration"] == pytest.approx(11 / 5)
    assert numbers["right_pct"] == pytest.approx(100 * 6 / 9)


@pytest.mark.parametrize("mode", MODES)
def test_text_that_repeats_is_foreseen(mode: str) -> None:
    output = np.tile(np.arange(20, 30, dtype=np.int32), 6)
    short, long = (Sample(name, np.array([1, 2], dtype=np.int32), output[:n]) for name, n in (("s", 20), ("l", 60)))
    assert replay(Ring(mode, 5), [short, long], 1)["tokens_per_iteration"] > 5


def test_it_says_that_the_other_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_sources, "_has_arctic", lambda: False)
    words = ["draft_sources", "--prompts", "2", "--batches", "3", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    draft_sources.main()
    written = json.loads((tmp_path / "draft_sources_cpu.json").read_text())
    assert written["notes"] == ["arctic-inference is not installed, and left out"]
    assert written["results"]["siblings_3_tokens_per_iteration"] > 1
    assert not [name for name in written["results"] if name.startswith("arctic")]
