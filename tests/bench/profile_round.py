"""Where a round's time goes on a GPU: kernels by name, graph launches, copies to the host and idle time per round.

    python -m tests.bench profile_round --shape chain --batch 1 [--model llama-3.1-8b] [--rounds 30] [--prefill]
        [--tensor-parallel 2] [--block-draft dflash] [--deterministic]

With several ranks, of rank 0. With --deterministic, of an engine with `deterministic: true`. With --prefill the steps
of the batch's prompts instead, all figures per step.
"""

import argparse
import json
import tempfile
from pathlib import Path

from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.models import configured
from tests.bench.models.published import BLOCK_DRAFTS
from tests.bench.prompts import random_prompts
from tests.bench.quality.exact_cost import of_mode
from tests.bench.round import MODELS, SHAPES, Setting, engine_spec, hardware, write_checkpoints
from tests.bench.trace import figures, kernel_lines, profile, start, submit
from tests.bench.tracing.rank_zero import engine_with_rank_zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted({*MODELS, *configured.CONFIGS}), default="llama-3.1-8b")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="chain")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--block-draft", choices=BLOCK_DRAFTS, default="dflash", help="of qwen3-8b")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--deterministic", action="store_true", help="an engine with `deterministic: true`")
    parser.add_argument("--prefill", action="store_true", help="the prompts' steps instead of rounds")
    arguments = parser.parse_args()
    setting, batch, steps = Setting(), arguments.batch, arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), arguments.model, block_draft=arguments.block_draft)
        spec = engine_spec(Path(folder), arguments.shape, batch, setting, arguments.tensor_parallel, cuda_graphs=True)
        if arguments.deterministic:
            spec = of_mode(spec, "deterministic")
        prompts = random_prompts(spec.worker.model, batch, setting.prompt_tokens)
        with engine_with_rank_zero(spec) as engine:
            if arguments.prefill:
                steps = -(-batch * setting.prompt_tokens // spec.worker.scheduler.step_token_limit)
                engine.generate([[10] * setting.prompt_tokens] * batch, SamplingParams(1, 0.0), batch)
                submit(engine, prompts, 1)
            else:
                start(engine, prompts, setting.output_tokens)
            events = profile(engine, steps)
    print(*kernel_lines(events, steps, 40), sep="\n")
    print(
        json.dumps(
            {
                "bench": "profile_round",
                "hardware": hardware(),
                "shape": arguments.shape,
                "batch": batch,
                "tensor_parallel": arguments.tensor_parallel,
                "deterministic": arguments.deterministic,
                **figures(events, steps),
            }
        )
    )


if __name__ == "__main__":
    main()
