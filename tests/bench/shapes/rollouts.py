"""A rollout batch: many requests at once, with few long answers, as a step of reinforcement learning has them.

    python -m tests.bench rollouts [--model llama-3.1-8b] [--arms none chain tree adaptive] [--requests 512]
                                   [--acceptance 2.5] [--median 256] [--spread 8] [--max-running 256]

Groups of eight requests share a prompt of 256 tokens. Answers have lognormal lengths, of which the longest per cent are
`spread` times the median. Engines with dummy weights and synthetic acceptance, without HTTP. `none` has no draft, chain
and tree run one shape, adaptive chooses among those of the tree. Each arm runs two batches with prompts of their own,
and the second one counts.

A table: seconds of the batch, times as fast as without a draft, and the least of that over the batch: at every
twentieth of the tokens, how much sooner the arm had written as many. Then one JSON line, with the steps by shape up to
each twentieth. Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU.
"""

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from aerie.attention.config import CacheConfig
from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.prompts import random_prompts
from tests.bench.round import MODELS, drafted_by, write_checkpoints

ARMS = {"none": None, "chain": (3, 1, 4), "tree": (5, 4, 8), "adaptive": (5, 4, 8)}
GROUP = 8
Z_OF_99 = 2.326  # standard normal quantile
PARTS = 20


def lengths(count: int, median: int, spread: float, longest: int) -> list[int]:
    """Return tokens of the answers, at most `longest`."""
    drawn = np.random.default_rng(0).lognormal(math.log(median), math.log(spread) / Z_OF_99, count)
    return [int(length) for length in np.clip(drawn, 8, longest)]


def engine_spec(folder: Path, arm: str, longest: int, arguments: argparse.Namespace) -> EngineSpec:
    """longest: tokens of a request."""
    worker = WorkerConfig(
        ModelSource(path=str(folder / "target"), load_format="dummy", max_model_len=longest + 64),
        CacheConfig(num_pages=arguments.pool_tokens // CacheConfig().page_size),
        SchedulerConfig(max_running=arguments.max_running),
    )
    shape = ARMS[arm]
    if shape is None:
        return EngineSpec(worker)
    draft = SpeculativeConfig(
        *drafted_by(folder), *shape, adaptive=arm == "adaptive", synthetic_acceptance_length=arguments.acceptance
    )
    return EngineSpec(worker, draft)


@dataclass
class Progress:
    """Seconds after which each twentieth of the tokens was written, and the steps of each shape until then."""

    seconds: list[float] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)


def progress(spec: EngineSpec, prompts: Sequence[list[int]], answers: Sequence[int]) -> Progress:
    """prompts: of two batches."""
    half = len(prompts) // 2
    with local_engine(spec) as engine:
        _progress(engine, prompts[:half], answers)
        return _progress(engine, prompts[half:], answers)


def _progress(engine: LocalEngine, prompts: Sequence[list[int]], answers: Sequence[int]) -> Progress:
    reached, before = Progress(), Counter(engine.scheduler.stats.steps_by_shape)
    written, total = 0, sum(answers)

    def listen(output: RequestOutput) -> None:
        nonlocal written
        written += len(output.tokens)
        while len(reached.seconds) < PARTS and written * PARTS >= total * (len(reached.seconds) + 1):
            reached.seconds.append(time.perf_counter() - started_s)
            reached.steps.append(dict(Counter(engine.scheduler.stats.steps_by_shape) - before))

    requests = [
        Request(f"r{i}", prompts[i // GROUP], SamplingParams(length, 1.0, seed=i)) for i, length in enumerate(answers)
    ]
    started_s = time.perf_counter()
    engine.run(requests, len(requests), listen)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--acceptance", type=float, default=2.5, help="tokens of a round, mean")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--median", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--spread", type=float, default=8.0, help="the 99th percentile's length over the median's")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of an answer, at most")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--pool-tokens", type=int, default=600_000)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens: a trial on any machine")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.model, arguments.requests, arguments.prompt_tokens = "tiny", 16, 24
        arguments.median, arguments.longest, arguments.max_running, arguments.pool_tokens = 12, 96, 8, 4096
    answers = lengths(arguments.requests, arguments.median, arguments.spread, arguments.longest)
    rows, reached = [], dict[str, Progress]()
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        write_checkpoints(folder, arguments.model)
        for arm in arguments.arms:
            spec = engine_spec(folder, arm, arguments.prompt_tokens + max(answers), arguments)
            prompts = random_prompts(spec.worker.model, 2 * -(-len(answers) // GROUP), arguments.prompt_tokens)
            reached[arm] = progress(spec, prompts, answers)
            base, own = reached.get("none", reached[arm]).seconds, reached[arm].seconds
            gains = [without / having for without, having in zip(base, own, strict=True)]
            rows.append((arm, round(own[-1], 2), round(gains[-1], 3), round(min(gains), 3)))
            print(*rows[-1], flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print(*table(["arm", "seconds", "times as fast", "least"], rows), sep="\n")
    of = {"bench": "rollouts", "hardware": hardware(), "commit": commit(), "model": arguments.model}
    print(
        json.dumps(
            of
            | {"requests": len(answers), "tokens": sum(answers)}
            | {"arms": {k: asdict(v) for k, v in reached.items()}}
        )
    )


if __name__ == "__main__":
    main()
