"""Gumbel-max sampling in one pass over the logits: the noise of `moebius.kernels.noise` without a tensor of it.

On CUDA the noise is made in registers (`moebius.kernels.gumbel_triton`), so that a draw reads every logit once and
writes a token per row. On CPU it is plain torch; Triton is imported with the first CUDA call only.
"""

from __future__ import annotations

import torch

from moebius.kernels.noise import gumbel_noise


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row, drawn from softmax(logits): int64 [B], the argmax over v of logits[b, v] + noise[b, v].

    `logits` is fp32 [B, V] with any row stride and contiguous rows; it is not changed. The noise is
    `gumbel_noise(seeds, positions, V)`, with `seeds` int64 [B] and `positions` int32 or int64 [B] on the device of the
    logits. Ties go to the lowest index. Entries of -inf never win unless the row has nothing else (then token 0); a row
    with NaN yields the index of one or of a +inf. Does not wait for the device or allocate by values.

    Random bits are the same on every device; logarithms may differ in the last place, so two devices can disagree where
    the best two sums lie within about 1e-5. Raises ValueError for tensors of other shape, type or device.
    """
    _check(logits, seeds, positions)
    if logits.is_cuda:
        from moebius.kernels.gumbel_triton import launch

        return launch(logits, seeds, positions)
    return (logits + gumbel_noise(seeds, positions, logits.shape[1])).argmax(dim=-1)


def _check(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] < 1 or logits.stride(1) != 1:
        raise ValueError(
            "logits must be fp32 [rows, vocab] with contiguous rows, "
            f"got {logits.dtype} {tuple(logits.shape)} of strides {logits.stride()}"
        )
    wanted = (logits.shape[0],)
    if tuple(seeds.shape) != wanted or tuple(positions.shape) != wanted:
        raise ValueError(
            f"need one seed and one position for each of {wanted[0]} rows, "
            f"got shapes {tuple(seeds.shape)} and {tuple(positions.shape)}"
        )
    if seeds.dtype != torch.int64 or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"seeds must be int64 and positions int32 or int64, got {seeds.dtype} and {positions.dtype}")
    if seeds.device != logits.device or positions.device != logits.device:
        raise ValueError(
            f"seeds ({seeds.device}) and positions ({positions.device}) must be on the logits' device {logits.device}"
        )
