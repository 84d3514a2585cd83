"""Sampling noise as a function of (seed, token position, vocabulary index): no state to move, the same in every layout.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in plain torch
integer arithmetic, so that one definition serves CPU and GPU. The random bits are the same on both; the logarithms that
turn them into noise may differ in the last place between devices.
"""

from __future__ import annotations

import hashlib
import struct

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds of Philox4x32.

    Takes and returns 32-bit words in int64 tensors (values 0 .. 2**32 - 1). Shapes broadcast, which keeps the first
    rounds cheap when the words vary along different axes.
    """
    c0, c1, c2, c3 = counter
    keys = zip(_key_schedule(key[0], _WEYL[0]), _key_schedule(key[1], _WEYL[1]), strict=True)
    for k0, k1 in keys:
        # The int64 product wraps, but its 64 bits are those of the unsigned product. c1 and c3 keep their upper halves:
        # they are only xored, and the mask after that clears them.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0 = _high(p1, c1 ^ k0)
        c2 = _high(p0, c3 ^ k1)
        c1, c3 = p1, p0
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise for B rows: float32 [B, vocab] on the device of `seeds`.

    Row b depends on seeds[b] (int64, 64 bits used) and positions[b] (int64, the low 32 bits used) only, never on the
    other rows. Adding it to log-probabilities and taking the argmax draws from the distribution.

    Key = the two halves of the seed, counter = (index // 4, position, 0, 0), lane = index % 4. With x the lane's 32
    bits, u = (x + 1/2) / 2**32 and noise = -log(-log1p(-u)): the large values, which decide an argmax, come from u near
    0, where float32 is dense, and reach 22.9. Raises ValueError if the shapes differ or vocab < 1.
    """
    if seeds.dim() != 1 or seeds.shape != positions.shape or vocab < 1:
        raise ValueError(
            f"need 1-D seeds and positions of one length and vocab >= 1, got {seeds.shape}, {positions.shape}, {vocab}"
        )
    rows, groups = seeds.shape[0], -(-vocab // 4)
    index = torch.arange(groups, dtype=torch.int64, device=seeds.device)[None]
    seeds, positions = seeds.long()[:, None], positions.long()[:, None]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seeds.device)
    words = philox4x32((index, positions & _MASK, zero, zero), (seeds & _MASK, (seeds >> 32) & _MASK))
    noise = torch.empty((rows, groups, 4), dtype=torch.float32, device=seeds.device)
    for lane, word in enumerate(words):
        noise[..., lane] = word
    # From here on -u; the clamp keeps the value that rounds to -1 in float32 off log1p's pole.
    noise.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-(1 - 2.0**-24))
    noise.log1p_().neg_().log_().neg_()
    flat = noise.view(rows, groups * 4)
    return flat if groups * 4 == vocab else flat[:, :vocab].contiguous()


def derive_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """A sample's own 63-bit seed from the run's seed, the rollout step and the sample's place in it.

    BLAKE2b of the four numbers, so that neighbouring keys have unrelated seeds: among a million samples the chance of
    any two sharing one is 5e-8. Raises ValueError for a number outside 64 bits.
    """
    try:
        packed = struct.pack("<4q", seed, step, prompt, sample)
    except struct.error as error:
        raise ValueError(f"seed parts must be 64-bit integers, got {(seed, step, prompt, sample)}") from error
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"moebius-seed").digest(), "little") >> 1


def _key_schedule(word: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
    """One key word for each round; made in one go because rows are few and every torch call costs microseconds."""
    rounds = torch.arange(_ROUNDS, dtype=torch.int64, device=word.device).view(-1, *[1] * word.dim())
    return ((word + rounds * step) & _MASK).unbind()


def _high(product: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Upper 32 bits of a 64-bit product, xored with `other` (whose own upper bits are dropped)."""
    high = product >> 32
    if high.shape == torch.broadcast_shapes(high.shape, other.shape):
        return high.bitwise_xor_(other).bitwise_and_(_MASK)
    return (high ^ other).bitwise_and_(_MASK)
