"""Acceptance by length of the context, of a draft that has read short texts only, with windows and without.

    python -m tests.bench.long_pair --output DIR --data FILES      # minutes on a GPU, see there
    python -m tests.bench.window --pair DIR --held gsm8k/test.jsonl [--contexts 2048 4096 8192 16384]
                                 [--windows 0 512 1024 2048] [--prompts 24] [--tokens 96]

Prompts are chats of about so many tokens, other people's questions and answers, with the same questions at their end in
every length; greedy answers, chains of three. Acceptance length is 1 + accepted / rounds, of the engine itself, with
the standard error over prompts. Window 0 is none. Beside it: how many answers are those without a window (all of them
in float32; in bfloat16 some part at near ties), and what the target loses per token of an answer that people wrote in
each length, which says whether it still knows what it is asked. A Markdown table, then one JSON line.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention.config import CacheConfig
from speculative.build import EngineSpec
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from speculative.training.rows import Conversation, read_conversations
from speculative.training.samples import prompt_tokens
from tests.bench.long_pair import pieces
from tests.bench.machine import git
from workers.config import ModelSource, SchedulerConfig, WorkerConfig
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

PAGE_SIZE = 16
LOSS_PROMPTS = 4
BEFORE = 2  # different beginnings of a length, which the prefix cache keeps


def long_prompts(
    parts: Sequence[list[int]], questions: Sequence[list[int]], begin: int, length: int
) -> list[list[int]]:
    """Each question at the end of a chat of at most `length` tokens. questions: as they follow other turns."""
    room = length - max(map(len, questions)) - 1
    beginnings, at = [], 0
    for _ in range(BEFORE):
        chat = [begin]
        while len(chat) + len(parts[at % len(parts)]) <= room:
            chat += parts[at % len(parts)]
            at += 1
        beginnings.append(chat)
    return [[*beginnings[i % BEFORE], *question] for i, question in enumerate(questions)]


def acceptance(requests: Sequence[Request]) -> tuple[float, float]:
    """1 + accepted / rounds, and its standard error over requests."""
    counts = [(sum(k * n for k, n in enumerate(r.acceptance_histogram)), sum(r.acceptance_histogram)) for r in requests]
    accepted, rounds = (sum(column) for column in zip(*counts, strict=True))
    rate = accepted / rounds
    error = math.sqrt(sum((a - rate * n) ** 2 for a, n in counts)) / rounds
    return 1 + rate, error


def spec_of(pair: Path, window: int, longest: int, tokens: int) -> EngineSpec:
    model = ModelSource(path=str(pair / "target"), max_model_len=longest + tokens + 16)
    pages = (BEFORE + 2) * longest // PAGE_SIZE + 1024
    worker = WorkerConfig(
        model,
        CacheConfig(page_size=PAGE_SIZE, num_pages=pages),
        SchedulerConfig(max_running=4, max_step_tokens=1024),
        measure_costs=False,
    )
    draft = SpeculativeConfig(str(pair / "draft"), adaptive=False, window=window or None)
    return EngineSpec(worker, draft)


@torch.no_grad()
def answer_loss(pair: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """The target's mean cross-entropy, in nats a token, of answers after prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).to(device).eval()
    losses = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=device)
        rows = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(model.get_output_embeddings()(rows), ids[0, len(prompt) :]))
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with `target` and `draft`")
    parser.add_argument("--held", nargs="+", required=True, help="rows that neither has read")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 512, 1024, 2048])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer at most")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    rows, begin = read_conversations(arguments.held), tokenizer.bos_token_id
    asked = rows[: arguments.prompts]
    questions = [prompt_tokens(Conversation(row.turns[:-1]), tokenizer)[1:] for row in asked]
    told = [tokenizer(row.turns[-1].content, add_special_tokens=False)["input_ids"] for row in asked]
    parts = pieces(rows[arguments.prompts :], tokenizer)
    sampling = SamplingParams(arguments.tokens, 0.0, stop_token_ids=(tokenizer.eos_token_id,))
    prompts = {length: long_prompts(parts, questions, begin, length) for length in arguments.contexts}
    losses = {
        length: answer_loss(arguments.pair, prompts[length][:LOSS_PROMPTS], told[:LOSS_PROMPTS])
        for length in arguments.contexts
    }
    print("| target's loss | " + " | ".join(f"{length:,}" for length in arguments.contexts) + " |")
    print("| --- |" + " --- |" * len(prompts))
    print("| nats a token | " + " | ".join(f"{loss:.2f}" for loss in losses.values()) + " |\n", flush=True)
    print("| window | " + " | ".join(f"{length:,}" for length in arguments.contexts) + " | last / first | equal |")
    print("| --- |" + " --- |" * (len(prompts) + 2))
    found: dict[int, dict[int, tuple[float, float]]] = {}
    plain: list[list[int]] = []
    for window in arguments.windows:
        row, outputs = {}, []
        spec = spec_of(arguments.pair, window, max(prompts), arguments.tokens)
        with local_engine(spec, all_graphs=False) as engine:
            for length, texts in prompts.items():
                requests = engine.generate(texts, sampling, 4)
                row[length] = acceptance(requests)
                outputs += [request.output for request in requests]
        plain = plain or outputs
        equal = sum(a == b for a, b in zip(plain, outputs, strict=True))
        found[window] = row
        cells = " | ".join(f"{value:.2f} ± {error:.2f}" for value, error in row.values())
        ratio = row[arguments.contexts[-1]][0] / row[arguments.contexts[0]][0]
        print(f"| {window or 'none'} | {cells} | {ratio:.3f} | {equal}/{len(outputs)} |", flush=True)
    print(
        json.dumps(
            {"bench": "window", "commit": git("rev-parse", "--short", "HEAD"), "loss": losses, "acceptance": found}
        )
    )


if __name__ == "__main__":
    main()
