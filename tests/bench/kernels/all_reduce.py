"""Microseconds per all-reduce in a CUDA graph by message size: NCCL, symmetric memory, and our kernel over peer memory,
alone and with the residual add and RMSNorm that follow.

    python -m tests.bench all_reduce [--ranks 2 4] [--width 8192] [--deadline 100]

bfloat16, as many rows of `width` as a round has; the slowest rank's time, best of 5 replays of 50 calls each. A table
per number of ranks with the limits that follow from it for `aerie.workers.distributed.custom_all_reduce.LIMITS`, then
one JSON line. Each rank is a process that is ended after `--deadline` seconds; what was measured until then has been
printed. Needs 2 GPUs.
"""

import argparse
import json
from collections.abc import Callable

import torch
import torch.distributed as dist

from aerie.deploy.bench.figures import table
from aerie.workers.distributed.custom_all_reduce import CustomAllReduce, Limits, Method, connect
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.norm import RMSNorm
from tests.bench.kernels.gpu_time import elapsed_us, hardware
from tests.bench.machine import commit
from tests.support.ranks import RankError, run_ranks

ROWS = (1, 2, 4, 8, 16, 32, 64, 112, 256, 512, 1024)
CALLS, REPLAYS = 50, 5
WIDE = Limits(one_shot=2 << 20, two_shot=16 << 20)  # every method as far as it can go
COLUMNS = ("nccl", "one_shot", "two_shot", "ours", "nccl+norm", "two_shot+norm", "ours_norm")

Call = Callable[[], object]


def joined(rank: int, size: int, address: str) -> tuple[TPGroup, CustomAllReduce, torch.device]:
    """As `join_tp_group`, with peer memory for every method at any size and number of ranks."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size, device_id=device)
    world = dist.group.WORLD
    assert world is not None
    peers = connect(world, rank, size, device, {size: WIDE})
    assert peers is not None, "no peer memory; rank 0 has logged why"
    return TPGroup(rank, size, world, peers), peers, device


def calls_of(group: TPGroup, peers: CustomAllReduce, norm: RMSNorm, rows: int, width: int) -> dict[str, Call]:
    """Return what is measured at this size, by column. Zeros, which stay zeros however often they are summed."""
    nccl = TPGroup(group.rank, group.size, group.process_group)
    shape = (2, rows, width)
    x, residual = torch.zeros(shape, dtype=torch.bfloat16, device=norm.weight.device).unbind(0)
    symmetric = torch.ops.symm_mem
    calls: dict[str, Call] = {
        "nccl": lambda: nccl.all_reduce(x),
        "nccl+norm": lambda: norm.add(x, residual, nccl),
    }
    if rows * width * 2 <= WIDE.two_shot:
        staged = peers._staged(rows, width, torch.bfloat16).zero_()
        name = peers._group_name
        calls["one_shot"] = lambda: symmetric.one_shot_all_reduce(staged, "sum", name)
        calls["two_shot"] = lambda: symmetric.two_shot_all_reduce_(staged, "sum", name)
        calls["two_shot+norm"] = lambda: norm.add(symmetric.two_shot_all_reduce_(staged, "sum", name), residual)
    if peers.method(rows, width, torch.bfloat16) is Method.ONE_SHOT:
        calls["ours"] = lambda: group.all_reduce(x)
        calls["ours_norm"] = lambda: norm.add(x, residual, group)
    return calls


def graph_us(call: Call, device: torch.device) -> float:
    """Best time of one call in a graph of `CALLS`."""
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    best = float("inf")
    for _ in range(REPLAYS + 1):
        best = min(best, elapsed_us(graph.replay) / CALLS)
    return best


def slowest(us: float, device: torch.device) -> float:
    worst = torch.tensor(us, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def measure(rank: int, size: int, address: str, width: int) -> dict[str, dict[str, float]]:
    """Return us of the slowest rank by rows and column; what cannot run is printed and left out."""
    group, peers, device = joined(rank, size, address)
    norm = RMSNorm(width, 1e-5).to(device, torch.bfloat16)
    results: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for rows in ROWS:
            row = results[str(rows)] = {}
            for column, call in calls_of(group, peers, norm, rows, width).items():
                try:
                    us = graph_us(call, device)
                except (AttributeError, RuntimeError) as error:  # an operator that torch lacks, on every rank
                    if rank == 0:
                        existing = [name for name in dir(torch.ops.symm_mem) if "reduce" in name]
                        print(f"{column}: {error}; symm_mem has {existing}", flush=True)
                    continue
                row[column] = slowest(us, device)
            if rank == 0:
                print(f"{size} ranks, {rows} rows:", {k: round(row[k], 2) for k in COLUMNS if k in row}, flush=True)
    return results


def limits_by(results: dict[str, dict[str, float]], width: int) -> dict[str, int]:
    """The largest messages in bytes up to which ours with norm, then two-shot with norm, win at every size measured."""
    limits = {"one_shot": 0, "two_shot": 0}
    for method, column, rivals in (
        ("one_shot", "ours_norm", ("two_shot+norm", "nccl+norm")),
        ("two_shot", "two_shot+norm", ("nccl+norm",)),
    ):
        for rows, row in results.items():
            if column not in row or any(row[rival] < row[column] for rival in rivals if rival in row):
                break
            limits[method] = int(rows) * width * 2
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, help="as many as there are GPUs, of 2 and 4, unless given")
    parser.add_argument("--width", type=int, default=8192, help="the model's hidden size")
    parser.add_argument("--deadline", type=float, default=100, help="seconds for each number of ranks")
    arguments = parser.parse_args()
    present = torch.cuda.device_count()
    sizes = arguments.ranks or [size for size in (2, 4) if size <= present]
    if not sizes or max(sizes) > present:
        parser.error(f"this machine has {present} GPUs")
    results, limits, failures = {}, {}, {}
    for size in sizes:
        try:
            results[size] = run_ranks(measure, size, arguments.width, deadline_s=arguments.deadline)[0]
        except RankError as error:
            failures[size] = str(error)
            print(f"{size} ranks failed:\n{error}", flush=True)
            continue
        limits[size] = limits_by(results[size], arguments.width)
        cells = [
            [rows, int(rows) * arguments.width * 2 >> 10, *(row.get(column, "") for column in COLUMNS)]
            for rows, row in results[size].items()
        ]
        print(f"\n{size} ranks, us per call:", *table(["rows", "KB", *COLUMNS], cells), sep="\n")
        print(f"limits by these figures: {limits[size]}\n", flush=True)
    print(
        json.dumps(
            {
                "bench": "all_reduce",
                "hardware": hardware(),
                "commit": commit(),
                "width": arguments.width,
                "us": results,
                "limits": limits,
                "failures": failures,
            }
        )
    )


if __name__ == "__main__":
    main()
