"""The Triton sampling kernel on a GPU: exact words, tokens of the definition, and draws from the distribution."""

from __future__ import annotations

import math

import pytest
import torch

from moebius.kernels.gumbel import gumbel_argmax
from moebius.kernels.noise import derive_seed

pytestmark = pytest.mark.gpu

VOCAB = 151_936
SLACK = 1e-4  # sums nearer than this may be told apart differently by logarithms of another last place


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    pytest.importorskip("triton")


def test_words_and_noise() -> None:
    from tests.unit import gumbel_checks

    gumbel_checks.check_words("cuda", VOCAB // 4)
    gumbel_checks.check_noise("cuda", 1_000_000)


def test_tokens_equal_the_definition() -> None:
    """Up to 300 rows of full width, of a width that four does not divide, and of small ones."""
    from tests.unit import gumbel_checks

    differing, total = gumbel_checks.check_shapes("cuda", [1, 2, 33, 300], [1, 5, 2048, 32_003, VOCAB], SLACK)
    assert differing <= total // 500, f"{differing} of {total} rows differ, too many for near ties"


def test_many_rows() -> None:
    """2,048 rows at once give what parts of them give: each program then judges long runs of tiles."""
    from tests.unit import gumbel_checks

    seeds, positions = gumbel_checks.rows_of(2048, "cuda")
    logits = torch.randn((2048, VOCAB), device="cuda") * 3
    whole = gumbel_argmax(logits, seeds, positions)
    for start in range(0, 2048, 256):
        part = slice(start, start + 256)
        assert torch.equal(gumbel_argmax(logits[part], seeds[part], positions[part]), whole[part])
        gumbel_checks.compare(logits[part], seeds[part], positions[part], SLACK)
    assert torch.equal(gumbel_argmax(logits[1234:1235], seeds[1234:1235], positions[1234:1235]), whole[1234:1235])


def test_masks_ties_and_nan() -> None:
    from tests.unit import gumbel_checks

    for vocab in (VOCAB, 32_003):
        gumbel_checks.check_masks("cuda", vocab)
        gumbel_checks.check_sorted("cuda", vocab)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over nine tokens at the start and end of a wide row; z beyond 4.9 has a probability below 1e-6."""
    few = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, 2.5, -2.0, 1.5, 0.5])
    at = torch.tensor([0, 1, 2, 3, 4, 2047, 2048, 8190, 8191])
    draws, rounds = 4096, 25
    logits = torch.full((1, 8192), -math.inf)
    logits[0, at] = few
    wide = logits.cuda().expand(draws, -1)
    seeds = torch.full((draws,), derive_seed(0, 0, 0, 0), device="cuda")
    counts = torch.zeros(8192, dtype=torch.int64)
    for step in range(rounds):
        positions = torch.arange(draws, device="cuda") + step * draws
        counts += torch.bincount(gumbel_argmax(wide, seeds, positions), minlength=8192).cpu()
    assert counts.sum() == draws * rounds == counts[at].sum()
    expected = few.double().softmax(0) * draws * rounds
    statistic, freedom = ((counts[at] - expected) ** 2 / expected).sum().item(), len(at) - 1
    spread = 2 / (9 * freedom)  # Wilson and Hilferty 1931
    assert abs(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)) < 4.9


def test_draws_do_not_wait_for_the_device() -> None:
    """torch raises where a call would synchronise."""
    from tests.unit import gumbel_checks

    seeds, positions = gumbel_checks.rows_of(8, "cuda")
    logits = torch.randn((8, VOCAB), device="cuda")
    gumbel_argmax(logits, seeds, positions)  # compiled and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gumbel_argmax(logits, seeds, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_go_to_the_device() -> None:
    """Those of numpy, too, and more copies than one block of pinned memory holds are on their way at once."""
    import numpy as np

    from moebius.engine.sampler import to_device

    device = torch.device("cuda")
    for numbers in ([3, 1 << 62], [], np.arange(12, dtype=np.int32).reshape(3, 4).T, np.flatnonzero(np.zeros(4))):
        found = to_device(numbers, device)
        assert found.is_cuda and found.tolist() == np.asarray(numbers).tolist()
    many = [to_device(np.full(5000, i), device) for i in range(64)]
    assert all((numbers == i).all() for i, numbers in enumerate(many))
