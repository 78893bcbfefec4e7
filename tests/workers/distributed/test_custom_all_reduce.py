"""Which all-reduce runs, and that groups without peer memory do without."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.workers.distributed import custom_all_reduce
from aerie.workers.distributed.custom_all_reduce import (
    LIMITS,
    MAX_ROWS,
    CustomAllReduce,
    Limits,
    Method,
    Peer,
    choose,
    region_bytes,
    why_not,
)
from aerie.workers.distributed.tp_group import SOLO, TPGroup, join_tp_group
from aerie.workers.layers.linear import RowParallelLinear, finish_weights
from aerie.workers.layers.norm import RMSNorm, ZeroCentredRMSNorm
from aerie.workers.layers.weighted import WeightKey
from tests.support.ranks import RankError, run_ranks

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "ranks,rows,width,dtype,expected",
    [
        (2, 1, 8192, BF16, Method.ONE_SHOT),
        (2, 16, 8192, BF16, Method.ONE_SHOT),
        (2, 64, 8192, BF16, Method.ONE_SHOT),
        (2, 65, 8192, BF16, Method.TWO_SHOT),
        (2, 4, 8192, torch.float16, Method.ONE_SHOT),
        (2, 65, 8192, torch.float16, Method.NCCL),  # the operators know no float16
        (2, 1, 8192, FP32, Method.TWO_SHOT),
        (2, 512, 8192, BF16, Method.TWO_SHOT),
        (2, 1025, 8192, BF16, Method.NCCL),
        (2, 1, 16384, BF16, Method.ONE_SHOT),
        (4, 1, 16384, BF16, Method.TWO_SHOT),  # more words than a program's registers hold
        (2, 1, 4095, BF16, Method.NCCL),  # neither pairs nor 16 bytes
        (2, 112, 896, BF16, Method.ONE_SHOT),
        (2, 113, 896, BF16, Method.TWO_SHOT),  # more programs than multiprocessors
        (4, 16, 8192, BF16, Method.ONE_SHOT),
        (4, 17, 8192, BF16, Method.TWO_SHOT),
        (2, 0, 8192, BF16, Method.NCCL),
    ],
)
def test_shape_and_type_choose_the_method(
    ranks: int, rows: int, width: int, dtype: torch.dtype, expected: Method
) -> None:
    assert choose(LIMITS[ranks], ranks, rows, width, dtype) is expected


def regions(limits: Limits, ranks: int) -> list[Tensor]:
    return [torch.zeros(region_bytes(limits, ranks), dtype=torch.uint8) for _ in range(ranks)]


def test_an_inbox_serves_one_width() -> None:
    limits = Limits(one_shot=4096, two_shot=8192)
    peers = CustomAllReduce(0, limits, regions(limits, 2), "")
    assert peers.method(2, 512, BF16) is Method.ONE_SHOT
    peers._inbox = torch.zeros((2, 4, 2, 256), dtype=torch.int64)
    assert peers.method(2, 512, BF16) is Method.ONE_SHOT
    assert peers.method(2, 256, BF16) is Method.TWO_SHOT


@pytest.mark.parametrize("norm", [RMSNorm, ZeroCentredRMSNorm])
def test_the_norm_after_a_sum_is_of_the_same_launch(norm: type[RMSNorm], monkeypatch: pytest.MonkeyPatch) -> None:
    """For weights of the model's type and for those of hybrids, in float32."""
    limits = Limits(one_shot=4096, two_shot=8192)
    peers = CustomAllReduce(0, limits, regions(limits, 2), "")
    launched: list[Any] = []
    monkeypatch.setattr(custom_all_reduce, "one_shot_all_reduce", lambda *given: launched.append(given))
    module = norm(512, 1e-6).to(BF16) if norm is RMSNorm else norm(512, 1e-6)
    x, residual = torch.randn(2, 512).to(BF16), torch.randn(2, 512).to(BF16)
    _, stream = module.add(x, residual, TPGroup(0, 2, None, peers))
    ((given, *_, out, (added, weight, eps)),) = launched
    assert given is x and added is stream is residual and weight is module.weight and eps == 1e-6
    assert out.dtype == BF16 and out.data_ptr() != x.data_ptr()


def test_a_partial_result_is_written_where_it_will_be_summed() -> None:
    limits = Limits(one_shot=64, two_shot=4096)
    peers = CustomAllReduce(0, limits, regions(limits, 2), "")
    group = TPGroup(0, 2, None, peers)
    torch.manual_seed(0)
    layer = RowParallelLinear(34, 16, group, "inputs", bias=True)
    for parameter in layer.parameters():
        parameter.data.normal_()
    finish_weights(layer)
    x = torch.randn(5, 17)
    part = layer.partial(x)
    assert part.data_ptr() == peers._staging.data_ptr()
    torch.testing.assert_close(part, torch.nn.functional.linear(x, layer.method.weight, layer.bias))


def place(host: str = "a", gpu: str = "0", num_processors: int = 132, torch_problem: str = "") -> Peer:
    return Peer(host, gpu, num_processors, torch_problem)


@pytest.mark.parametrize(
    "places,reason",
    [
        ([place(gpu="0"), place(gpu="1")], ""),
        ([place(gpu=str(i)) for i in range(3)], "no measurements for 3 ranks, only for [2, 4]"),
        (
            [place(gpu="0"), place(gpu="1", torch_problem="No module named 'triton'")],
            "rank 1: No module named 'triton'",
        ),
        ([place("a", "0"), place("b", "1")], "the ranks are on several hosts: ['a', 'b']"),
        ([place(gpu="0"), place(gpu="0")], "ranks share a GPU: ['0', '0']"),
        (
            [place(gpu="0"), place(gpu="1", num_processors=66)],
            f"a GPU has 66 multiprocessors, at least {MAX_ROWS} are needed",
        ),
    ],
)
def test_a_group_that_cannot_share_memory_says_why(places: list[Peer], reason: str) -> None:
    assert why_not(places, LIMITS) == reason


def sums_over_gloo(rank: int, size: int, address: str) -> list[list[float]]:
    group = join_tp_group(rank, size, address, torch.device("cpu"))
    assert group.custom is None and group.all_reduce_buffer(2, 6, FP32) is None
    torch.manual_seed(0)
    parts, residual = torch.randn(size, 3, 6), torch.randn(3, 6)
    norm = RMSNorm(6, 1e-5)
    normed, stream = norm.add(parts[rank].clone(), residual.clone(), group)
    row = RowParallelLinear(4 * size, 6, group, "inputs", bias=True)
    weight, bias, x = torch.randn(6, 4 * size), torch.randn(6), torch.randn(3, 4 * size)
    row.load(WeightKey("weight"), weight)
    row.load(WeightKey("bias"), bias)
    finish_weights(row)
    y: Tensor = row(x[:, rank * 4 : rank * 4 + 4])
    expected_normed, expected_stream = norm.add(parts.sum(0), residual)
    # float32 sums of two numbers, and of eight products, in another order
    torch.testing.assert_close(normed, expected_normed)
    torch.testing.assert_close(stream, expected_stream)
    torch.testing.assert_close(y, x @ weight.t() + bias)
    return [t.flatten().tolist() for t in (normed, stream, y)]


def test_ranks_without_gpus_sum_over_gloo() -> None:
    first, second = run_ranks(sums_over_gloo, 2, deadline_s=100)
    assert first == second


def connects_over_gloo(rank: int, size: int, address: str, failing: str) -> tuple[bool, list[str]]:
    """Whether there is peer memory, and what was logged. The GPUs are made up; step `failing` fails on rank 1."""
    group = join_tp_group(rank, size, address, torch.device("cpu")).process_group
    assert group is not None
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    custom_all_reduce.logger.addHandler(handler)

    def step(name: str) -> Callable[..., None]:
        def run(regions: list[Tensor], num_bytes: int, *_: Any) -> None:
            if rank == 1 and name == failing:
                raise RuntimeError(f"{name} does not work\nC++ stack trace")
            regions[:] = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(size)]

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_all_reduce, "_own_peer", lambda device: place(gpu=str(rank)))
        for name in ("_map_regions", "_sign_region", "_check_regions"):
            patch.setattr(custom_all_reduce, name, step(name))
        peers = custom_all_reduce.connect(group, rank, size, torch.device("cpu"), {2: Limits(64, 64)})
    return peers is not None, logged


@pytest.mark.parametrize("failing", ["", "_map_regions", "_check_regions"])
def test_what_fails_on_one_rank_sends_all_to_nccl_and_is_logged_once(failing: str) -> None:
    (first, logged), (second, silent) = run_ranks(connects_over_gloo, 2, failing, deadline_s=100)
    assert first == second == (not failing)
    wanted = (
        [f"all-reduces of tensor parallelism go through NCCL, not our own: rank 1: {failing} does not work"]
        if failing
        else []
    )
    assert logged == wanted and silent == []


def test_a_solo_group_sums_nothing() -> None:
    x = torch.randn(2, 4)
    assert SOLO.all_reduce(x) is x and SOLO.all_reduce_add_norm(x, x, x[0], 1e-5) is None


def fails_on_rank_one(rank: int, size: int, address: str) -> None:
    if rank == 1:
        raise ValueError("a rank's own words")
    threading.Event().wait()


def test_a_rank_that_waits_in_vain_ends_with_the_other_ones_error() -> None:
    with pytest.raises(RankError, match="rank 0: did not finish in time\n(.|\n)*a rank's own words"):
        run_ranks(fails_on_rank_one, 2, deadline_s=60, grace_s=0.5)
