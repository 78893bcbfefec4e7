"""What fewer bits cost the small models: held-out loss, and acceptance with drafts that were trained on 16 bits.

    python -m tests.bench fewer_bits --train gsm8k/train.jsonl --test gsm8k/test.jsonl [--only NAME NAME]

Each variant is made by `aerie quantize`, calibrated on rows of `--train`. Loss: rows of `--test`. Acceptance: tokens a
round of greedy answers to their first questions, chain 3/1/4, by the embedded EAGLE-3 head and DeepSeek's own module.
On a CPU weights are dequantised, and activations are not rounded.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aerie.attention.config import CacheConfig
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.deploy.arguments import parser as command_line
from aerie.deploy.bench.figures import table
from aerie.deploy.quantize.calibration import mean_loss, read_texts, reader
from aerie.deploy.quantize.checkpoint import quantise
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.training.rows import read_conversations
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.quality.decoding import accepted_tokens
from tests.support import MODELS, ROOT

CONCURRENCY = 8


@dataclass(frozen=True)
class Model:
    """options: of every variant."""

    folder: Path
    draft: SpeculativeConfig
    options: tuple[str, ...] = ()


SHAPE = {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4, "adaptive": False}
NAMES = {
    "embedded pair": Model(MODELS / "target", SpeculativeConfig(str(MODELS / "draft"), **SHAPE)),  # type: ignore[arg-type]
    "small DeepSeek": Model(
        ROOT / "tests" / "models" / "deepseek_tiny",
        SpeculativeConfig("", "mtp", **SHAPE),  # type: ignore[arg-type]
        ("--ignore", "re:.*q_b_proj"),  # its 48 inputs are no whole groups of 32
    ),
}
VARIANTS = {
    "w4a16, groups of 32": ("w4a16", "--group-size", "32"),
    "w4a16": ("w4a16",),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
    "w8a16": ("w8a16", "--group-size", "-1"),
    "w8a8": ("w8a8",),
    "fp8": ("fp8",),
}
CALIBRATED = ("w4a16, groups of 32", "w4a16", "mxfp4")
MAX_LENGTH = 512
SMALL = ("w4a16, groups of 32", "mxfp4", "nvfp4", "w8a16", "w8a8", "fp8")  # whose groups fit the small DeepSeek


def acceptance(model: Model, folder: Path, test: Path, rows: int) -> float:
    """Return 1 + accepted / rounds."""
    tokenizer = ChatTokenizer.from_folder(folder)
    questions = [row.messages()[:1] for row in read_conversations([str(test)])[:rows]]
    prompts = [tokenizer._encode(tokenizer.render(question), False) for question in questions]
    cache, scheduler = CacheConfig(16, num_pages=4096), SchedulerConfig(CONCURRENCY, 512)
    worker = WorkerConfig(ModelSource(str(folder), device="cpu"), cache, scheduler, measure_costs=False)
    sampling = SamplingParams(64, 0.0, stop_token_ids=tokenizer.eos_token_ids)
    with local_engine(EngineSpec(worker, model.draft)) as engine:
        requests = engine.generate(prompts, sampling, CONCURRENCY)
    return 1 + accepted_tokens(requests) / max(1, sum(sum(request.acceptance_histogram) for request in requests))


def loss(model: Model, folder: Path, test: Path, rows: int) -> float:
    """Return nats a token."""
    texts = read_texts(model.folder, [str(test)], rows, MAX_LENGTH)
    with reader(folder, max(map(len, texts))) as engine:
        return mean_loss(engine, texts, lambda: None)


def measured(model: Model, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    return {
        "MB": round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6, 2),
        "loss": round(loss(model, folder, arguments.test, arguments.rows), 4),
        "acceptance": round(acceptance(model, folder, arguments.test, arguments.questions), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.bench fewer_bits", description=__doc__)
    parser.add_argument("--train", type=Path, required=True, help="rows to calibrate on")
    parser.add_argument("--test", type=Path, required=True, help="rows of the loss, and questions")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    arguments = parser.parse_args()
    found: list[tuple[object, ...]] = []

    def add(name: str, variant: str, figures: dict[str, float]) -> None:
        found.append((name, variant, *figures.values()))
        print(json.dumps({"model": name, "variant": variant, **figures}), flush=True)

    for name in arguments.only:
        model = NAMES[name]
        add(name, "bfloat16", measured(model, model.folder, arguments))
        for variant in arguments.variants:
            if name != "embedded pair" and variant not in SMALL:
                continue
            for is_calibrated in (False, True) if variant in CALIBRATED else (False,):
                texts = ["--calibrate", str(arguments.train), "--calibration-rows", "64"] if is_calibrated else []
                with tempfile.TemporaryDirectory() as folder:
                    output = Path(folder) / "out"
                    command = ["quantize", str(model.folder), "--no-loss", "--output", str(output), *model.options]
                    quantise(command_line().parse_args([*command, *texts, "--scheme", *VARIANTS[variant]]))
                    add(name, f"{variant}, calibrated" if texts else variant, measured(model, output, arguments))
    print(*table(["model", "variant", "MB", "loss", "acceptance"], found), sep="\n")
    return 0
