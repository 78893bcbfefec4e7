"""Heads for a published model on one GPU: the model's own answers, a block head and an EAGLE-3 head trained on them,
the tokens a round of their trees, and tokens a second in the engine.

    python -m tests.bench real_heads --target X.gguf --data DATA --work WORK --out OUT [--parts regenerate block ...]

DATA holds gsm8k/train.jsonl, instruct/*.json and eval/*.jsonl. WORK keeps what later parts read, so that parts may run
in several calls; OUT gets the heads and results.json after each part. Every part runs in a process of its own with a
limit in seconds, and what it has measured until then is kept.

Parts: regenerate   answers of the model to DATA's prompts, greedy first, then at 0.7, until --regenerate-s
       block        the block head, --minutes long; eagle3: the same for EAGLE-3
       trees        tokens a round of chain, EAGLE-2 growth and best-first growth, on eval/*.jsonl
       speed        tokens a second of the engine, by draft and batch size
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aerie.deploy.config.drafts import block_tree_keys
from aerie.deploy.config.files import gguf_folder
from aerie.deploy.train_draft import add_command
from aerie.deploy.train_draft import run as train
from aerie.speculative.build import local_engine
from aerie.speculative.config import BLOCK_METHODS, SpeculativeConfig
from aerie.speculative.training.block_kinds import load_block_head
from aerie.speculative.training.commands import choose_device, load_target
from aerie.speculative.training.generation import generate_answers
from aerie.speculative.training.rows import Conversation, Turn, read_conversations, split_validation
from aerie.speculative.training.samples import Sample, answer_prompts, write_samples
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.quality.decoding import Decoding
from tests.bench.quality.head_trees import tokens_per_round
from tests.support.embedded import eos_token_ids, measured_spec

MODULE = "tests.bench.quality.real_heads"
PARTS = ("regenerate", "block", "eagle3", "trees", "speed")
TRAIN = ("gsm8k/train.jsonl", "instruct/codegen.json", "instruct/roleplay.json")
EVAL = ("gsm8k", "mt_bench", "humaneval", "alpaca")
WIDTHS = (16, 32, 63, 128)
HELD_OUT = 0.01  # of the training rows; the training measures on their prompts
MAX_PROMPT = 256  # longer ones are left out
SECOND_TEMPERATURE = 0.7  # a model of 135 million parameters rambles at 1


class Results:
    """results.json, written after every entry."""

    def __init__(self, out: Path) -> None:
        self.path = out / "results.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def add(self, part: str, name: str, value: Any) -> None:
        self.found.setdefault(part, {})[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self.path)
        print(f"{part}: {name}: {json.dumps(value)}", flush=True)


def target_of(given: argparse.Namespace) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    device = choose_device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer, model = load_target(gguf_folder(given.target), device, dtype)
    model.requires_grad_(False)
    return tokenizer, model


def regenerate(given: argparse.Namespace, results: Results) -> None:
    """Answer the training prompts in random order, all greedily, then at `SECOND_TEMPERATURE`, until the time is up."""
    tokenizer, model = target_of(given)
    rows = read_conversations([str(given.data / name) for name in TRAIN])
    conversations, _ = split_validation(rows, HELD_OUT, 0)
    prompts = [each for each in answer_prompts(conversations, tokenizer) if len(each) <= MAX_PROMPT]
    random.Random(0).shuffle(prompts)
    prompts = prompts[: given.limit] if given.limit else prompts
    started, samples, slowest = time.monotonic(), [], 0.0
    for temperature in (0.0, SECOND_TEMPERATURE):
        for first in range(0, len(prompts), given.batch):
            before = time.monotonic()
            if before - started + slowest > given.regenerate_s:
                break
            samples += generate_answers(
                model,
                tokenizer,
                prompts[first : first + given.batch],
                temperature=temperature,
                max_new_tokens=given.answer_tokens,
                batch_size=given.batch,
                seed=first,
                progress=False,
            )
            slowest = max(slowest, time.monotonic() - before)
            seconds, tokens = time.monotonic() - started, sum(len(s.tokens) - s.num_prompt for s in samples)
            print(
                f"regenerate at {temperature}: {len(samples)} answers, {tokens} tokens, {seconds:.0f} s, "
                f"{tokens / seconds:.0f} tokens/s",
                flush=True,
            )
    write_samples(samples, given.work / "regenerated.jsonl")
    results.add("regenerate", "answers", {"count": len(samples), "tokens": tokens, "seconds": round(seconds, 1)})
    results.add("regenerate", "example", tokenizer.decode(samples[0].tokens))


def _train(given: argparse.Namespace, results: Results, name: str, options: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    folder = given.work / name
    steps = [] if given.steps is None else ["--steps", str(given.steps)]
    line = [
        *("train-draft", "--target", str(given.target), "--output", str(folder), "--device", given.device),
        *("--data", *(str(given.data / each) for each in TRAIN), "--val-fraction", str(HELD_OUT)),
        *("--regenerated", str(given.work / "regenerated.jsonl"), "--minutes", str(given.minutes), "--epochs", "60"),
        *("--max-new-tokens", str(given.answer_tokens), "--max-length", str(MAX_PROMPT + given.answer_tokens)),
        *("--measure-rows", str(given.held), "--no-keep-checkpoint", "--checkpoint-every", "100000"),
        *("--eval-every", str(given.eval_every), *options, *steps),
    ]
    started = time.monotonic()
    train(parser.parse_args(line))
    results.add(name, "training", {"seconds": round(time.monotonic() - started, 1), "command": " ".join(line)})


def publish(folder: Path, out: Path) -> None:
    """Copy a head's two files, if they are written, also of a training that was ended while it measured."""
    if not (folder / "model.safetensors").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((folder / name).read_bytes())


def block(given: argparse.Namespace, results: Results) -> None:
    sizes = ["--block-size", "16", "--draft-layers", "2", "--intermediate-size", "512", "--head-rank", "32"]
    loss = ["--gamma", "7", "--tv-weight", "0", "--mask-token", "0", "--anchors", str(given.anchors)]
    steps = ["--lr", "1e-3", "--batch-tokens", str(given.batch_tokens), "--measure-depths", "15"]
    _train(given, results, "block", ["--method", given.method, "--causal", *sizes, *loss, *steps])


def eagle3(given: argparse.Namespace, results: Results) -> None:
    sizes = ["--draft-vocab", str(given.draft_vocab), "--intermediate-size", "1152"]
    steps = ["--lr", "1e-3", "--batch-tokens", str(given.batch_tokens), "--measure-depths", "5"]
    _train(given, results, "eagle3", ["--method", "eagle3", *sizes, *steps])


def questions(given: argparse.Namespace, name: str, count: int, skip: int = 0) -> list[Conversation]:
    lines = (given.data / "eval" / f"{name}.jsonl").read_text().splitlines()[skip : skip + count]
    return [Conversation((Turn("user", json.loads(line)["turns"][0]),)) for line in lines]


def trees(given: argparse.Namespace, results: Results) -> None:
    """Measure the block head on the model's greedy answers to questions that it was not trained on."""
    if given.method == "domino":
        results.add("trees", "left out", "a Domino head scores by its path; part `speed` gives its tokens a round")
        return
    tokenizer, model = target_of(given)
    head, _ = load_block_head(given.work / "block", given.method, model)
    head.requires_grad_(False)
    sets: dict[str, list[Sample]] = {}
    for name in EVAL:
        sets[name] = generate_answers(
            model,
            tokenizer,
            answer_prompts(questions(given, name, given.tree_prompts), tokenizer),
            temperature=0.0,
            max_new_tokens=given.answer_tokens,
            batch_size=given.batch,
            seed=0,
            progress=False,
        )
    for name, samples in sets.items():
        started = time.monotonic()
        found = tokens_per_round(head, model, samples, WIDTHS)
        figures: dict[str, Any] = {key: round(value, 3) for key, value in found.items()}
        figures["prompts"], figures["seconds"] = len(samples), round(time.monotonic() - started, 1)
        results.add("trees", name, figures)


def arms(given: argparse.Namespace, target: Path) -> dict[str, SpeculativeConfig | None]:
    """Return the engines to measure, the most telling first."""
    found: dict[str, SpeculativeConfig | None] = {"plain": None}
    head, eagle = given.work / "block", given.work / "eagle3"
    static: dict[str, Any] = {"adaptive": False}
    later: dict[str, SpeculativeConfig | None] = {}
    if (head / "model.safetensors").is_file():
        shape = block_tree_keys(head, target)
        depth = shape["num_steps"]
        given_method: Any = given.method
        assert given_method in BLOCK_METHODS
        path = str(head)
        found["block tree 63"] = SpeculativeConfig(path, given_method, **shape, **static)
        found["block adaptive"] = SpeculativeConfig(path, given_method, **shape)
        later["block chain"] = SpeculativeConfig(path, given_method, depth, 1, depth + 1, **static)
        for width in (16, 32, 128):
            later[f"block tree {width}"] = SpeculativeConfig(
                path, given_method, depth, shape["top_k"], max(width, depth + 1), **static
            )
    if (eagle / "model.safetensors").is_file():
        found["EAGLE-3 tree 16"] = SpeculativeConfig(str(eagle), "eagle3", 5, 4, 16, **static)
        found["EAGLE-3 adaptive"] = SpeculativeConfig(str(eagle), "eagle3", 5, 4, 16)
        later["EAGLE-3 chain"] = SpeculativeConfig(str(eagle), "eagle3", 5, 1, 6, **static)
        later["EAGLE-3 tree 32"] = SpeculativeConfig(str(eagle), "eagle3", 6, 6, 32, **static)
        later["EAGLE-3 tree 63"] = SpeculativeConfig(str(eagle), "eagle3", 7, 8, 63, **static)
    found["suffix"] = SpeculativeConfig(method="suffix", num_steps=15, num_draft_tokens=16)
    return found | later


def speed(given: argparse.Namespace, results: Results) -> None:
    """Answer the same questions with every draft, at every batch size; compare the answers with those of `plain`."""
    folder = gguf_folder(given.target)
    tokenizer, _ = load_target(folder, torch.device("cpu"), torch.float32)
    count = 2 * max(given.batches) // len(EVAL) or 1
    prompts = {name: answer_prompts(questions(given, name, count), tokenizer) for name in EVAL}
    warm = [p for name in EVAL for p in answer_prompts(questions(given, name, count, 40), tokenizer)]
    sampling = SamplingParams(given.speed_tokens, 0.0, stop_token_ids=eos_token_ids(folder))
    plain: dict[str, list[list[int]]] = {}
    device = choose_device(given.device).type
    for arm, config in arms(given, folder).items():
        if time.time() > given.ends:
            results.add("speed", arm, "left out: no time")
            continue
        if given.arms and not any(word in arm for word in given.arms):
            continue
        started = time.monotonic()
        try:
            figures = _speed_of(given, config, folder, device, prompts, warm, sampling, plain)
        except Exception as error:  # one arm's fault is not the others': the bench goes on and reports it
            results.add("speed", arm, f"failed: {type(error).__name__}: {str(error)[:400]}")
            continue
        results.add("speed", arm, figures | {"seconds with start": round(time.monotonic() - started, 1)})


def _speed_of(
    given: argparse.Namespace,
    config: SpeculativeConfig | None,
    folder: Path,
    device: str,
    prompts: dict[str, list[list[int]]],
    warm: list[list[int]],
    sampling: SamplingParams,
    plain: dict[str, list[list[int]]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spec = measured_spec(config, max_running=max(given.batches), model=folder, device=device)
    with local_engine(spec) as engine:
        for batch in given.batches:
            engine.generate(warm[: max(len(EVAL), batch)], sampling, batch)
            for name, asked in _texts(prompts, batch, given.speed_prompts).items():
                key = f"{name}, batch {batch}"
                passes = [_decoded(engine, asked, sampling, batch) for _ in range(given.passes)]
                best = max(passes, key=lambda each: each.tokens / each.wall_s)
                answers = [list(request.output) for request in passes[0].requests]
                if config is None:
                    plain[key] = answers
                same = plain.get(key)
                differ = same and sum(a != b for a, b in zip(answers, same, strict=True))
                found[key] = {
                    "tokens/s": round(best.tokens / best.wall_s, 1),
                    "first tokens/s": round(passes[0].tokens / passes[0].wall_s, 1),
                    "tokens a round": round(best.tokens_per_round, 3),
                    "tokens": best.tokens,
                    "ms a step": round(best.wall_s / max(1, best.steps.total()) * 1e3, 3),
                    "steps": dict(best.steps + best.reasons),
                    "answers that differ": differ,
                    "of": len(answers),
                }
    return found


def _decoded(engine: LocalEngine, asked: list[list[int]], sampling: SamplingParams, batch: int) -> Decoding:
    decoded = Decoding()
    for i in range(0, len(asked), batch):
        decoded.add(engine, asked[i : i + batch], sampling, batch)
    return decoded


def _texts(prompts: dict[str, list[list[int]]], batch: int, count: int) -> dict[str, list[list[int]]]:
    """Return the prompts of each text for one request at a time, and of all texts together for more."""
    if batch == 1:
        return {name: asked[:count] for name, asked in prompts.items()}
    together = [asked[i] for i in range(max(map(len, prompts.values()))) for asked in prompts.values()]
    return {"all": together[: max(2 * batch, 4 * len(EVAL))]}


RUNS: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "regenerate": regenerate,
    "block": block,
    "eagle3": eagle3,
    "trees": trees,
    "speed": speed,
}


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "data", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", choices=("dspark", "dflash", "domino"), default="dspark", help="of the block head")
    parser.add_argument("--regenerate-s", type=float, default=150)
    parser.add_argument("--minutes", type=float, default=3, help="of each training, measuring included")
    parser.add_argument("--steps", type=int, help="of each training, at most")
    parser.add_argument("--speed-s", type=float, default=240, help="after which no engine is started")
    parser.add_argument("--limit", type=int, default=0, help="prompts to regenerate; 0: all")
    parser.add_argument("--batch", type=int, default=1024, help="prompts answered at once")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--held", type=int, default=48, help="held-out prompts that a training measures on")
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--anchors", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--draft-vocab", type=int, default=6144)
    parser.add_argument("--tree-prompts", type=int, default=16, help="of each text")
    parser.add_argument("--speed-prompts", type=int, default=6, help="of each text at batch size 1")
    parser.add_argument("--passes", type=int, default=1, help="of the same answers; the first and the best are printed")
    parser.add_argument("--speed-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--arms", nargs="+", help="engines whose names contain one of these words")
    parser.add_argument("--in-process", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def limit_s(given: argparse.Namespace, part: str) -> float:
    """Return the seconds after which a part is ended."""
    training = 60 * given.minutes * 1.15 + 60
    limits = {"regenerate": given.regenerate_s + 60, "block": training, "eagle3": training, "trees": 150}
    return limits.get(part, given.speed_s + 90)


def main() -> int:
    given = parsed()
    for folder in (given.work, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    if given.in_process is not None:
        given.ends = time.time() + given.speed_s
        RUNS[given.in_process](given, Results(given.out))
        return 0
    results = Results(given.out)
    results.add("run", "where", {"hardware": hardware(), "commit": commit()})
    failed = 0
    for part in given.parts:
        started = time.monotonic()
        command = [sys.executable, "-u", "-m", MODULE]
        command += [*sys.argv[1:], "--in-process", part]
        try:
            code: int | str = subprocess.run(command, timeout=limit_s(given, part)).returncode
        except subprocess.TimeoutExpired:
            code = "ended by its limit"
        failed += code != 0
        if part in ("block", "eagle3"):
            publish(given.work / part, given.out / part)
        results = Results(given.out)
        results.add("run", part, {"exit": code, "seconds": round(time.monotonic() - started, 1)})
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
