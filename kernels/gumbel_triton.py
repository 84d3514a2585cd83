"""Triton kernels of `moebius.kernels.gumbel`: Philox, Gumbel noise and argmax without leaving the registers.

A row is cut into tiles of `_GROUPS` groups of four indices, because one Philox call yields the four words of a group.
Each program takes a run of tiles of one row and leaves its best sum and index; a second kernel picks the best of a row.

Two logarithms an element cost more than everything else together, and nearly all of them belong to elements that cannot
win. Therefore a tile is first judged by an upper bound of its sums, which needs no logarithm, and is worked out only if
the bound exceeds the best sum so far: in a run of n tiles about ln(n) + 1 of them. The bound is applied before rounding
can matter (see `_noise_bound`), so the result is that of working out every element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GROUPS = 512  # a tile: 2,048 logits, 16 for each thread of 4 warps
_PROGRAMS = 2048  # wanted at least, about two waves on a GPU of 132 SMs; more would judge shorter runs of tiles
_MAX_SPLITS = 128  # programs of one row; the second kernel reads them at once
_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit
def philox_words(seed, position, group):
    """The four words (uint32, as `group`) of Philox4x32-10 for counter (group, position, 0, 0), key = seed halves.

    `seed` is int64, `position` and `group` are of 32 or 64 bits, of which the low 32 count. One 64-bit product yields
    both halves a round needs: a single instruction, where umulhi and a 32-bit product would be two.
    """
    c0 = group.to(tl.uint32)
    c1 = position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _noise(word):
    """The formula of `gumbel_noise` for 32 random bits: fp32, within 5e-6 of it."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)  # 2**-32, 1 - 2**-24
    # -log1p(-u) from log alone: 1 - u rounds to v, and (1 - v) - u is by how much; to first order log(1 - u) differs
    # from log(v) by that (over v, which is 1 where it matters: from u = 1/2 on nothing is rounded).
    v = 1.0 - u
    return -tl.log((u - (1.0 - v)) - tl.log(v))


@triton.jit
def _noise_bound(word):
    """A number no smaller than `_noise(word)`, at most 0.07 above -log(u).

    -log(-log1p(-u)) < -log(u), and log2(y) >= exponent + mantissa - 1, which the bits of y read as an integer give.
    Rounding is monotonic, so logit + bound is no smaller than logit + noise after rounding either; 0.001 is added for
    the few 1e-6 by which the terms here and the logarithms there are off.
    """
    bits = (word.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    return 110.21140154903236 - bits.to(tl.float32) * 8.262958294867817e-08  # (32 + 127) ln 2 + 0.001, ln 2 / 2**23


@triton.jit
def _take(best, where, logit, word, index):
    """Put logit + noise at `index` into the running best; equal sums leave what came first."""
    total = logit + _noise(word)
    total = tl.where(total != total, float("inf"), total)
    better = total > best
    return tl.where(better, total, best), tl.where(better, index, where)


@triton.jit(do_not_specialize=["tiles", "splits"])
def _partial_kernel(
    logits, row_stride, seeds, positions, values, indices, vocab, tiles, splits, groups: tl.constexpr
):  # fmt: skip
    """Best sum and its index over `tiles` tiles of a row: program (row, split) writes values, indices [row, split]."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    row_logits = logits + row * row_stride

    start = split * tiles
    stop = tl.minimum(start + tiles, tl.cdiv(vocab, 4 * groups))
    lanes = tl.arange(0, groups)
    best = tl.full([groups], float("-inf"), tl.float32)
    where = (start * groups + lanes) * 4  # a row of -inf alone yields an index of the row
    top = float("-inf")
    for tile in range(start, stop):
        group = tile * groups + lanes
        offsets = tile * groups * 4 + tl.arange(0, 4 * groups)
        tile_logits = tl.load(row_logits + offsets, mask=offsets < vocab, other=float("-inf"))
        even, odd = tl.split(tl.reshape(tile_logits, [groups, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        w0, w1, w2, w3 = philox_words(seed, position, group)

        b0, b1 = x0 + _noise_bound(w0), x1 + _noise_bound(w1)
        b2, b3 = x2 + _noise_bound(w2), x3 + _noise_bound(w3)
        # Negated, so that a NaN is worked out too.
        hopeless = (b0 <= top) & (b1 <= top) & (b2 <= top) & (b3 <= top)
        if tl.min(hopeless.to(tl.int32), axis=0) == 0:
            best, where = _take(best, where, x0, w0, group * 4)
            best, where = _take(best, where, x1, w1, group * 4 + 1)
            best, where = _take(best, where, x2, w2, group * 4 + 2)
            best, where = _take(best, where, x3, w3, group * 4 + 3)
            top = tl.max(best, axis=0)

    index = tl.min(tl.where(best == top, where, _NO_INDEX), axis=0)
    tl.store(values + row * splits + split, top)
    tl.store(indices + row * splits + split, index)


@triton.jit(do_not_specialize=["splits"])
def _final_kernel(values, indices, tokens, splits, width: tl.constexpr):
    """The index of a row's best partial sum, the lowest if several are equal."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, width)
    value = tl.load(values + row * splits + lanes, mask=lanes < splits, other=float("-inf"))
    index = tl.load(indices + row * splits + lanes, mask=lanes < splits, other=_NO_INDEX)
    token = tl.min(tl.where(value == tl.max(value, axis=0), index, _NO_INDEX), axis=0)
    tl.store(tokens + row, token.to(tl.int64))


def launch(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`gumbel_argmax` on the device of its arguments, which must have been checked: int64 [B]."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    all_tiles = triton.cdiv(vocab, 4 * _GROUPS)
    tiles = triton.cdiv(all_tiles, min(all_tiles, _MAX_SPLITS, triton.cdiv(_PROGRAMS, rows)))
    splits = triton.cdiv(all_tiles, tiles)
    values = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _partial_kernel[(rows, splits)](
            logits,
            logits.stride(0),
            seeds.contiguous(),
            positions.contiguous(),
            values,
            indices,
            vocab,
            tiles,
            splits,
            groups=_GROUPS,
            num_warps=4,
        )
        _final_kernel[(rows,)](values, indices, tokens, splits, width=_MAX_SPLITS, num_warps=1)
    return tokens
