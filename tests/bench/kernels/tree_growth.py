"""Growth of a block's tree on a GPU: all levels, and the cut that writes the tree.

    python -m tests.bench tree_growth [--widths 16 63 128 256] [--batches 1 4 8] [--depth 15] [--top-k 7]

Microseconds by CUDA graph: the whole tree in one launch (plain DFlash heads), level by level (heads whose scores depend
on the parent, without the launches that score), and the cut. Growth in one launch is compared with its reference.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

from aerie.deploy.bench.figures import table
from aerie.kernels.tree.nodes import Candidates, Children, Level, Tree
from aerie.kernels.tree.tree_growth import grow_best, grow_block, level_rows, write_best
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.machine import commit

REPEATS = 10  # of what is timed, in one graph
VOCABULARY = 1000


def scores_of(rows: int, top_k: int, device: torch.device) -> Tensor:
    return torch.log_softmax(4 * torch.rand(rows, top_k, device=device).sort(1, descending=True).values, 1)


def level_inputs(batch: int, depth: int, top_k: int, width: int, device: torch.device) -> list[tuple[object, ...]]:
    """The arguments of `grow_best` for every level of trees whose scores depend on the parent."""
    inputs: list[tuple[object, ...]] = []
    pool: Candidates | None = None
    level: Level | None = None
    rows = 1
    for at in range(1, depth + 1):
        ids = torch.randint(0, VOCABULARY, (batch * rows, top_k), device=device)
        children = Children(scores_of(batch * rows, top_k, device), ids, None)
        rows = level_rows(at, depth, top_k, width)
        inputs.append((pool, level, children, at, width, rows))
        pool, level = grow_best(pool, level, children, at, width, rows)
    return inputs


def runs_of(batch: int, depth: int, top_k: int, width: int, device: torch.device) -> list[Callable[[], object]]:
    """What is timed: a tree in one launch, all levels, the cut."""
    shape = (batch, depth, top_k)
    children = Children(
        scores_of(batch * depth, top_k, device).view(shape),
        torch.randint(0, VOCABULARY, shape, device=device),
        None,
    )
    grown, expected = grow_block(children, width), grow_block.reference(children, width)
    assert torch.equal(grown.tokens, expected.tokens) and torch.equal(grown.parents, expected.parents)
    inputs = level_inputs(batch, depth, top_k, width, device)
    trees = Tree(*torch.zeros((4, batch + 1, width), dtype=torch.int64, device=device).unbind(0))
    slots = torch.arange(batch, device=device)
    bonus = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    return [
        lambda: [grow_block(children, width) for _ in range(REPEATS)],
        lambda: [grow_best(*each) for _ in range(REPEATS) for each in inputs],  # type: ignore[arg-type]
        lambda: [write_best(trees, slots, bonus, grown, width) for _ in range(REPEATS)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 63, 128, 256])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--top-k", type=int, default=7)
    arguments = parser.parse_args()
    device, clock, rows = torch.device("cuda"), Clock(9), []
    for width in arguments.widths:
        for batch in arguments.batches:
            runs = runs_of(batch, arguments.depth, arguments.top_k, width, device)
            times, _ = clock.medians(*(captured(run).replay for run in runs))
            rows.append((width, batch, *(round(us / REPEATS, 1) for us in times)))
    print(*table(["nodes", "batch", "one launch, us", "by levels, us", "cut, us"], rows), sep="\n")
    print(json.dumps({"bench": "tree_growth", "hardware": hardware(), "commit": commit(), "rows": rows}))


if __name__ == "__main__":
    main()
