"""`aerie eval-draft`: measures the mean accepted length of a draft on prompts from a file, with the engine of a config
file, without Ray and HTTP."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from aerie.cluster.assembly import engine_spec
from aerie.cluster.config import ConfigError
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.deploy.checks import check_checkpoints
from aerie.deploy.config.model import read_file
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.training import TrainingError
from aerie.speculative.training.rows import read_conversations
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput


@dataclass(frozen=True)
class DraftReport:
    """The measured acceptance of a draft.

    acceptance_length: 1 + accepted / rounds. per_position[k]: share of rounds that accepted at least k + 1 tokens.
    output_tokens_per_s: over the whole run, including prompts.
    """

    num_prompts: int
    num_rounds: int
    output_tokens: int
    output_tokens_per_s: float
    acceptance_length: float
    per_position: tuple[float, ...]
    histogram: tuple[int, ...]


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ConfigError and TrainingError."""
    try:
        report = _evaluate_file(arguments)
    except (ConfigError, TrainingError):
        raise
    except ValueError as error:  # from the engine: a checkpoint that does not fit, a prompt that can never run
        raise ConfigError(str(error)) from error
    print_report(report)
    return 0


def _evaluate_file(arguments: argparse.Namespace) -> DraftReport:
    conversations = read_prompts(arguments.prompts, arguments.limit)
    config = read_file(arguments.config).config
    check_checkpoints(config)
    spec = with_shape(engine_spec(config), arguments)
    tokenizer = ChatTokenizer.from_folder(config.model.path, template_file=config.ingress.chat_template)
    texts = [tokenizer.render(messages) for messages in conversations]
    prompts = [asyncio.run(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    sampling = SamplingParams(
        arguments.max_tokens, arguments.temperature, seed=1, stop_token_ids=tokenizer.eos_token_ids
    )
    return evaluate(spec, prompts, sampling, arguments.concurrency)


def with_shape(spec: EngineSpec, arguments: argparse.Namespace) -> EngineSpec:
    """Return the engine with the tree of the command line. Raises ValueError without a draft."""
    if spec.speculative is None:
        raise ValueError("speculative: the config file has no such section; eval-draft needs a draft")
    names = ("num_steps", "top_k", "num_draft_tokens")
    changes = {name: value for name, value in vars(arguments).items() if name in names}
    return dataclasses.replace(spec, speculative=dataclasses.replace(spec.speculative, **changes))


def read_prompts(source: str, limit: int) -> list[list[dict[str, str]]]:
    """Return chat messages of the first `limit` rows, up to each conversation's first answer."""
    prompts = []
    for conversation in read_conversations([source])[:limit]:
        messages = conversation.messages()
        first_answer = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        prompts.append(messages[:first_answer])
    return prompts


def evaluate(
    spec: EngineSpec, prompts: Sequence[Sequence[int]], sampling: SamplingParams, concurrency: int
) -> DraftReport:
    """Answer `prompts` (token ids) and count accepted drafts. Shows a progress bar on a terminal."""
    requests = [Request(f"eval-{i}", list(prompt), sampling) for i, prompt in enumerate(prompts)]
    with local_engine(spec) as engine, tqdm(total=len(requests), unit=" prompts", disable=None) as bar:

        def listen(output: RequestOutput) -> None:
            bar.update(output.finish_reason is not None)

        started_s = time.perf_counter()
        engine.run(requests, concurrency, listen)
        elapsed_s = time.perf_counter() - started_s
    return report_of(requests, elapsed_s)


def report_of(requests: Sequence[Request], elapsed_s: float) -> DraftReport:
    """Return the figures of finished requests."""
    width = max((len(r.acceptance_histogram) for r in requests), default=0)
    histogram = [0] * width
    for request in requests:
        for k, count in enumerate(request.acceptance_histogram):
            histogram[k] += count
    num_rounds = sum(histogram)
    accepted = sum(k * count for k, count in enumerate(histogram))
    tokens = sum(len(r.output) for r in requests)
    return DraftReport(
        num_prompts=len(requests),
        num_rounds=num_rounds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / elapsed_s,
        acceptance_length=1 + accepted / max(1, num_rounds),
        per_position=tuple(sum(histogram[k:]) / max(1, num_rounds) for k in range(1, width)),
        histogram=tuple(histogram),
    )


def print_report(report: DraftReport) -> None:
    """Print a short table, then one JSON line."""
    print(f"prompts             {report.num_prompts}")
    print(f"output tokens       {report.output_tokens} ({report.output_tokens_per_s:.0f}/s, prompts included)")
    print(f"rounds              {report.num_rounds}")
    print(f"acceptance length   {report.acceptance_length:.3f}   (1 + accepted / rounds)")
    for position, share in enumerate(report.per_position, 1):
        print(f"  position {position}        {share:.3f} of rounds")
    print(json.dumps(dataclasses.asdict(report)))
