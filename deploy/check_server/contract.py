"""Checks what clients of any server rely on. Each check asks the server alone and beside neighbours, and returns what
it found wrong; where a server's answers depend on the batch, only that which must hold for any answer counts."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.deploy.check_server.ask import CHAT, COMPLETIONS, Asker, Sample, Usage, neighbours, words_of
from aerie.deploy.client import AnswerError

ROWS = 8  # lines of a list whose lines have identifiers
STOPS = 4  # strings that are tried as a stop for each answer
NAMES = (
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "inlet",
    "jasper",
    "kestrel",
    "laurel",
    "meadow",
    "nectar",
    "onyx",
    "prairie",
    "quartz",
    "raven",
    "summit",
    "tundra",
    "umber",
    "valley",
    "willow",
    "xenon",
    "yarrow",
    "zephyr",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": "Get the weather forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Result:
    """What a check found.

    checked: how many answers it looked at; 0 with the reason in `skipped`.
    problems: one line each.
    """

    name: str
    checked: int = 0
    skipped: str = ""
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


@dataclass(frozen=True)
class Setting:
    """How many answers the checks ask for, and how.

    count: answers a check asks for.
    max_tokens: maximum tokens of each answer.
    others: neighbours while it runs.
    seed: seed of the random prompts.
    """

    count: int
    max_tokens: int
    others: int
    seed: int

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}-{name}")


async def copies(ask: Asker, setting: Setting) -> Result:
    """Find identifiers that the model copies right alone and wrong beside others: KV or tokens of another request."""
    result, rng = Result("identifiers copied under load"), setting.rng("copies")
    prompts, wanted = [], []
    for _ in range(setting.count):
        rows = [f"{word}: {rng.getrandbits(64):016x}" for word in rng.sample(NAMES, ROWS)]
        prompts.append("\n".join(("Copy the list.", *rows, "", "Copy:", *rows[: ROWS // 2], "")))
        wanted.append(rows[ROWS // 2])
    body: dict[str, Any] = {"temperature": 0, "max_tokens": setting.max_tokens}
    alone = [await ask.complete(prompt, **body) for prompt in prompts]
    copied = [want in answer.text for want, answer in zip(wanted, alone, strict=True)]
    if not any(copied):
        result.skipped = "the model copies no identifier even alone"
        return result
    async with neighbours(ask, setting.others, 100, setting.seed):
        concurrent = [await ask.complete(prompt, **body) for prompt in prompts]
    for want, was_copied, answer in zip(wanted, copied, concurrent, strict=True):
        result.checked += was_copied
        result.expect(not was_copied or want in answer.text, f"{want!r} became {answer.text[: len(want) + 8]!r}")
    return result


async def stop_strings(ask: Asker, setting: Setting) -> Result:
    """Find answers with text after a stop string, whole and streamed, wherever the string lies in tokens."""
    result, rng = Result("stop strings"), setting.rng("stops")
    async with neighbours(ask, setting.others, 100, setting.seed + 1):
        for _ in range(setting.count):
            body: dict[str, Any] = {"prompt": words_of(rng, 20), "temperature": 0, "max_tokens": setting.max_tokens}
            text = (await ask.complete(**body)).text
            for _ in range(min(STOPS, max(0, len(text) - 3))):
                start = rng.randrange(1, len(text) - 1)
                stop = text[start : start + rng.randint(1, 4)]
                if not stop.strip():
                    continue
                whole = await ask.complete(**body, stop=[stop])
                streamed, reason = joined(await ask.stream(COMPLETIONS, {**body, "stop": [stop]}))
                _expect_stopped(result, stop, text, whole.text, whole.finish, "whole")
                _expect_stopped(result, stop, text, streamed, reason, "streamed")
                result.checked += 2
    if not result.checked:
        result.skipped = "the answers have no text"
    return result


def _expect_stopped(result: Result, stop: str, text: str, answer: str, finish: str, how: str) -> None:
    """Expect an answer that ends before `stop`. If it begins as `text` does, it must be `text` up to there."""
    result.expect(stop not in answer, f"{how}: the answer contains its stop string {stop!r}: {answer[-40:]!r}")
    expected = text[: text.index(stop)]
    if answer == expected:
        result.expect(finish == "stop", f"{how}: finish_reason {finish!r} after the stop string {stop!r}")
    elif text.startswith(answer) or answer.startswith(expected):
        result.problems.append(
            f"{how}: with stop {stop!r} the answer ends with {answer[-20:]!r}, not {expected[-20:]!r}"
        )


async def streams(ask: Asker, setting: Setting) -> Result:
    """Find streams whose text is not the whole answer's."""
    result, rng = Result("streamed text"), setting.rng("streams")
    for _ in range(setting.count):
        body: dict[str, Any] = {"prompt": words_of(rng, 30), "temperature": 0, "max_tokens": setting.max_tokens}
        whole, again = await ask.complete(**body), await ask.complete(**body)
        chunks = await ask.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        text, reason = joined(chunks)
        result.checked += 1
        if whole.text == again.text:
            result.expect(text == whole.text, f"streamed {text[-40:]!r}, whole {whole.text[-40:]!r}")
            result.expect(reason == whole.finish, f"streamed finish_reason {reason!r}, whole {whole.finish!r}")
        result.expect("\ufffd" not in text or "\ufffd" in whole.text, f"a broken character in {text[-40:]!r}")
        usages = [chunk for chunk in chunks if chunk.get("usage")]
        asked = bool(usages) and not usages[-1].get("choices") and usages[-1] is chunks[-1]
        result.expect(asked, "the last chunk with include_usage is not one of usage alone")
        if usages:
            _expect_sum(result, Usage.of(usages[-1]), "streamed")
            prompt = Usage.of(usages[-1]).prompt
            result.expect(prompt == whole.usage.prompt, f"prompt_tokens {prompt} streamed, {whole.usage.prompt} whole")
    return result


async def usages(ask: Asker, setting: Setting) -> Result:
    """Find counts of tokens that do not add up, and log-probabilities of other tokens than the text's."""
    result, rng = Result("usage and log-probabilities"), setting.rng("usage")
    async with neighbours(ask, setting.others, 100, setting.seed + 2):
        for number in range(setting.count):
            limit = rng.randint(1, setting.max_tokens)
            prompt = words_of(rng, rng.randint(1, 60))
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": limit, "temperature": 1.0}
            answer = await ask.complete(**body, seed=number)
            _expect_counts(result, answer, limit)
            two = await ask.post(COMPLETIONS, {**body, "n": 2, "seed": number})
            usage = Usage.of(two)
            _expect_sum(result, usage, "n=2")
            places = sorted(choice["index"] for choice in two["choices"])
            result.expect(places == [0, 1], f"n=2 has choices of index {places}")
            if all(choice.get("finish_reason") == "length" for choice in two["choices"]):
                result.expect(usage.completion == 2 * limit, f"n=2: {usage.completion} tokens, {2 * limit} allowed")
            result.checked += 2
    return result


def _expect_counts(result: Result, one: Sample, limit: int) -> None:
    """Check that counts of tokens, log-probabilities and text agree. limit: the request's `max_tokens`."""
    _expect_sum(result, one.usage, "whole")
    count = one.usage.completion
    result.expect(count <= limit, f"{count} tokens, {limit} allowed")
    if one.finish == "length":
        result.expect(count == limit, f"finish_reason 'length' after {count} tokens, {limit} allowed")
    if one.logprobs:
        result.expect(
            len(one.logprobs) in (count, count - 1), f"{len(one.logprobs)} log-probabilities of {count} tokens"
        )
        above = [value for value in one.logprobs if value is not None and value > 1e-3]
        result.expect(not above, f"log-probabilities above 0: {above[:3]}")
    text = "".join(one.tokens)
    if one.tokens and not text.startswith("token_id:") and "\ufffd" not in text + one.text:
        result.expect(text.startswith(one.text), f"tokens {text[:40]!r} are not those of the text {one.text[:40]!r}")


def _expect_sum(result: Result, usage: Usage, how: str) -> None:
    holds = min(usage.prompt, usage.completion) >= 0 and usage.total == usage.prompt + usage.completion
    result.expect(holds, f"{how}: {usage.prompt} + {usage.completion} tokens are {usage.total}")


async def tool_calls(ask: Asker, setting: Setting) -> Result:
    """Find streamed tool calls that a strict client cannot put together, or that are not the whole answer's."""
    result, rng = Result("tool calls"), setting.rng("tools")
    for number in range(setting.count):
        city = rng.choice(NAMES).title()
        content = f"What is the weather in {city} over the next {number % 7 + 1} days?"
        body = {
            "messages": [{"role": "user", "content": content}],
            "tools": [TOOL],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": max(128, setting.max_tokens),
        }
        try:
            first, second = await ask.post(CHAT, body), await ask.post(CHAT, body)
        except AnswerError as error:
            result.skipped = f"the server answers: {error}"[:160]
            return result
        streamed, reason = assembled(result, await ask.stream(CHAT, body))
        result.checked += 1
        choice = first["choices"][0]
        whole = [_called(call) for call in choice["message"].get("tool_calls") or ()]
        if choice.get("finish_reason") == "length" or reason == "length":
            continue
        result.expect(bool(whole) and bool(streamed), "tool_choice 'required' gave no call")
        for name, arguments in (*whole, *streamed):
            _expect_arguments(result, name, arguments)
        if choice["message"].get("tool_calls") and whole == [
            _called(call) for call in second["choices"][0]["message"].get("tool_calls") or ()
        ]:
            result.expect(streamed == whole, f"streamed {streamed}, whole {whole}"[:200])
            result.expect(reason == choice["finish_reason"], f"finish {reason!r} and {choice['finish_reason']!r}")
    return result


def assembled(result: Result, chunks: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, str]], str]:
    """Put streamed calls together as openai-python does. Return names and arguments in order, and the finish reason."""
    calls: dict[int, dict[str, str]] = {}
    reason = ""
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            deltas = choice.get("delta", {}).get("tool_calls") or ()
            places = [delta["index"] for delta in deltas]
            result.expect(len(set(places)) == len(places), f"a chunk has several deltas of one call: {places}")
            for delta in deltas:
                function = delta.get("function") or {}
                if delta["index"] not in calls:
                    result.expect(bool(delta.get("id")), "a call's first delta has no id")
                    result.expect(bool(function.get("name")), "a call's first delta has no name")
                    calls[delta["index"]] = {"id": delta.get("id") or "", "name": "", "arguments": ""}
                call = calls[delta["index"]]
                repeated = delta.get("id") or call["id"]
                result.expect(repeated == call["id"], f"a call's id changes from {call['id']!r} to {repeated!r}")
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
    ids = [call["id"] for call in calls.values()]
    result.expect(len(set(ids)) == len(ids), f"calls share an id: {ids}")
    return [(calls[index]["name"], calls[index]["arguments"]) for index in sorted(calls)], reason


def _called(call: dict[str, Any]) -> tuple[str, str]:
    return call["function"]["name"], call["function"]["arguments"]


def _expect_arguments(result: Result, name: str, arguments: str) -> None:
    result.expect(name == "get_forecast", f"a call of {name!r}, which is no tool")
    try:
        parsed = json.loads(arguments)
    except ValueError:
        result.problems.append(f"arguments are no JSON: {arguments[:60]!r}")
        return
    result.expect(isinstance(parsed, dict), f"arguments are no object: {arguments[:60]!r}")


def joined(chunks: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the text of a streamed completion and its finish reason."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or ()]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return "".join(choice.get("text") or "" for choice in choices), reasons[-1] if reasons else ""


CHECKS: tuple[Callable[[Asker, Setting], Awaitable[Result]], ...] = (
    copies,
    stop_strings,
    streams,
    usages,
    tool_calls,
)
