"""Sums over ranks in rank order, whatever their size: ranks are processes that talk over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from aerie.workers.distributed.custom_all_reduce import ORDERED_LIMITS, Method, choose
from aerie.workers.distributed.tp_group import GATHERED_BYTES, TPGroup, ordered_all_reduce
from tests.support.ranks import run_ranks
from tests.support.slow import slow

SHARED = GATHERED_BYTES // 2  # numbers of bfloat16 up to which every rank gets all parts
COUNTS = (0, 1, 70, SHARED, SHARED + 1, 3 * SHARED + 5, 8 * SHARED)
TERMS = torch.tensor([2.0**24, 1.0, -(2.0**24), 3.0, 2.0**-3])


def parts_of(size: int, count: int, dtype: torch.dtype) -> Tensor:
    """Every rank's part [size, count], whose sum depends on the order."""
    return TERMS[(torch.arange(size)[:, None] * 2 + torch.arange(count)) % 5].to(dtype)


def in_rank_order(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def sums_of_one_rank(rank: int, size: int, address: str) -> list[bool]:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world is not None
    group = TPGroup(rank, size, world, ordered=True)
    right = []
    for dtype in (torch.bfloat16, torch.float32):
        for count in COUNTS:
            parts = parts_of(size, count, dtype)
            x = parts[rank].clone().view(1, count)
            right.append(torch.equal(group.all_reduce(x)[0], in_rank_order(parts)))
    normed = group.all_reduce_add_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 1e-5)
    dist.destroy_process_group()
    return [*right, normed is None]


@pytest.mark.parametrize("size", [3, *slow(2, 4, 8)])
def test_sums_are_in_rank_order_for_every_size(size: int) -> None:
    parts = parts_of(size, 70, torch.bfloat16)
    assert size == 2 or not torch.equal(in_rank_order(parts), in_rank_order(parts.flip(0))), "the order matters"
    for right in run_ranks(sums_of_one_rank, size, deadline_s=100):
        assert all(right), right


def test_no_method_between_gpus_leaves_the_order_to_a_library() -> None:
    for ranks, limits in ORDERED_LIMITS.items():
        for rows in (1, 4, 64, 112, 113, 4096):
            for width in (896, 4096, 8192):
                assert choose(limits, ranks, rows, width, torch.bfloat16) is not Method.TWO_SHOT


def test_a_message_of_no_numbers_needs_no_ranks() -> None:
    class Nobody:
        def size(self) -> int:
            return 4

    ordered_all_reduce(torch.empty(0, 8), Nobody())  # type: ignore[arg-type]
