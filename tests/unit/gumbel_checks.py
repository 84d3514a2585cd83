"""What must hold of the Triton sampling kernel, on a GPU (called by its test) or in Triton's interpreter (a program).

`TRITON_INTERPRET=1 python gumbel_checks.py` runs all of it on CPU tensors. The variable counts when Triton is first
imported, hence the process of its own. Raises AssertionError if something does not hold.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from moebius.kernels import gumbel_triton
from moebius.kernels.noise import derive_seed, gumbel_noise, philox4x32

M32 = 0xFFFFFFFF
EDGE_WORDS = [0, 1, 2, 2**24 - 1, 2**24, 2**31 - 1, 2**31, M32 - 256, M32 - 128, M32 - 1, M32]
EDGE_SEEDS = [0, 1, -1, -(2**63), 2**63 - 1, M32, 1 << 32, -(1 << 32), 0x243F6A8885A308D3]
EDGE_POSITIONS = [0, 1, 2, 3, 2**31 - 1, 40_000, 7, 151_936, 65_536]


@triton.jit
def words_kernel(seeds, positions, words, groups, width: tl.constexpr):
    row = tl.program_id(0)
    group = tl.program_id(1) * width + tl.arange(0, width)
    mask = group < groups
    w0, w1, w2, w3 = gumbel_triton.philox_words(tl.load(seeds + row), tl.load(positions + row), group)
    at = words + (row * groups + group) * 4
    tl.store(at, w0.to(tl.int64), mask=mask)
    tl.store(at + 1, w1.to(tl.int64), mask=mask)
    tl.store(at + 2, w2.to(tl.int64), mask=mask)
    tl.store(at + 3, w3.to(tl.int64), mask=mask)


@triton.jit
def noise_kernel(words, noises, bounds, count, width: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, width)
    word = tl.load(words + at, mask=at < count, other=0).to(tl.uint32)
    tl.store(noises + at, gumbel_triton._noise(word), mask=at < count)
    tl.store(bounds + at, gumbel_triton._noise_bound(word), mask=at < count)


def rows_of(count: int, device: str, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions of `count` rows, the awkward ones first."""
    seeds = (EDGE_SEEDS + [derive_seed(5, 0, i, start) for i in range(count)])[:count]
    positions = (EDGE_POSITIONS + [(i * 37) % 4096 for i in range(count)])[:count]
    return torch.tensor(seeds, device=device), torch.tensor(positions, dtype=torch.int32, device=device)


def check_words(device: str, groups: int) -> None:
    """The random bits are those of the torch definition, for 32- and 64-bit positions."""
    seeds, positions = rows_of(len(EDGE_SEEDS) + 3, device)
    for wide in (positions, positions.long() + (5 << 32)):
        found = torch.zeros((len(seeds), groups, 4), dtype=torch.int64, device=device)
        words_kernel[(len(seeds), triton.cdiv(groups, 128))](seeds, wide, found, groups, width=128)
        index, zero = torch.arange(groups)[None], torch.zeros((1, 1), dtype=torch.int64)
        key = seeds.cpu()[:, None]
        wanted = philox4x32((index, positions.cpu().long()[:, None], zero, zero), (key & M32, (key >> 32) & M32))
        assert torch.equal(found.cpu(), torch.stack([w.expand(len(seeds), groups) for w in wanted], dim=-1))


def check_noise(device: str, count: int) -> None:
    """The noise follows from the bits by the torch formula, and the bound is above it but not by much."""
    random = torch.randint(0, 1 << 32, (count,), generator=torch.Generator().manual_seed(1))
    small = torch.randint(0, 1 << 12, (count,), generator=torch.Generator().manual_seed(2))
    words = torch.cat([torch.tensor(EDGE_WORDS), random, small, M32 - small])
    noises, bounds = (torch.empty(len(words), dtype=torch.float32, device=device) for _ in range(2))
    noise_kernel[(triton.cdiv(len(words), 256),)](words.to(device), noises, bounds, len(words), width=256)
    u = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-u))
    noises, bounds = noises.cpu().double(), bounds.cpu().double()
    assert ((noises - exact).abs() <= 5e-6).all(), f"noise is off by up to {(noises - exact).abs().max():.2g}"
    assert (bounds >= noises).all() and (bounds >= exact + 5e-4).all()
    assert (bounds <= -torch.log(u) + 0.07).all(), "the bound is too loose to save work"


def compare(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, slack: float) -> int:
    """Draw with the kernel and by definition; returns how many rows differ, none of them by more than `slack`."""
    before = logits.clone()
    found = gumbel_triton.launch(logits, seeds, positions)
    assert found.dtype == torch.int64 and found.shape == seeds.shape and found.device == logits.device
    assert torch.equal(logits, before)
    sums = logits + gumbel_noise(seeds, positions, logits.shape[1])
    wanted = sums.argmax(dim=-1)
    assert ((found >= 0) & (found < logits.shape[1])).all()
    gap = (sums.gather(1, wanted[:, None]) - sums.gather(1, found[:, None]))[:, 0]
    differs = found != wanted
    assert (gap[differs] <= slack).all(), f"tokens {found[differs].tolist()} lose by {gap[differs].tolist()}"
    return int(differs.sum())


def logits_of(rows: int, vocab: int, device: str, spread: float = 3.0, padding: int = 0) -> torch.Tensor:
    """Normal logits; with `padding`, rows of a wider tensor whose rest is large enough to win if it were read."""
    whole = torch.full((rows, vocab + padding), 1e9)
    whole[:, :vocab] = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(rows + vocab)) * spread
    return whole.to(device)[:, :vocab]


def check_shapes(device: str, rows: list[int], vocabs: list[int], slack: float) -> tuple[int, int]:
    """Every number of rows with every vocabulary, dense and as part of wider rows. Returns (differing, all) rows."""
    differing = total = 0
    for count in rows:
        seeds, positions = rows_of(count, device, start=count)
        for vocab in vocabs:
            for padding, spread in ((0, 3.0), (3, 0.1), (64, 12.0)):
                logits = logits_of(count, vocab, device, spread, padding)
                differing += compare(logits, seeds, positions.long() if padding else positions, slack)
                total += count
    return differing, total


def check_masks(device: str, vocab: int) -> None:
    """Masked entries never win, one candidate always does, ties go to the lowest index, NaN stays in range."""
    rows = 6
    seeds, positions = rows_of(rows, device)
    lonely = torch.full((rows, vocab), -math.inf, device=device)
    keep = torch.tensor([0, vocab - 1, vocab // 2, 3, 5, vocab - 2], device=device)
    lonely.scatter_(1, keep[:, None], -1e30)
    assert torch.equal(gumbel_triton.launch(lonely, seeds, positions), keep)

    masked = logits_of(rows, vocab, device)
    masked[:, torch.arange(vocab, device=device) % 7 != 3] = -math.inf
    compare(masked, seeds, positions, 1e-4)
    assert (gumbel_triton.launch(masked, seeds, positions) % 7 == 3).all()

    tied = torch.zeros((rows, vocab), device=device)  # 1e30 swallows the noise: all of these are equal
    tied[:, [vocab - 1, vocab // 2 + 1, vocab // 2, vocab // 3]] = 1e30
    assert (gumbel_triton.launch(tied, seeds, positions) == vocab // 3).all()
    tied[:] = -1e30
    assert (gumbel_triton.launch(tied, seeds, positions) == 0).all()
    assert (gumbel_triton.launch(torch.full_like(tied, -math.inf), seeds, positions) == 0).all()

    broken = logits_of(rows, vocab, device)
    broken[0] = math.nan
    broken[1, vocab // 2] = math.nan
    broken[2, vocab - 1] = math.inf
    broken[3, : vocab - 1] = -math.inf
    broken[3, vocab - 1] = math.nan
    found = gumbel_triton.launch(broken, seeds, positions)
    assert found[:4].tolist() == [0, vocab // 2, vocab - 1, vocab - 1]


def check_sorted(device: str, vocab: int) -> None:
    """Ascending and descending logits: every tile, or only the first, may hold the winner."""
    seeds, positions = rows_of(3, device)
    rising = torch.linspace(-40, 40, vocab, device=device).repeat(3, 1)
    for logits in (rising, rising.flip(1), rising * 1e4, torch.zeros_like(rising)):
        last_place = float(logits.abs().max()) * 2.0**-23
        compare(logits, seeds, positions, 1e-4 + 2 * last_place)


if __name__ == "__main__":
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(gumbel_triton._partial_kernel, InterpretedFunction), "set TRITON_INTERPRET=1"
    check_words("cpu", 140)
    check_noise("cpu", 5_000)
    for programs, vocabs in (
        (1, [7, 10_004]),
        (27, [8191]),
        (2048, [1, 2, 2048, 6001]),
    ):  # tiles a program: all, some, 1
        gumbel_triton._PROGRAMS = programs
        differing, total = check_shapes("cpu", [1, len(EDGE_SEEDS) + 1], vocabs, 1e-4)
        assert differing == 0, f"{differing} of {total} rows differ"
    for programs in (1, 2048):
        gumbel_triton._PROGRAMS = programs
        check_masks("cpu", 5001)
        check_sorted("cpu", 8192)
    assert gumbel_triton.launch(torch.empty((0, 8)), *rows_of(0, "cpu")).shape == (0,)
    print("all hold")
