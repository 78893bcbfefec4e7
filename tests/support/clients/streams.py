"""Answers in rounds of several tokens, and accumulators of streams that refuse what any client may misread."""

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.fake_engine import Script, logprobs_of

Event = dict[str, Any]


_MAX_TOKENS = (4, 16, 64)  # most tokens of the small tokenizer are a byte: 64 are 16 of a model's


def in_rounds(answer: str, seed: int, tokenizer: Tokenizer) -> Script:
    """A script that says `answer` in rounds of random lengths, as speculation accepts them; others at each request.
    It ends with an end-of-sequence token. The waits between the rounds let other choices go first."""
    rng = random.Random(seed)
    tokens = [*tokenizer.encode(answer, add_special_tokens=False).ids, 0]

    def script(prompt: list[int], sampling: SamplingParams) -> Iterator[TokenDelta | float]:
        at = 0
        while at < len(tokens):
            chosen = tuple(tokens[at : at + rng.randint(1, rng.choice(_MAX_TOKENS))])
            at += len(chosen)
            yield rng.choice([0.0, 0.001])
            finish = "stop" if at == len(tokens) else None
            yield TokenDelta("", chosen, finish=finish, logprobs=logprobs_of(chosen, sampling))

    return script


def chat_message(chunks: Iterable[Event]) -> list[Event]:
    """The choices of a chat's chunks, as those of the document. A chunk has one call at most; only a call's first entry
    has id, type and name; calls follow each other."""
    choices: list[Event] = []
    for chunk in chunks:
        for part in chunk["choices"]:
            delta, index = part["delta"], part["index"]
            if index == len(choices):
                assert delta.pop("role") == "assistant", "a choice begins with its role, in the order of the choices"
                message = {"content": "", "reasoning_content": "", "tool_calls": []}
                choices.append({"message": message, "finish_reason": None, "logprobs": [], "token_ids": []})
            choice = choices[index]
            assert choice["finish_reason"] is None, "a choice goes on after its finish reason"
            _add_calls(choice["message"]["tool_calls"], delta.pop("tool_calls", []))
            delta.pop("reasoning", None)
            for name, text in delta.items():
                choice["message"][name] += text or ""
            choice["finish_reason"] = part["finish_reason"]
            choice["logprobs"] += (part.get("logprobs") or {}).get("content") or []
            choice["token_ids"] += part.get("token_ids", [])
    return choices


def _add_calls(calls: list[Event], parts: list[Event]) -> None:
    assert len(parts) <= 1, f"several calls in one chunk: {parts}"
    for part in parts:
        if part["index"] == len(calls):
            assert part["type"] == "function" and part["id"] and part["function"]["name"]
            calls.append(part)
        else:
            assert part["index"] == len(calls) - 1, "more of a call after the next one"
            assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]


def response_items(events: Iterable[Event]) -> list[Event]:
    """The items of a response's events, as the response that ends them has them. One item is open at a time; its deltas
    and its end name it, and the end repeats what the deltas said."""
    items: list[Event] = []
    is_open = False
    text = ""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            is_open, text = True, ""
        elif "output_index" in event:
            assert is_open and event["output_index"] == len(items) - 1
            assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
            assert kind.split(".")[0] in _PARTS[items[-1]["type"]], f"{kind} of {items[-1]}"
            if kind.endswith(".delta"):
                text += event["delta"]
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == text
            elif kind.endswith("_text.done"):
                assert event["text"] == text
            elif kind == "output_item.done":
                items[-1], is_open = event["item"], False
                whole = items[-1]["arguments"] if "arguments" in items[-1] else items[-1]["content"][0]["text"]
                assert whole == text
        elif kind in ("completed", "incomplete"):
            assert not is_open and event["response"]["output"] == items
    return items


_PARTS = {
    "function_call": ("function_call_arguments", "output_item"),
    "message": ("output_text", "content_part", "output_item"),
    "reasoning": ("reasoning_text", "content_part", "output_item"),
}


def message_blocks(events: Iterable[Event]) -> list[Event]:
    """The blocks of a message's events, as the document has them. One block is open at a time, and its deltas are of
    its type."""
    blocks: list[Event] = []
    text: str | None = None  # None: no block is open
    for event in events:
        if event["type"] == "content_block_start":
            assert text is None and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            text = ""
        elif event["type"] == "content_block_delta":
            assert text is not None and event["index"] == len(blocks) - 1
            kind, field = _DELTAS[blocks[-1]["type"]]
            assert event["delta"]["type"] == kind, f"{event['delta']} in {blocks[-1]}"
            text += event["delta"][field]
        elif event["type"] == "content_block_stop":
            assert text is not None and event["index"] == len(blocks) - 1
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(text or "{}")
            else:
                blocks[-1][blocks[-1]["type"]] = text
            text = None
        elif event["type"] == "message_delta":
            assert text is None
    return blocks


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def by_type(parts: Iterable[Event]) -> dict[str, list[Any]]:
    """The text of all items or blocks of a type, and the calls without their ids. Where the text stands between calls
    depends on the rounds."""
    found: dict[str, list[Any]] = {"calls": [], "text": [""], "thinking": [""]}
    for part in parts:
        if "name" in part:
            arguments = part["input"] if "input" in part else json.loads(part["arguments"])
            found["calls"].append((part["name"], arguments))
        else:
            kind = {"message": "text", "reasoning": "thinking"}.get(part["type"], part["type"])
            found[kind][0] += part[kind] if kind in part else part["content"][0]["text"]
    return found


def data_of(text: str) -> list[Event]:
    """The JSON of all events of a stream."""
    return [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if "data: {" in part]
