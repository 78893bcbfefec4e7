"""Every kind of draft of the embedded pair on several kinds of text: accepted tokens a round, and tokens a second.

    python -m tests.bench draft_methods [--heads FOLDER ...] [--data eval/gsm8k.jsonl eval/mt_bench.jsonl ...]

Greedy answers to the first turns of each file's questions (JSON lines with "turns"), without --data to held-out
prompts, and to prompts that end in the beginning of a text to copy. Static arms verify their whole shape in every
round, so their tokens a round do not depend on the machine. Adaptive arms choose by costs that are measured as a start
measures them. Tokens a second are those of the process's CPU time while decoding, one thread, the best of --passes.
--heads: block heads beside the EAGLE-3 head. --processes: arms at the same time. For each batch size a table, and one
of each adaptive arm's rate over the best static one's: as measured, and with one time for all rounds of a shape, which
a busy machine disturbs less. Then one JSON line; --plot writes a bar chart.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from deploy.bench.table import table
from deploy.config.draft_head import block_shape, draft_method
from speculative.build import EngineSpec
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from tests.bench.round import commit, hardware
from tests.support.embedded import CHAIN, TREE, embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized
from workers.runner.local_engine import LocalEngine
from workers.scheduling.plan import SamplingParams


@dataclass(frozen=True)
class Row:
    arm: str
    text: str
    batch: int
    tokens_per_round: float
    tokens_per_cpu_s: float
    tokens_per_s: float
    differing_answers: int
    tokens: int
    cpu_s: float
    steps: dict[str, int]  # by the shape that they verified


def arms(heads: list[Path]) -> dict[str, SpeculativeConfig | None]:
    """Return the drafts to compare, by name."""
    suffix = SpeculativeConfig(method="suffix", num_steps=15, num_draft_tokens=16)
    found: dict[str, SpeculativeConfig | None] = {
        "none": None,
        "suffix 15": suffix,
        "EAGLE-3 chain of 3": CHAIN,
        "EAGLE-3 chain of 5": dataclasses.replace(CHAIN, num_steps=5, num_draft_tokens=6),
        "EAGLE-3 tree of 8": dataclasses.replace(TREE, num_steps=4, top_k=2, num_draft_tokens=8),
        "EAGLE-3 tree of 16": TREE,
        "EAGLE-3 tree of 16 + suffix 8": dataclasses.replace(TREE, suffix_tokens=8),
        "EAGLE-3 tree, adaptive": TREE,
    }
    for folder in heads:
        method, depth = draft_method(folder), block_shape(folder)["num_steps"]
        chain = SpeculativeConfig(str(folder), method=method, num_steps=depth, num_draft_tokens=depth + 1)  # type: ignore[arg-type]
        tree = dataclasses.replace(chain, top_k=4, num_draft_tokens=16)
        for shape in tree.shape.smaller():
            found[f"{method} {shape.name}"] = dataclasses.replace(
                tree, num_steps=shape.num_steps, top_k=shape.top_k, num_draft_tokens=shape.width
            )
        found |= {
            f"{method} chain of {depth}": chain,
            f"{method} tree of 16": tree,
            f"{method} tree of 16 + suffix 8": dataclasses.replace(tree, suffix_tokens=8),
            f"{method} tree, adaptive": tree,
            f"{method} tree + suffix 8, adaptive": dataclasses.replace(tree, suffix_tokens=8),
        }
    return {
        name: config and dataclasses.replace(config, adaptive=name.endswith("adaptive"))
        for name, config in found.items()
    }


def texts(paths: list[Path], count: int) -> dict[str, list[list[int]]]:
    """Return prompts as token ids, by kind of text."""
    records = [json.dumps([{"id": n, "name": f"item {n * k}", "count": n + k} for n in range(8)]) for k in range(count)]
    copied = [ids + ids[len(ids) // 8 : len(ids) // 2] for ids in tokenized([f"{r} Write it again." for r in records])]
    if paths:
        asked = {p.stem: [json.loads(line)["turns"][0] for line in p.read_text().splitlines()[:count]] for p in paths}
    else:
        prompts = held_out_prompts(8 * count, seed=7)
        asked = {
            "word problems": [text for i, text in enumerate(prompts) if i % 4 != 3][:count],
            "other tasks": [text for i, text in enumerate(prompts) if i % 4 == 3][:count],
        }
    return {name: tokenized(some) for name, some in asked.items()} | {"JSON to copy": copied}


def spec_of(config: SpeculativeConfig | None, most: int) -> EngineSpec:
    spec = embedded_spec(config, max_running=most, debug=False)
    cache = dataclasses.replace(spec.worker.cache, prefix_cache=False, num_pages=max(1024, most * 128))
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, cache=cache, measure_costs=True))


def measure(
    name: str, config: SpeculativeConfig | None, given: argparse.Namespace
) -> tuple[list[Row], dict[str, list[list[int]]]]:
    """Return the arm's rows, and its answers by text and batch size."""
    torch.set_num_threads(1)
    rows, said = [], {}
    with local_engine(spec_of(config, max(given.batches))) as engine:
        for text, prompts in texts(given.data, given.prompts).items():
            for batch in given.batches:
                row, said[f"{text}/{batch}"] = best_of(engine, name, text, prompts, batch, given)
                rows.append(row)
    return rows, said


def best_of(
    engine: LocalEngine, name: str, text: str, prompts: list[list[int]], batch: int, given: argparse.Namespace
) -> tuple[Row, list[list[int]]]:
    sampling = SamplingParams(given.tokens, 0.0, stop_token_ids=eos_token_ids())
    best: Row | None = None
    for _ in range(given.passes):
        clocks = [(time.process_time(), time.perf_counter())]
        engine.generate(prompts, SamplingParams(1, 0.0), batch)
        clocks.append((time.process_time(), time.perf_counter()))
        before = Counter(engine.scheduler.stats.steps_by_shape)
        requests = engine.generate(prompts, sampling, batch)
        clocks.append((time.process_time(), time.perf_counter()))
        cpu_s, wall_s = (clocks[2][i] - 2 * clocks[1][i] + clocks[0][i] for i in range(2))  # less prompts alone
        accepted = sum(k * n for request in requests for k, n in enumerate(request.acceptance_histogram))
        per_round = 1 + accepted / max(1, sum(request.num_rounds for request in requests))
        count = sum(len(request.output) - 1 for request in requests)
        steps = dict(Counter(engine.scheduler.stats.steps_by_shape) - before)
        row = Row(name, text, batch, per_round, count / cpu_s, count / wall_s, 0, count, cpu_s, steps)
        best = row if best is None or row.tokens_per_cpu_s > best.tokens_per_cpu_s else best
    assert best is not None
    return best, [list(request.output) for request in requests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="*", type=Path, default=[], help="folders of block heads")
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="JSON lines with `turns`")
    parser.add_argument("--only", nargs="+", help="arms whose names contain one of these words")
    parser.add_argument("--prompts", type=int, default=16, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="arms at the same time, one thread each")
    parser.add_argument("--plot", type=Path, help="SVG or PNG file (needs matplotlib)")
    given = parser.parse_args()
    chosen = {
        name: config
        for name, config in arms(given.heads).items()
        if name == "none" or not given.only or any(word in name for word in given.only)
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = run(chosen, given)
    for batch in given.batches:
        print(f"\nbatch {batch}: tokens a round / tokens per CPU second\n", *lines(rows, batch), sep="\n")
        print("\nadaptive over the best static arm: measured / by shape\n", *ratios(rows, batch), sep="\n")
    if given.plot is not None:
        plot(rows, given.plot)
    found = [dataclasses.asdict(row) for row in rows]
    print(json.dumps({"bench": "draft_methods", "hardware": hardware(), "commit": commit(), "rows": found}))
    return 0


def run(chosen: dict[str, SpeculativeConfig | None], given: argparse.Namespace) -> list[Row]:
    """Measure the arms, of which "none" is the first; print each row."""
    rows: list[Row] = []
    answers: dict[str, dict[str, list[list[int]]]] = {}
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(measure, name, config, given) for name, config in chosen.items()}
        for name, future in running.items():
            found, answers[name] = future.result()
            for row in found:
                key = f"{row.text}/{row.batch}"
                differing = sum(a != b for a, b in zip(answers[name][key], answers["none"][key], strict=True))
                rows.append(dataclasses.replace(row, differing_answers=differing))
                print(rows[-1], flush=True)
    return rows


def lines(rows: list[Row], batch: int) -> list[str]:
    """Return the table of a batch size."""
    kinds, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("text", "arm"))
    of = {(row.arm, row.text): row for row in rows if row.batch == batch}
    cells = {key: f"{row.tokens_per_round:.2f} / {row.tokens_per_cpu_s:.0f}" for key, row in of.items()}
    return table(["drafts", *kinds], [(name, *(cells[name, kind] for kind in kinds)) for name in names])


def ratios(rows: list[Row], batch: int) -> list[str]:
    """Return the table of adaptive arms' rates over the best other arm's, by text."""
    rows = [row for row in rows if row.batch == batch]
    kinds, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("text", "arm"))
    of = {(row.arm, row.text): row for row in rows}
    step_s = {name: _step_s([of[name, kind] for kind in kinds]) for name in names if not name.endswith("adaptive")}

    def modelled(row: Row) -> float:
        """Tokens a second if every step of a shape took what it takes on average in the static arm of that shape."""
        draft = row.arm.split()[0]
        static = {shape: s for name, times in step_s.items() if name.split()[0] == draft for shape, s in times.items()}
        times = step_s["none"] | static | step_s.get(row.arm, {})
        return row.tokens / sum(count * times.get(shape, math.nan) for shape, count in row.steps.items())

    found = []
    for name in names:
        if name in step_s:
            continue
        measured, by_shape = (
            [rate(of[name, kind]) / max(rate(of[other, kind]) for other in step_s) for kind in kinds]
            for rate in (lambda row: row.tokens_per_cpu_s, modelled)
        )
        found.append((name, *(f"{a:.2f} / {b:.2f}" for a, b in zip(measured, by_shape, strict=True))))
    return table(["drafts", *kinds], found)


def _step_s(rows: list[Row]) -> dict[str, float]:
    """CPU seconds of a step, by shape, of a static arm: of all its texts together."""
    steps = sum((Counter(row.steps) for row in rows), Counter[str]())
    return dict.fromkeys(steps, sum(row.cpu_s for row in rows) / max(1, steps.total()))


def plot(rows: list[Row], path: Path) -> None:
    """Bars of accepted tokens a round, by text and arm, at the smallest batch size."""
    from matplotlib import pyplot

    rows = [row for row in rows if row.batch == min(each.batch for each in rows)]
    names, kinds = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("arm", "text"))
    figure, axes = pyplot.subplots(figsize=(9, 0.22 * len(rows) + 1))
    for i, name in enumerate(names):
        of = {row.text: row.tokens_per_round for row in rows if row.arm == name}
        places = [k * (len(names) + 1) + i for k in range(len(kinds))]
        axes.barh(places, [of[kind] for kind in kinds], label=name)
    axes.set_yticks([k * (len(names) + 1) + len(names) / 2 for k in range(len(kinds))], kinds)
    axes.invert_yaxis()
    axes.set_xlabel("tokens a round")
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    raise SystemExit(main())
