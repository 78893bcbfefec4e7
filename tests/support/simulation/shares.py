"""Prints what the choice of tree shapes reaches of the best static shape, on recorded and simulated acceptance.

    python -m tests.support.simulation.shares [--only recorded simulated copied] [--quick]

One fixed set of traces, so that two versions of the choice can be compared:

recorded    answers of the embedded pair (`streams`, `texts`): chat, code, mathematics and copied JSON, one kind after
            the other, and all mixed; for the first 200 steps after a change, and for the 400 after these
simulated   chains, trees and wide trees with one acceptance for all depths (`shapes`), on the costs of a GPU and of a
            CPU; requests of 80 steps. Acceptance 1: the draft is useless, so the best shape is none
wrong       the same, after a start that measured every point of the table wrong by a factor of its own
copied      texts that copy and do not, by turns (`copied`)

The noise of step times and the drawn drafts are seeded; differences below 0.003 mean nothing.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np

from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.tree_shape import TreeShape
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.scheduling.cost_table import CostTable
from tests.support.simulation import copied
from tests.support.simulation.shapes import CHAIN, CPU, CPU_PLAIN_MS, GPU, PLAIN_MS, TREE, Engine, chances_of, misread
from tests.support.simulation.shapes import table as cost_table
from tests.support.simulation.streams import Stream, in_orders
from tests.support.simulation.texts import DRAFTS, costs_of, recorded, recorded_shapes

KINDS = {"mt_bench": "chat", "humaneval": "code", "gsm8k": "mathematics", "JSON to copy": "JSON"}
STEPS = {1: 400, 8: 160, 32: 80}  # measured steps of each kind of recorded text, by batch; half as many before
ORDERS = {1: 3, 8: 1, 32: 1}
MEANS = (1.0001, 2.2, 4.5)
# deep chains of a block draft, and trees of up to 64 nodes; rows cost as in `GPU` and `CPU`
BLOCK = SpeculativeConfig("", "dflash", 15, 1, 16).shapes
WIDE = RoundShapes(
    (PLAIN, TreeShape.of(3, 1, 4), TreeShape.of(5, 4, 16), TreeShape.of(6, 8, 32), TreeShape.of(7, 8, 60)),
    default=4,
    adaptive=True,
)


def by_rows(shapes: RoundShapes, plain_ms: tuple[float, ...], row_share: float) -> CostTable:
    """A table in which each verified row adds a share of a plain round, which doubles with every second batch size."""
    rows = [
        tuple(ms * (1.1 + row_share * shape.width * (1 + 0.5 * i)) for i, ms in enumerate(plain_ms))
        for shape in shapes.shapes[1:]
    ]
    return cost_table(plain_ms, *rows)


SIMULATED = {
    "chain, GPU": (CHAIN, GPU[CHAIN]),
    "tree, GPU": (TREE, GPU[TREE]),
    "chain, CPU": (CHAIN, CPU[CHAIN]),
    "tree, CPU": (TREE, CPU[TREE]),
    "block of 15, GPU": (BLOCK, by_rows(BLOCK, PLAIN_MS, 0.02)),
    "wide tree, GPU": (WIDE, by_rows(WIDE, PLAIN_MS, 0.01)),
    "wide tree, CPU": (WIDE, by_rows(WIDE, CPU_PLAIN_MS, 0.08)),
}
COPIED = ((0, 100), (60, 60), (25, 200), (300, 300))

Row = tuple[str, dict[str, list[float]]]


def recorded_rows(batches: tuple[int, ...], num_seeds: int) -> Iterator[Row]:
    """Shares by kind of text; `shift`: of all kinds, just after a change."""
    for draft, batch in ((draft, batch) for batch in batches for draft in DRAFTS):
        shapes, found = recorded_shapes(draft), dict[str, list[float]]()
        answers = {kind: [each for each in some if each.num_tokens > 1] for kind, some in recorded(draft).items()}
        everything = [each for some in answers.values() for each in some]
        for seed in range(num_seeds):
            for i, order in enumerate(in_orders(list(answers), ORDERS[batch])):
                stream = Stream(shapes, costs_of(shapes), batch=batch, seed=100 * seed + i)
                for kind in order:
                    found.setdefault("shift", []).append(stream.run(answers[kind], STEPS[batch] // 2).share)
                    found.setdefault(KINDS[kind], []).append(stream.run(answers[kind], STEPS[batch]).share)
                found.setdefault("mixed", []).append(stream.run(everything, STEPS[batch]).share)
        yield f"{draft}, batch {batch}", found


def simulated_rows(batches: tuple[int, ...], is_wrong: bool, names: list[str], num_seeds: int) -> Iterator[Row]:
    """Shares by acceptance; `none`: of plain decoding, where the draft is useless."""
    for name in names:
        shapes, costs = SIMULATED[name]
        for batch in batches:
            found = dict[str, list[float]]()
            for mean, seed in ((mean, seed) for mean in MEANS for seed in range(num_seeds)):
                wrong = np.exp(np.random.default_rng(seed).normal(0.0, 0.7, (len(shapes), 6))).tolist()
                told = misread(costs, wrong) if is_wrong else None
                engine = Engine(
                    shapes, batch, 500, chances_of(shapes, mean), seed, actual=costs, told=told, request_steps=80
                )
                engine.rate(200)
                rate = engine.rate(300)
                found.setdefault(f"{mean:.1f}", []).append(rate / engine.best())
                found.setdefault("of none", []).append(rate / engine.static(0))
            found["of none"] = [min(found["of none"])]
            yield f"{'wrong, ' if is_wrong else ''}{name}, batch {batch}", found


def copied_rows(num_seeds: int) -> Iterator[Row]:
    """Shares by lengths of copied and free stretches."""
    for costs in copied.COSTS:
        for batch in (1, 8):
            found = dict[str, list[float]]()
            for lengths in COPIED:
                for seed in range(num_seeds):
                    of_best, of_none, _ = copied.share(*lengths, batch, costs, seed)
                    found.setdefault("{}/{}".format(*lengths), []).append(of_best)
                    found.setdefault("of none", []).append(of_none)
            found["of none"] = [min(found["of none"])]
            yield f"suffix, {costs}, batch {batch}", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("recorded", "simulated", "wrong", "copied")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 32))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    batches, seeds = tuple(options.batches), options.seeds
    rows = {
        "recorded": lambda: recorded_rows(batches, seeds),
        "simulated": lambda: simulated_rows(batches, False, list(SIMULATED), seeds),
        "wrong": lambda: simulated_rows(batches, True, list(SIMULATED)[:4], seeds),
        "copied": lambda: copied_rows(max(2, seeds)),
    }
    totals: dict[str, list[float]] = {}
    for part in options.only:
        started_s, everything = time.process_time(), []
        for name, found in rows[part]():
            cells = ", ".join(f"{column} {np.mean(values):.3f}" for column, values in found.items())
            shares = [each for column, values in found.items() if column != "of none" for each in values]
            everything += shares
            print(f"| {name} | {cells} | mean {np.mean(shares):.4f} | lowest {min(shares):.3f} |", flush=True)
        totals[part] = everything
        print(f"{part}: {time.process_time() - started_s:.0f} CPU s")
    for part, shares in totals.items():
        print(f"{part}: mean {np.mean(shares):.4f}, lowest {min(shares):.3f}, of {len(shares)}")


if __name__ == "__main__":
    main()
