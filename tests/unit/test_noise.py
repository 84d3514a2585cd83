"""The noise is Philox, has the right distribution, and depends on nothing but seed, position and index.

The statistical tests run on fixed seeds, so they give the same answer every time. Each would reject a perfect generator
with probability 1e-6 or less (z beyond 4.9) had the seeds been drawn at random.
"""

from __future__ import annotations

import math

import pytest
import torch

from moebius.kernels import noise as noise_module
from moebius.kernels.noise import derive_seed, gumbel_noise, philox4x32

Z_LIMIT = 4.9
M32 = 0xFFFFFFFF

# tests/kat_vectors of Random123, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The published round function on Python integers."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & M32, (p >> 32) ^ d ^ k1, p & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return [a, b, c, d]


def seeds_of(count: int, start: int = 0) -> torch.Tensor:
    return torch.tensor([derive_seed(1, 0, i, 0) for i in range(start, start + count)], dtype=torch.int64)


def uniform(noise: torch.Tensor) -> torch.Tensor:
    """u in (0, 1) that the noise was made of."""
    return -torch.expm1(-torch.exp(-noise.double()))


def chi_square_z(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square statistic as a standard normal deviate (Wilson and Hilferty 1931)."""
    freedom = observed.numel() - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def test_known_answers() -> None:
    rows = [[int(word, 16) for word in line.split()] for line in KNOWN_ANSWERS]
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    result = philox4x32((columns[0], columns[1], columns[2], columns[3]), (columns[4], columns[5]))
    for found, wanted in zip(result, columns[6:], strict=True):
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x123456789ABCDEF, -5])
def test_seed_position_and_index_go_where_they_should(seed: int) -> None:
    position, vocab = 70_001, 11
    found = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab)[0].tolist()
    for index, value in enumerate(found):
        words = philox_by_hand([index // 4, position, 0, 0], [seed & M32, (seed >> 32) & M32])
        u = (words[index % 4] + 0.5) / 2**32
        assert value == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("vocab", [1, 3, 509, 512, 1000])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    seeds, positions = seeds_of(64), torch.arange(64) * 37
    whole = gumbel_noise(seeds, positions, vocab)
    assert whole.shape == (64, vocab)
    assert whole.dtype == torch.float32
    assert whole.is_contiguous()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], vocab), whole[order])
    for size in (1, 2, 7, 33):
        for start in range(0, 64 - size, 9):
            part = slice(start, start + size)
            assert torch.equal(gumbel_noise(seeds[part], positions[part], vocab), whole[part])


def test_a_larger_vocabulary_only_appends() -> None:
    seeds, positions = seeds_of(5), torch.arange(5)
    assert torch.equal(gumbel_noise(seeds, positions, 1003)[:, :510], gumbel_noise(seeds, positions, 510))


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(value: int) -> float:
        word = torch.full((1, 1), value)
        monkeypatch.setattr(noise_module, "philox4x32", lambda counter, key: (word,) * 4)
        return gumbel_noise(torch.tensor([0]), torch.tensor([0]), 1).item()

    assert constant(0) == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), rel=1e-6)  # 22.87
    assert constant(M32) == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)  # -2.81, float32's last below 1
    assert constant(1) < constant(0)
    assert constant(M32) < constant(M32 - 2**10)


def test_uniform_and_gumbel_moments() -> None:
    noise = gumbel_noise(seeds_of(256), torch.arange(256) % 16, 4096)
    count = noise.numel()
    for lane in range(4):
        u = uniform(noise[:, lane::4])
        bins = torch.histc(u, bins=256, min=0, max=1)
        assert abs(chi_square_z(bins, torch.full_like(bins, count / 4 / 256))) < Z_LIMIT
    values = noise.double()
    euler, variance = 0.5772156649015329, math.pi**2 / 6
    assert abs(values.mean().item() - euler) < Z_LIMIT * math.sqrt(variance / count)
    # Fourth central moment of a Gumbel: 27/5 of the squared variance (excess kurtosis 12/5).
    assert abs(values.var().item() - variance) < Z_LIMIT * variance * math.sqrt(4.4 / count)
    # The tail that decides an argmax: P(noise > 8) = 1 - exp(-exp(-8)).
    tail = -math.expm1(-math.exp(-8))
    assert abs((values > 8).sum().item() - count * tail) < Z_LIMIT * math.sqrt(count * tail)


@pytest.mark.parametrize("neighbour", ["position", "seed", "seed_high", "index", "group", "row"])
def test_neighbours_are_independent(neighbour: str) -> None:
    """Joint counts of 16 x 16 cells for values whose keys or counters differ in one small step."""
    seeds, positions, vocab = torch.arange(1000, 1256), torch.arange(256) % 32, 1024
    base = gumbel_noise(seeds, positions, vocab)
    groups = base.view(256, -1, 4)
    pairs = {  # without overlap, so that the pairs are independent of each other
        "position": lambda: (base, gumbel_noise(seeds, positions + 32, vocab)),
        "seed": lambda: (base, gumbel_noise(seeds + 256, positions, vocab)),
        "seed_high": lambda: (base, gumbel_noise(seeds + (1 << 32), positions, vocab)),
        "index": lambda: (base[:, ::2], base[:, 1::2]),
        "group": lambda: (groups[:, ::2], groups[:, 1::2]),
        "row": lambda: (base[::2], base[1::2]),
    }
    a, b = pairs[neighbour]()
    cells = (uniform(a) * 16).long().clamp_(max=15) * 16 + (uniform(b) * 16).long().clamp_(max=15)
    counts = torch.bincount(cells.flatten(), minlength=256).double()
    assert abs(chi_square_z(counts, torch.full_like(counts, cells.numel() / 256))) < Z_LIMIT


def test_argmax_draws_from_the_distribution() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, 2.5, -2.0, 1.5, 0.5])
    draws = 100_000
    seeds = torch.full((draws,), derive_seed(0, 0, 0, 0))  # one sample, one position after the other
    tokens = (gumbel_noise(seeds, torch.arange(draws), logits.numel()) + logits).argmax(dim=-1)
    counts = torch.bincount(tokens, minlength=logits.numel()).double()
    assert abs(chi_square_z(counts, logits.double().softmax(0) * draws)) < Z_LIMIT


def test_bad_arguments_are_refused() -> None:
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for seeds, positions, vocab in ((one, two, 4), (one[None], one[None], 4), (one, one, 0)):
        with pytest.raises(ValueError, match="1-D seeds"):
            gumbel_noise(seeds, positions, vocab)


def test_an_empty_batch_gives_an_empty_result() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert gumbel_noise(empty, empty, 8).shape == (0, 8)


def test_a_million_derived_seeds_differ() -> None:
    seeds = {derive_seed(s, t, p, i) for s in range(10) for t in range(10) for p in range(100) for i in range(100)}
    assert len(seeds) == 1_000_000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_derived_seeds_tell_their_parts_apart_and_stay_the_same() -> None:
    assert len({derive_seed(*key) for key in ((1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3), (-1, 2, 3, 4))}) == 4
    assert derive_seed(1, 2, 3, 4) == 5100016604338185296  # recorded runs replay only while this holds
    with pytest.raises(ValueError, match="64-bit"):
        derive_seed(2**63, 0, 0, 0)
