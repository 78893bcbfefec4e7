"""The embedded pair behind `aerie serve` on whatever this host has, GPUs first: HTTP from the first answer to Ctrl-C.

    python -m tests.bench.served_gpu --data gsm8k/test.jsonl --shots-data gsm8k/train.jsonl

Starts deploy/eagle.yaml with one rank, device auto, and checks in turn: OpenAI's client (whole, streamed, sampled with
top_p and a seed, log-probabilities), GSM8K with speculation on and off, an aborted stream, a load of 32 streams with
and without speculation, and Ctrl-C under a running stream. Every part is tried whatever happened to the others. Prints
what it saw, the server's console, and one JSON line last; exits 1 if a part failed.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.bench import gsm8k
from tests.bench.machine import machine
from tests.bench.served import RunningServer, embedded_config, interrupt, running
from tests.bench.served_client import flush_cache, load, load_figures, served_model
from tests.bench.word_problems import word_problems

QUESTION = [{"role": "user", "content": "Mia has 3 boxes with 12 pens each. How many pens does she have?"}]
CONCURRENCY = 32


@dataclass
class Parts:
    """limit_s: of each part. figures: what each part found, by its name. failed: names."""

    limit_s: float
    figures: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    async def run(self, name: str, part: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        started_s = time.perf_counter()
        try:
            found = self.figures[name] = await asyncio.wait_for(part(), self.limit_s)
            verdict = "ok  "
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            found = self.figures[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            verdict = "FAIL"
        print(f"{verdict} {name} ({time.perf_counter() - started_s:.1f} s): {json.dumps(found)}", flush=True)


async def openai_requests(url: str) -> dict[str, Any]:
    """What OpenAI's client gets. One request must give one text: whole and streamed, and sampled with one seed."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        model = (await client.models.list()).data[0].id
        base: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 64}
        await client.chat.completions.create(**base)  # so that the prefix cache holds the same for all that follow
        whole = await client.chat.completions.create(**base, temperature=0)
        text = whole.choices[0].message.content
        stream = await client.chat.completions.create(**base, temperature=0, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        sampled = [
            (await client.chat.completions.create(**base, temperature=0.8, top_p=0.9, seed=seed))
            .choices[0]
            .message.content
            for seed in (7, 7, 8)
        ]
        named = await client.chat.completions.create(**base, temperature=0, logprobs=True, top_logprobs=3)
        entries = named.choices[0].logprobs.content
        assert len(entries) == named.usage.completion_tokens, "as many log-probabilities as tokens"
        assert all(abs(entry.logprob - entry.top_logprobs[0].logprob) < 1e-3 for entry in entries), "greedy: the best"
        assert text, "an empty answer"
        assert streamed == text, f"streamed {streamed!r}, whole {text!r}"
        assert sampled[0] == sampled[1], f"one seed, two answers: {sampled[:2]}"
        return {
            "text": text,
            "sampled": sampled[1:],
            "mean_logprob": sum(e.logprob for e in entries) / len(entries),
            "speculation": whole.model_extra["metrics"]["speculative_decoding"],
            "logprobs_text_equal": named.choices[0].message.content == text,
        }


async def compare(url: str, arguments: argparse.Namespace, chat: bool) -> dict[str, Any]:
    """GSM8K on and off, with shots or as the chat that the pair was trained for."""
    problems, shots = gsm8k.problems_and_shots(arguments)
    prompts = gsm8k.chats_of([], problems) if chat else gsm8k.prompts_of(shots, problems)
    figures = await gsm8k.evaluate(url, problems, prompts, arguments.max_tokens, arguments.parallel, compare=True)
    print(*gsm8k.report(figures), sep="\n", flush=True)
    assert not figures["on"]["num_failed"] and not figures["off"]["num_failed"], figures
    return figures


async def abort(url: str) -> dict[str, Any]:
    """A client that leaves after a few events; its slot and pages must be free soon."""
    async with httpx.AsyncClient(timeout=60) as client:
        body = {
            "model": await served_model(client, url),
            "prompt": "Once",
            "max_tokens": 1900,
            "stream": True,
            "ignore_eos": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(4):
                await anext(lines)
        left_s = time.perf_counter()
        while True:
            text = (await client.get(f"{url}/metrics")).text
            values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "{" in line}
            idle = not values["vllm:num_requests_running"] and not values["vllm:kv_cache_usage_perc"]
            if idle and 'finished_reason="abort"' in text:  # the figures may be half a second old
                break
            assert time.perf_counter() - left_s < 10, f"not aborted, or the answer had ended before: {values}"
            await asyncio.sleep(0.05)
        return {"freed_after_s": round(time.perf_counter() - left_s, 2)}


async def loaded(url: str, num_answers: int, speculative: bool, **sampling: Any) -> dict[str, Any]:
    """A warm-up, then `num_answers` streams of 128 tokens, 32 at a time, on an empty prefix cache."""
    prompts = gsm8k.chats_of([], word_problems(num_answers, seed=1))
    async with httpx.AsyncClient(timeout=60) as client:
        parameters = {"model": await served_model(client, url), "speculative": speculative, **sampling}
        await load(url, prompts[:CONCURRENCY], CONCURRENCY, max_tokens=64, **parameters)
        await flush_cache(client, url)
    return load_figures(*await load(url, prompts, CONCURRENCY, max_tokens=128, **parameters))


async def stop_under_load(server: RunningServer) -> dict[str, Any]:
    """Ctrl-C while a stream runs: it ends whole, new requests get 503, nothing is left."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        body = {"model": await served_model(client, server.url), "prompt": "Count", "ignore_eos": True}
        # As slow as one stream gets, so that it outlasts what happens meanwhile.
        long = body | {"max_tokens": 1200, "stream": True, "logprobs": 5, "speculative": False}
        async with client.stream("POST", f"{server.url}/v1/completions", json=long) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            stopping_s = time.perf_counter()
            left = asyncio.create_task(asyncio.to_thread(interrupt, server))
            statuses: list[int] = []
            while not statuses or statuses[-1] == 200:
                await asyncio.sleep(0.05)
                reply = await client.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 1})
                statuses.append(reply.status_code)
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2], rest[-2:]
        killed = await left
    assert not killed, f"had to be killed: {killed}"
    assert server.process.returncode == 0, f"exit status {server.process.returncode}"
    assert statuses[-1] == 503 and "retry-after" in reply.headers, f"{statuses[-1]}: {reply.text}"
    return {"refused_with": statuses[-1], "exit_status": 0, "stop_s": round(time.perf_counter() - stopping_s, 1)}


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """deploy/eagle.yaml with this host's number of ranks."""
    content = embedded_config()
    args = content["applications"][0]["args"]
    args["model"] |= {"device": arguments.device, "dtype": arguments.dtype}
    args["parallel"]["tensor_parallel"] = arguments.tensor_parallel
    args["cache"]["memory_gb"] = arguments.memory_gb
    args["engine"]["drain_timeout_s"] = 120  # the stream that runs during Ctrl-C takes seconds on a GPU only
    if arguments.shape:
        numbers = (int(number) for number in arguments.shape.split("/"))
        args["speculative"] |= dict(zip(("num_steps", "top_k", "num_draft_tokens"), numbers, strict=True))
    if arguments.attention:
        name = arguments.attention
        args["attention"] = {"prefill": name, "decode": name}
        args["draft_attention"] = {"prefill": name, "extend": name, "decode": name}
    return content


def ranks_of(server: RunningServer) -> list[str]:
    """The rows of the console's table of ranks: rank, node, pid, device."""
    lines = [line.partition(") ")[2] if line.startswith("(") else line for _, line in server.lines]
    return [line for line in lines if re.match(r"\d+ +\S+ +\d+  ", line)]


async def drive(server: RunningServer, arguments: argparse.Namespace, parts: Parts) -> None:
    """All parts against a server that answers."""
    parts.figures["start"] = {"ready_s": round(server.ready_s, 1), "ranks": ranks_of(server)}
    url, answers = server.url, arguments.load_answers
    await parts.run("openai", lambda: openai_requests(url))
    await parts.run("abort", lambda: abort(url))
    await parts.run("gsm8k", lambda: compare(url, arguments, chat=False))
    await parts.run("gsm8k_chat", lambda: compare(url, arguments, chat=True))
    await parts.run("load_on", lambda: loaded(url, answers, True, temperature=0))
    await parts.run("load_off", lambda: loaded(url, answers, False, temperature=0))
    await parts.run("load_sampled", lambda: loaded(url, answers, True, temperature=0.8, seed=1))
    await parts.run("load_top_p", lambda: loaded(url, answers, True, temperature=0.8, top_p=0.9, seed=1))
    health = httpx.get(f"{url}/health", timeout=10)
    parts.figures["health"] = {"status": health.status_code, "engines": health.json()["engines"]}
    await parts.run("stop", lambda: stop_under_load(server))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32; auto: the checkpoint's on a GPU")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--shape",
        default="",
        metavar="STEPS/TOP_K/TOKENS",
        help="a tree, for instance 5/4/16, in place of a chain 3/1/4",
    )
    parser.add_argument("--attention", default="", help="a backend for every phase of target and draft; else as auto")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="of the KV cache")
    parser.add_argument("--load-answers", type=int, default=256, help="of each load (default: 256)")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds until /health must be 200")
    parser.add_argument("--part-limit", type=float, default=300.0, help="seconds that a part may take")
    parser.add_argument("--no-haproxy", action="store_true", help="Serve's Python proxy")
    gsm8k.add_data_options(parser, num_questions=128, max_tokens=384)  # with 8 shots just below the pair's 2,048
    arguments = parser.parse_args()
    parts = Parts(arguments.part_limit)
    options = ["--no-haproxy"] if arguments.no_haproxy else []
    server: RunningServer | None = None
    try:
        with running("deploy.cli serve", config_of(arguments), *options, ready_limit_s=arguments.start_limit) as server:
            print(f"ready after {server.ready_s:.1f} s", flush=True)
            asyncio.run(drive(server, arguments, parts))
    except RuntimeError as error:
        parts.failed.append("serve")
        parts.figures["serve"] = {"error": str(error)[-4000:]}
        print(error)
    if server is not None:
        print(f"\nconsole\n{server.console()[-8000:]}\n")
    with contextlib.suppress(OSError):
        parts.figures["machine"] = machine()
    print(json.dumps({"bench": "served", "failed": parts.failed} | parts.figures))
    return int(bool(parts.failed))


if __name__ == "__main__":
    sys.exit(main())
