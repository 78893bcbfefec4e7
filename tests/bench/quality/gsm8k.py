"""GSM8K over HTTP: accuracy, invalid share, acceptance length and output tokens/s of a running server.

    python -m tests.bench gsm8k --data gsm8k/test.jsonl --shots-data gsm8k/train.jsonl --parallel 128
    python -m tests.bench gsm8k --data gsm8k/test.jsonl --num-questions 200 --compare

Few-shot prompts to /v1/completions, greedy, as SGLang's `bench_gsm8k` asks them: `Question: ... Answer: ...`, stopped
at the next "Question", the result the last number of the answer. --compare asks everything twice, with speculation on
and off, and counts equal answers. The shots are the first problems of --shots-data; without it those of --data, which
are then not asked. --chat asks a chat model instead, the shots as earlier turns. The prefix cache is emptied before
each pass. Prints one JSON line last; exits 1 if a request failed.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench.quality.word_problems import Problem, read_problems, word_problems

STOPS = ("Question", "Assistant:", "<|separator|>")
FLUSH_TRIES, FLUSH_PAUSE_S = 3, 2.0
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Reply:
    """One answer. num_rounds, num_accepted: of its speculative rounds, 0 where the server tells none. fault: why there
    is no text."""

    text: str = ""
    num_tokens: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Pass:
    """All replies of one pass over the questions, in their order, and the seconds it took."""

    replies: list[Reply]
    elapsed_s: float


def prompts_of(shots: Sequence[Problem], problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return what each problem's request to /v1/completions holds, all with the same examples in front."""
    examples = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return [{"prompt": f"{examples}Question: {problem.question}\nAnswer:", "stop": list(STOPS)} for problem in problems]


def chats_of(shots: Sequence[Problem], problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return what each problem's request to /v1/chat/completions holds."""
    turns = [turn for shot in shots for turn in (_said("user", shot.question), _said("assistant", shot.answer))]
    return [{"messages": [*turns, _said("user", problem.question)]} for problem in problems]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def result_of(text: str) -> float | None:
    """The last number in an answer, None if it has none. "$1,234.00" is 1234; SGLang's script would read 0 there."""
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


async def served_model(client: httpx.AsyncClient, url: str) -> str:
    """The name that clients ask for."""
    models = (await client.get(f"{url}/v1/models")).raise_for_status().json()
    return str(models["data"][0]["id"])


async def flush_cache(client: httpx.AsyncClient, url: str, pause_s: float = FLUSH_PAUSE_S) -> None:
    """Empty the prefix cache, which a server refuses while requests run: the last ones may just be ending.

    Raises RuntimeError with the server's answer after three tries."""
    answer = ""
    for attempt in range(FLUSH_TRIES):
        if attempt:
            await asyncio.sleep(pause_s)
        try:
            reply = await client.post(f"{url}/flush_cache", timeout=30)
        except httpx.HTTPError as error:
            answer = f"{type(error).__name__}: {error}"
            continue
        if reply.status_code == 200:
            return
        answer = f"{reply.status_code}: {reply.text[:300]}"
    raise RuntimeError(f"{url}/flush_cache was tried {FLUSH_TRIES} times; the last answer: {answer}")


async def ask_all(
    client: httpx.AsyncClient,
    url: str,
    prompts: Sequence[dict[str, Any]],
    max_tokens: int,
    parallel: int,
    speculative: bool | None = None,
) -> Pass:
    """Ask every prompt of `prompts_of` or `chats_of`, `parallel` at a time. speculative: sent along unless None."""
    base: dict[str, Any] = {"model": await served_model(client, url), "max_tokens": max_tokens, "temperature": 0}
    if speculative is not None:
        base["speculative"] = speculative
    places = asyncio.Semaphore(parallel)

    async def ask(prompt: dict[str, Any]) -> Reply:
        route = "chat/completions" if "messages" in prompt else "completions"
        async with places:
            try:
                answer = await client.post(f"{url}/v1/{route}", json=base | prompt)
            except httpx.HTTPError as error:
                return Reply(fault=f"{type(error).__name__}: {error}")
        return _reply(answer)

    started_s = time.perf_counter()
    replies = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    return Pass(list(replies), time.perf_counter() - started_s)


def _reply(answer: httpx.Response) -> Reply:
    if answer.status_code != 200:
        return Reply(fault=f"{answer.status_code}: {answer.text[:300]}")
    body = answer.json()
    rounds = body.get("metrics", {}).get("speculative_decoding", {})
    choice = body["choices"][0]
    return Reply(
        text=(choice["text"] if "text" in choice else choice["message"]["content"]) or "",
        num_tokens=body["usage"]["completion_tokens"],
        num_rounds=rounds.get("num_spec_steps", 0),
        num_accepted=rounds.get("num_accepted_draft_tokens", 0),
    )


def score(done: Pass, problems: Sequence[Problem]) -> dict[str, Any]:
    """The figures of one pass. acceptance_length: 1 + accepted / rounds over all answers, None without rounds."""
    results = [result_of(reply.text) for reply in done.replies]
    right = sum(result == problem.result for result, problem in zip(results, problems, strict=True))
    num_tokens = sum(reply.num_tokens for reply in done.replies)
    num_rounds = sum(reply.num_rounds for reply in done.replies)
    num_accepted = sum(reply.num_accepted for reply in done.replies)
    faults = [reply.fault for reply in done.replies if reply.fault]
    return {
        "num_questions": len(problems),
        "accuracy": round(right / len(problems), 4),
        "invalid": round(results.count(None) / len(problems), 4),
        "acceptance_length": round(1 + num_accepted / num_rounds, 3) if num_rounds else None,
        "latency_s": round(done.elapsed_s, 2),
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / done.elapsed_s, 1),
        "num_failed": len(faults),
        **({"first_fault": faults[0]} if faults else {}),
    }


def equality(first: Pass, second: Pass) -> dict[str, Any]:
    """How many answers of two passes are equal, and where the first unequal pair parts."""
    pairs = list(zip(first.replies, second.replies, strict=True))
    unequal = [(i, a.text, b.text) for i, (a, b) in enumerate(pairs) if a.text != b.text or a.fault or b.fault]
    found: dict[str, Any] = {"equal_share": round(1 - len(unequal) / len(pairs), 4), "num_unequal": len(unequal)}
    if unequal:
        index, a, b = unequal[0]
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        found["first_unequal"] = {
            "question": index,
            "after": a[max(0, at - 40) : at],
            "on": a[at : at + 40],
            "off": b[at : at + 40],
        }
    return found


async def evaluate(
    url: str,
    problems: Sequence[Problem],
    prompts: Sequence[dict[str, Any]],
    max_tokens: int = 512,
    parallel: int = 64,
    compare: bool = False,
) -> dict[str, Any]:
    """One pass, or with `compare` two: "on" and "off", and their equality. Raises RuntimeError if the prefix cache
    cannot be emptied."""
    arms: dict[str, bool | None] = {"on": True, "off": False} if compare else {"as_served": None}
    passes: dict[str, Pass] = {}
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        for name, speculative in arms.items():
            await flush_cache(client, url)
            passes[name] = await ask_all(client, url, prompts, max_tokens, parallel, speculative)
    figures: dict[str, Any] = {name: score(done, problems) for name, done in passes.items()}
    return figures | (equality(passes["on"], passes["off"]) if compare else {})


def report(figures: dict[str, Any]) -> list[str]:
    """For the reader."""
    lines = []
    for name, arm in figures.items():
        if not isinstance(arm, dict) or "accuracy" not in arm:
            continue
        length = "none told" if arm["acceptance_length"] is None else f"{arm['acceptance_length']:.3f}"
        lines += [
            *([] if name == "as_served" else [f"speculation {name}"]),
            f"Accuracy: {arm['accuracy']:.3f}",
            f"Invalid: {arm['invalid']:.3f}",
            f"Acceptance length: {length}",
            f"Latency: {arm['latency_s']:.3f} s",
            f"Output throughput: {arm['output_tokens_per_s']:.1f} token/s",
            *([f"FAILED: {arm['num_failed']}, the first: {arm['first_fault']}"] if arm["num_failed"] else []),
        ]
    if "equal_share" in figures:
        lines.append(f"Equal answers, on and off: {figures['equal_share']:.4f} ({figures['num_unequal']} unequal)")
    if "first_unequal" in figures:
        lines.append(f"The first unequal: {json.dumps(figures['first_unequal'])}")
    return lines


def problems_and_shots(arguments: argparse.Namespace) -> tuple[list[Problem], list[Problem]]:
    """Return what is asked, and what stands in front. Raises ValueError."""
    num_shots, count = arguments.num_shots, arguments.num_questions
    given = word_problems((count or 100) + num_shots) if arguments.data is None else read_problems(arguments.data)
    if arguments.shots_data is None:
        shots, rest = given[:num_shots], given[num_shots:]
    else:
        shots, rest = read_problems(arguments.shots_data)[:num_shots], given
    if len(shots) < num_shots or not rest:
        raise ValueError(
            f"{num_shots} shots and at least one question are wanted; there are {len(shots)} and {len(rest)}"
        )
    return rest[:count] if count else rest, shots


def add_data_options(parser: argparse.ArgumentParser, num_questions: int | None = None, max_tokens: int = 512) -> None:
    """What is asked, and how many at a time."""
    parser.add_argument("--data", type=Path, help="GSM8K's JSONL; without it, word problems made here")
    parser.add_argument("--shots-data", type=Path, help="JSONL whose first problems are the shots")
    parser.add_argument("--num-shots", type=int, default=8)
    parser.add_argument(
        "--num-questions",
        type=int,
        default=num_questions,
        help=f"default: {num_questions or 'all of --data, or 100 of those made here'}",
    )
    parser.add_argument("--parallel", type=int, default=64, help="requests at a time (default: 64)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        help=f"prompt and answer must fit the model's length (default: {max_tokens})",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    add_data_options(parser)
    parser.add_argument("--chat", action="store_true", help="ask /v1/chat/completions")
    parser.add_argument("--compare", action="store_true", help="with speculation on and off")
    arguments = parser.parse_args(argv)
    try:
        problems, shots = problems_and_shots(arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    prompts = (chats_of if arguments.chat else prompts_of)(shots, problems)
    figures = asyncio.run(
        evaluate(arguments.url, problems, prompts, arguments.max_tokens, arguments.parallel, arguments.compare)
    )
    print(*report(figures), sep="\n")
    print(json.dumps({"bench": "gsm8k", "data": str(arguments.data or "made here")} | figures))
    return int(any(isinstance(arm, dict) and arm.get("num_failed", 0) for arm in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
