"""Sums and gathers between CPU ranks of one machine, against the result that each rank computes alone."""

import time

import pytest
import torch

from aerie.workers.distributed import shared_memory
from aerie.workers.distributed.shared_memory import SLOT_BYTES, Peer, RankEndedError, why_not
from aerie.workers.distributed.tp_group import join_tp_group
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
LARGE = SLOT_BYTES // 4 * 2 + 37  # numbers of 32 bits: three pieces, the last one short
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32)


PROBLEM = shared_memory._problem()
supported = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, of 16 bits in float32."""
    wide = torch.float32 if parts[0].dtype == torch.bfloat16 else parts[0].dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _collectives(rank: int, size: int, address: str) -> int:
    """Every sum and gather is checked by every rank; how many there were."""
    group = join_tp_group(rank, size, address, CPU)
    assert group.shared is not None, "these ranks share a machine"
    count = 0
    for seed, shape in enumerate([(1, 512), (4, 7), (0, 3), (LARGE,), (3, 5, 2), (SLOT_BYTES // 4,)]):
        for dtype in DTYPES:
            parts = [given(other, shape, dtype, seed) for other in range(size)]
            assert torch.equal(group.all_gather(parts[rank]), torch.stack(parts))
            assert torch.equal(group.all_reduce(parts[rank].clone()), summed(parts))
            count += 2
    return count


@supported
@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_are_those_of_all_ranks(size: int) -> None:
    assert set(run_ranks(_collectives, size, environments=[LOOPBACK] * size)) == {48}


def _many(rank: int, size: int, address: str) -> str:
    """Ranks that come early and late in turns: nobody reads what is of another turn."""
    group, generator = join_tp_group(rank, size, address, CPU), torch.Generator().manual_seed(rank)
    x = torch.empty(1000)
    for turn in range(2000):
        if int(torch.randint(0, 50, (), generator=generator)) == 0:
            time.sleep(0.001)
        x.fill_(float(turn * (rank + 1)))
        group.all_reduce(x)
        assert bool((x == float(turn * size * (size + 1) // 2)).all()), turn
    return "all right"


@supported
def test_two_thousand_turns_of_ranks_that_come_early_and_late() -> None:
    assert run_ranks(_many, 2, environments=[LOOPBACK] * 2) == ["all right"] * 2


def _alone(rank: int, size: int, address: str, stays_s: float) -> tuple[str, float]:
    """Rank 1 ends, or comes late; what rank 0 hears, and after how many seconds."""
    group = join_tp_group(rank, size, address, CPU)
    group.all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(stays_s)
        return "", 0.0
    begun_s = time.monotonic()
    assert group.shared is not None
    group.shared._wait_limit_s = 0.5
    with pytest.raises(RankEndedError) as raised:
        group.all_reduce(torch.ones(3))
    return str(raised.value), time.monotonic() - begun_s


@supported
@pytest.mark.parametrize("stays_s,told", [(0.0, "rank 1 has ended"), (2.5, "rank 1 did not come within 0.5 s")])
def test_nobody_waits_for_a_rank_that_does_not_come(stays_s: float, told: str) -> None:
    (message, waited_s), _ = run_ranks(_alone, 2, stays_s, environments=[LOOPBACK] * 2)
    assert message == told and waited_s < 30


def test_who_can_share_memory() -> None:
    here = Peer("machine", 7, 3, "")
    assert why_not([here, here]) == ""
    assert "several machines" in why_not([here, Peer("other", 7, 3, "")])
    assert why_not([here, Peer("", 8, -1, "no x86")]) == "rank 1: no x86"
    assert "65 ranks" in why_not([here] * 65)


def _on_two_machines(rank: int, size: int, address: str) -> tuple[bool, float]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shared_memory, "_machine", lambda: "another")
        group = join_tp_group(rank, size, address, CPU)
    return group.shared is None, float(group.all_reduce(torch.ones(1) * (rank + 1)).item())


def test_ranks_of_two_machines_go_through_gloo() -> None:
    assert run_ranks(_on_two_machines, 2, environments=[LOOPBACK] * 2) == [(True, 3.0)] * 2
