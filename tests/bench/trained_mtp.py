"""A small DeepSeek-V3 with its module for multi-token prediction: trained, its acceptance measured, losslessness seen.

    python -m tests.bench.trained_mtp --data FOLDER --output FOLDER [--size tiny] [--skip-training]

FOLDER of data has gsm8k/train.jsonl and instruct/*.json to train on, gsm8k/test.jsonl and eval/*.jsonl to measure on.
`aerie train-deepseek` trains target and module together into OUTPUT/target, `aerie train-draft --method mtp` trains the
module further on the target's own distribution into OUTPUT/module; OUTPUT/whole is the target with that module, as one
checkpoint. Then an engine answers held-out prompts without speculation, with chain 3/1/4 and with tree 5/4/8, greedy
and drawn, with both modules. A Markdown table and one JSON line: tokens per round, the share of rounds that accepted at
least so many drafts, and how many answers are those without speculation: all in float32 on a CPU, and on a
GPU with `--deterministic`; without, two best tokens or experts are sometimes closer in bfloat16 than what passes of
different widths round off. `--graphs` measures with captured rounds.

small takes about three minutes on one H200 and its measuring about two; tiny some minutes on two cores, with
--tokens 64 --prompts 24.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from attention.config import CacheConfig
from deploy.evaluate import read_prompts, report_of
from speculative.build import EngineSpec
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from speculative.training.draft_files import make_readable
from tests.bench.machine import git
from workers.config import ModelSource, SchedulerConfig, WorkerConfig
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

SHAPES = {"chain 3/1/4": (3, 1, 4), "tree 5/4/8": (5, 4, 8)}
TEMPERATURES = (0.0, 0.7, 1.0)
HEAD = ("speculation", "module", "temperature", "prompts", "length", "accepted at depth", "as plain", "tokens/s")
CONCURRENCY = 64
# What the commands are given, by size and where they run.
TRAINING = {
    "small": "--epochs 10 --lr 2e-3 --val-fraction 0.02 --batch-tokens 16384 --max-length 1024",
    "tiny": "--epochs 8 --lr 4e-3 --val-fraction 0.02 --batch-tokens 8192 --max-length 1024 --dropout 0",
}
TRAINING_ON_CPU = (
    "--steps 400 --lr 4e-3 --warmup-steps 30 --val-fraction 0.005 --batch-tokens 2048 --max-length 384 --dropout 0 "
    "--mtp-steps 2 --eval-every 200"
)
FURTHER = (
    "--lr 5e-4 --val-fraction 0.02 --batch-tokens 16384 --max-length 1024 --ttt-length 5 --measure-rows 100 "
    "--max-new-tokens 192 --generate-batch 128"
)
FURTHER_ON_CPU = (
    "--lr 1e-3 --warmup-steps 10 --val-fraction 0.005 --batch-tokens 2048 --max-length 384 "
    "--ttt-length 4 --measure-rows 16 --max-new-tokens 48"
)


@dataclass(frozen=True)
class Arm:
    """shape: None decodes without drafts. module: a name for `folder`, where the module is; that of the target if it is
    empty."""

    shape: str | None
    module: str = ""
    folder: str = ""

    @property
    def speculative(self) -> SpeculativeConfig | None:
        if self.shape is None:
            return None
        return SpeculativeConfig(self.folder, "mtp", *SHAPES[self.shape], adaptive=False)


def train(command: str, on_gpu: bool) -> float:
    """Runs `aerie COMMAND` in a process of its own and returns its seconds; on a GPU once more without graphs if it
    fails with them."""
    started_s = time.perf_counter()
    line = [sys.executable, "-m", "speculative.training", *command.split()]
    print("$ aerie " + command, flush=True)
    failed = subprocess.run(line).returncode
    if failed and on_gpu:
        print("failed; once more without graphs", flush=True)
        started_s = time.perf_counter()
        failed = subprocess.run([*line, "--no-graphs"]).returncode
    if failed:
        raise SystemExit(failed)
    return time.perf_counter() - started_s


def put_together(target: Path, module: Path, whole: Path) -> None:
    """The target with that module in the place of its own, as one checkpoint."""
    whole.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja"):
            (whole / path.name).write_bytes(path.read_bytes())
    tensors = load_file(target / "model.safetensors") | load_file(module / "model.safetensors")
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    make_readable(whole)


def prompts_of(data: Path, target: Path, count: int) -> dict[str, list[list[int]]]:
    """Token ids by set of prompts: word problems that nobody was trained on, and instructions."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    sets = {"GSM8K test": "gsm8k/test.jsonl", "Alpaca": "eval/alpaca.jsonl", "MT-bench": "eval/mt_bench.jsonl"}

    def tokens(messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    shares = {name: count if name == "GSM8K test" else max(1, count // 2) for name in sets}
    found = {name: [tokens(m) for m in read_prompts(str(data / path), shares[name])] for name, path in sets.items()}
    return {name: [prompt for prompt in prompts if len(prompt) < 700] for name, prompts in found.items()}


def answered(spec: EngineSpec, prompts: dict[str, list[list[int]]], max_tokens: int, stops: tuple[int, ...]) -> Any:
    """Requests by (temperature, set), and tokens per second of each."""
    answers = {}
    with local_engine(spec) as engine:
        for temperature in TEMPERATURES:
            for name, rows in prompts.items():
                sampling = SamplingParams(max_tokens, temperature, stop_token_ids=stops)
                requests = [Request(f"{name}-{i}", row, replace(sampling, seed=i)) for i, row in enumerate(rows)]
                started_s = time.perf_counter()
                engine.run(requests, CONCURRENCY)
                answers[temperature, name] = requests, time.perf_counter() - started_s
    return answers


def measure(arguments: argparse.Namespace, target: Path, module: Path) -> list[tuple[object, ...]]:
    """The table's rows, which are printed as they come."""
    prompts = prompts_of(arguments.data, target, arguments.prompts)
    value = json.loads((target / "generation_config.json").read_text())["eos_token_id"]
    longest = max(len(row) for rows in prompts.values() for row in rows) + arguments.tokens
    worker = WorkerConfig(
        ModelSource(str(target), device=arguments.device),
        CacheConfig(num_pages=CONCURRENCY * (-(-longest // 16) + 8)),
        SchedulerConfig(max_running=CONCURRENCY, max_step_tokens=1024),
        cuda_graphs=arguments.graphs,
        deterministic=arguments.deterministic,
        measure_costs=False,
    )
    arms = [Arm(None), *(Arm(shape, "trained with the target") for shape in SHAPES)]
    if module.exists():
        arms += [Arm(shape, "trained further", str(module)) for shape in SHAPES]
    print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD), flush=True)
    plain: Any = None
    rows: list[tuple[object, ...]] = []
    for arm in arms:
        answers = answered(EngineSpec(worker, arm.speculative), prompts, arguments.tokens, (value,))
        plain = plain or answers
        for key, (requests, elapsed_s) in answers.items():
            report = report_of(requests, elapsed_s)
            equal = sum(r.output == p.output for r, p in zip(requests, plain[key][0], strict=True))
            by_depth = " ".join(f"{share:.3f}" for share in report.per_position) if arm.shape else ""
            length = f"{report.acceptance_length:.3f}" if arm.shape else ""
            head = (arm.shape or "none", arm.module, f"{key[0]:g}", key[1])
            rows.append((*head, length, by_depth, f"{equal}/{len(requests)}", round(report.output_tokens_per_s)))
            print("| " + " | ".join(map(str, rows[-1])) + " |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=tuple(TRAINING), default="small")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokenizer", type=Path, help="folder of a model whose tokenizer it gets, instead of its own")
    parser.add_argument("--target-steps", type=int, help="instead of the epochs that are usual")
    parser.add_argument("--further-steps", type=int, help="of the module alone; 0: none; 800, or 60 on a CPU")
    parser.add_argument("--skip-training", action="store_true", help="measure what is there")
    parser.add_argument("--prompts", type=int, default=128, help="of GSM8K's test set; half as many of the others")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer at most")
    parser.add_argument("--graphs", action="store_true", help="measure with captured rounds, as an engine is served")
    parser.add_argument("--deterministic", action="store_true", help="measure with rows that no other row changes")
    arguments = parser.parse_args()
    target, module = arguments.output / "target", arguments.output / "module"
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    seconds = {}
    if not arguments.skip_training:
        rows = f"{arguments.data}/gsm8k/train.jsonl"
        data = f"--data {rows} {arguments.data}/instruct" if on_gpu or arguments.size == "small" else f"--data {rows}"
        common = f"{data} --device {'cuda' if on_gpu else 'cpu'} --no-keep-checkpoint"
        settings = TRAINING[arguments.size] if on_gpu else TRAINING_ON_CPU
        steps = f" --steps {arguments.target_steps}" if arguments.target_steps else ""
        own = f" --tokenizer {arguments.tokenizer}" if arguments.tokenizer else ""
        command = f"train-deepseek --size {arguments.size} --output {target} {settings}{steps}{own} {common}"
        seconds["target"] = train(command, on_gpu)
        further = (800 if on_gpu else 60) if arguments.further_steps is None else arguments.further_steps
        if further:
            settings = f"{FURTHER if on_gpu else FURTHER_ON_CPU} --steps {further}"
            command = f"train-draft --method mtp --target {target} --output {module} {settings} {common}"
            seconds["module"] = train(command, on_gpu)
            put_together(target, module, arguments.output / "whole")
    started_s = time.perf_counter()
    measured = measure(arguments, target, module)
    seconds["measuring"] = time.perf_counter() - started_s
    size = (target / "model.safetensors").stat().st_size
    print(f"{size / 1e6:.1f} MB; seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    facts = {"bench": "trained_mtp", "commit": git("rev-parse", "--short", "HEAD"), "seconds": seconds}
    print(json.dumps(facts | {"size": arguments.size, "rows": measured}))


if __name__ == "__main__":
    main()
