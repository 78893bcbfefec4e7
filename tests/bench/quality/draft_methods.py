"""Every kind of draft of the small models on several kinds of text: accepted tokens a round, and tokens a second.

    python -m tests.bench draft_methods [--model pair hybrid] [--data eval/gsm8k.jsonl eval/mt_bench.jsonl ...]
    python -m tests.bench draft_figures LOG ...

Models: the embedded pair with its EAGLE-3, DSpark and DFlash2 heads, and the hybrid of `tests/models/hybrid_tiny` with
its module for multi-token prediction and its block heads. Both also copy text.

Texts: greedy answers to the first turns of each file's questions (JSON lines with "turns"), without --data to held-out
prompts, and to prompts that end in the beginning of a text to copy.

Arms: static arms verify their whole shape in every round, so their tokens a round do not depend on the machine.
Adaptive arms choose by costs that are measured as a start measures them, and answer --warm other prompts of the text
before. Tokens a second are those of the process's CPU time while decoding, one thread.

All arms of a draft, and none, answer each prompt in turn in one process, since cores differ by a fifth and so does one
core from minute to minute. --processes: drafts and texts at the same time, each on a physical core of its own.
--limit-s: from then on no prompt begins.

Prints one JSON line for each draft and text, which `draft_figures` reads.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aerie.deploy.config.drafts import block_tree_keys, draft_method
from aerie.speculative.build import local_engine
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit, physical_cores
from tests.bench.quality.decoding import Decoding
from tests.support import MODELS, ROOT
from tests.support.embedded import TREE, eos_token_ids, measured_spec
from tests.support.prompts import copying_prompts, held_out_prompts, tokenized

HYBRID = ROOT / "tests" / "models" / "hybrid_tiny"
BRANCH = 8  # tokens of the copied branch beside a model's tree
LABELS: dict[Method, str] = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
SUFFIX = SpeculativeConfig(method="suffix", num_steps=15, num_draft_tokens=16)


@dataclass(frozen=True)
class Row:
    """draft: of the arms that answered in turn with this one. steps: by the shape that they verified. answers: a
    checksum of each answer's token ids."""

    arm: str
    draft: str
    text: str
    batch: int
    tokens_per_round: float
    tokens_per_cpu_s: float
    tokens_per_s: float
    tokens: int
    cpu_s: float
    steps: dict[str, int]
    answers: list[int]


@dataclass(frozen=True)
class Model:
    """A target and the arms of its drafts: the largest shape of each, by label."""

    folder: Path
    prefix: str = ""
    drafts: dict[str, SpeculativeConfig] = field(default_factory=dict)

    def arms(self) -> dict[str, dict[str, SpeculativeConfig | None]]:
        """Return the arms of each draft, by draft and name. None is an arm of every draft."""
        suffix = {shape.name: _suffix(shape.max_new_tokens - 1) for shape in SUFFIX.shapes.shapes[1:]}
        found: dict[str, dict[str, SpeculativeConfig | None]] = {"suffix": suffix | {"suffix, adaptive": SUFFIX}}
        for label, tree in self.drafts.items():
            arms = found[label] = {f"{label}, {each.shape.name}": each for each in _static(tree)}
            with_branch = dataclasses.replace(tree, suffix_tokens=BRANCH)
            arms[f"{label}, {with_branch.shapes.shapes[-1].name}"] = with_branch
            arms |= {f"{label}, adaptive": tree, f"{label}, adaptive+{BRANCH}": with_branch}
        return {self.prefix + label: self._named({"none": None} | arms) for label, arms in found.items()}

    def _named(self, arms: dict[str, SpeculativeConfig | None]) -> dict[str, SpeculativeConfig | None]:
        return {
            self.prefix + name: config and dataclasses.replace(config, adaptive=is_adaptive(name))
            for name, config in arms.items()
        }


def _suffix(num_tokens: int) -> SpeculativeConfig:
    return dataclasses.replace(SUFFIX, num_steps=num_tokens, num_draft_tokens=num_tokens + 1)


def _static(tree: SpeculativeConfig) -> list[SpeculativeConfig]:
    """Return the shapes that the adaptive choice has, and a block's whole chain."""
    shapes = [*tree.shape.smaller(), tree.shape]
    found = [
        dataclasses.replace(tree, num_steps=each.num_steps, top_k=each.top_k, num_draft_tokens=each.width)
        for each in shapes
    ]
    if tree.shape.in_block:
        found.insert(-1, dataclasses.replace(tree, top_k=1, num_draft_tokens=tree.num_steps + 1))
    return found


def models(heads: list[Path]) -> dict[str, Model]:
    """Return the models by name. heads: further block heads for the pair."""
    pair = {"EAGLE-3": TREE} | _block_trees([MODELS / "dspark", MODELS / "dflash2", *heads])
    module = SpeculativeConfig("", "mtp", num_steps=5, top_k=4, num_draft_tokens=16)
    return {
        "pair": Model(MODELS / "target", "", pair),
        "hybrid": Model(HYBRID, "hybrid-", {"MTP": module} | _block_trees([HYBRID / "dspark", HYBRID / "dflash2"])),
    }


def _block_trees(folders: list[Path]) -> dict[str, SpeculativeConfig]:
    found = {}
    for folder in folders:
        method: Method = draft_method(folder)  # type: ignore[assignment]
        depth = block_tree_keys(folder, folder)["num_steps"]
        tree = SpeculativeConfig(str(folder), method, num_steps=depth, top_k=4, num_draft_tokens=16)
        found[LABELS[method]] = tree
    return found


def texts(paths: list[Path], count: int, model: Path = MODELS / "target") -> dict[str, list[list[int]]]:
    """Return prompts as token ids of the model in this folder, by kind of text."""
    if paths:
        asked = {p.stem: [json.loads(line)["turns"][0] for line in p.read_text().splitlines()[:count]] for p in paths}
    else:
        prompts = held_out_prompts(8 * count, seed=7)
        asked = {
            "word problems": [text for i, text in enumerate(prompts) if i % 4 != 3][:count],
            "other tasks": [text for i, text in enumerate(prompts) if i % 4 == 3][:count],
        }
    found = {name: tokenized(some, model) for name, some in asked.items()}
    return found | {"JSON to copy": copying_prompts(count, model)}


def row_of(arm: str, draft: str, text: str, batch: int, of: Decoding) -> Row:
    answers = [zlib.crc32(json.dumps(list(request.output)).encode()) for request in of.requests]
    rates = of.tokens / of.cpu_s, of.tokens / of.wall_s
    return Row(arm, draft, text, batch, of.tokens_per_round, *rates, of.tokens, of.cpu_s, dict(of.steps), answers)


def measure(
    draft: str, arms: dict[str, SpeculativeConfig | None], text: str, model: Path, given: argparse.Namespace
) -> list[Row]:
    """Return a row for each arm and batch size."""
    torch.set_num_threads(1)
    prompts = texts(given.data, given.prompts + given.warm, model)[text]
    sampling = SamplingParams(given.tokens, 0.0, stop_token_ids=eos_token_ids(model))
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        spec = {
            name: measured_spec(config, max_running=max(given.batches), model=model) for name, config in arms.items()
        }
        engines = {name: stack.enter_context(local_engine(each)) for name, each in spec.items()}
        for batch in given.batches:
            for name in filter(is_adaptive, arms):
                engines[name].generate(prompts[given.prompts :], sampling, batch)
            decoded = {name: Decoding() for name in arms}
            for i in range(0, given.prompts, batch):
                if time.time() > given.ends:
                    break
                for name in arms:
                    decoded[name].add(engines[name], prompts[i : min(i + batch, given.prompts)], sampling, batch)
            rows += [row_of(name, draft, text, batch, each) for name, each in decoded.items() if each.requests]
    return rows


def is_adaptive(arm: str) -> bool:
    return "adaptive" in arm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=["pair", "hybrid"], default=["pair"])
    parser.add_argument("--heads", nargs="*", type=Path, default=[], help="folders of further block heads for the pair")
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="JSON lines with `turns`")
    parser.add_argument("--only", nargs="+", help="drafts whose names contain one of these words")
    parser.add_argument("--texts", nargs="+", help="texts whose names contain one of these words")
    parser.add_argument("--prompts", type=int, default=16, help="of each kind of text")
    parser.add_argument("--warm", type=int, default=8, help="further prompts, which adaptive arms answer before")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--processes", type=int, help="at the same time; default: as many as physical cores")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which no prompt begins")
    given = parser.parse_args()
    given.ends = time.time() + given.limit_s
    os.environ["OMP_NUM_THREADS"] = "1"
    cores = physical_cores()[: given.processes]
    kinds = [name for name in texts(given.data, 1) if not given.texts or any(word in name for word in given.texts)]
    source = {"bench": "draft_methods", "hardware": hardware(), "commit": commit(), "processes": len(cores)}
    context = multiprocessing.get_context("spawn")
    free = context.Queue()
    for core in cores:
        free.put(core)
    with ProcessPoolExecutor(len(cores), context, pin, (free.get,)) as pool:
        running = {
            pool.submit(measure, draft, arms, text, model.folder, given): (of, draft, text)
            for of, model in models(given.heads).items()
            if of in given.model
            for draft, arms in model.arms().items()
            if not given.only or any(word in draft for word in given.only)
            for text in kinds
        }
        for future in as_completed(running):
            of, draft, text = running[future]
            rows = [dataclasses.asdict(row) for row in future.result()]
            print(json.dumps({**source, "model": of, "draft": draft, "text": text, "rows": rows}), flush=True)
    return 0


def pin(next_core: Callable[[], int]) -> None:
    """Keep this process and its threads on one core. Does nothing where the system has no such call (macOS)."""
    core = next_core()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    raise SystemExit(main())
