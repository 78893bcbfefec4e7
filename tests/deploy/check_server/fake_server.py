"""A small server with OpenAI's routes whose answers are a function of the request alone, and which can be given a
fault."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fake/model"
SYLLABLES = ("ka", "lo", "mi", "re", "su", "ta", "wen", "zo")


@dataclass
class FakeServer:
    """fault: what it does wrong; "" for nothing. neighbour_s: when the last drawn answer without log-probabilities was
    asked for. beside: whether one was in the last two seconds. known: prompts in its cache."""

    fault: str = ""
    neighbour_s: float = -math.inf
    beside: bool = False

    def __post_init__(self) -> None:
        self.known: set[tuple[str, str]] = set()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        owner = "other" if self.fault == "no switch" else "aerie"
        return JSONResponse({"data": [{"id": MODEL, "owned_by": owner, "max_model_len": 2000}]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        now_s = time.monotonic()
        if "logprobs" not in body and body.get("temperature") == 1.0:
            self.neighbour_s = now_s
        self.beside = now_s - self.neighbour_s < 2
        await asyncio.sleep(0.001)
        return self._stream(body) if body.get("stream") else JSONResponse(self._whole(body))

    def _seed(self, body: dict[str, Any], index: int) -> str:
        drawn = f"{body.get('seed')}-{index}" if body.get("temperature") else ""
        key = body.get("cache_salt", ""), body["prompt"]
        cached = key in self.known
        self.known.add(key)
        wrong = (
            (self.fault == "load" and self.beside)
            or (self.fault == "cache" and cached)
            or (self.fault == "speculation" and body.get("speculative", True))
        )
        return f"{body['prompt']}-{drawn}-{wrong}"

    def _tokens(self, body: dict[str, Any], index: int) -> list[str]:
        if "Copy:" in body["prompt"]:
            rows = body["prompt"].split("\n")[5:9]
            mixed = self.fault == "copies" and self.beside
            text = "\n".join(row[:-4] + "0000" if mixed else row for row in rows)
            return [text[place : place + 3] for place in range(0, len(text), 3)]
        seed = self._seed(body, index)
        numbers = [hashlib.sha256(f"{seed}-{place}".encode()).digest()[0] for place in range(body["max_tokens"])]
        return [(" " if number % 3 else "") + SYLLABLES[number % len(SYLLABLES)] for number in numbers]

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        tokens, finish = self._tokens(body, index), "length"
        tokens = tokens[: body["max_tokens"]]
        text = "".join(tokens)
        for stop in body.get("stop") or ():
            if stop in text:
                end = text.index(stop) + (len(stop) if self.fault == "stops" else 0)
                text, finish = text[:end], "stop"
        noise = 2**-20 if self.fault == "rounding" and self.beside else 0.0
        scores = [-len(token) / 8 - noise for token in tokens]
        if self.fault == "log-probabilities":
            scores = scores[2:]
        shown = {"tokens": tokens, "token_logprobs": scores, "top_logprobs": None}
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": shown}
        if body.get("return_token_ids") and self.fault != "no ids":
            choice["token_ids"] = [hash(token) % 1000 for token in tokens]
        return choice

    def _usage(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int]:
        prompt = len(body["prompt"].split())
        count = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count + (self.fault == "usage"),
        }

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(body, index) for index in range(body.get("n", 1))]
        return {"choices": choices, "usage": self._usage(body, choices)}

    def _stream(self, body: dict[str, Any]) -> Response:
        choice = self._choice(body, 0)
        text = choice["text"][1:] if self.fault == "streams" else choice["text"]
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": text[place : place + 5], "finish_reason": None}]}
            for place in range(0, len(text), 5)
        ]
        chunks.append({"choices": [{"index": 0, "text": "", "finish_reason": choice["finish_reason"]}]})
        if (body.get("stream_options") or {}).get("include_usage") and self.fault != "no usage":
            chunks.append({"choices": [], "usage": self._usage(body, [choice])})
        return _events(chunks)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        city = body["messages"][0]["content"].split()[5]
        arguments = json.dumps({"city": city, "days": 2})
        call = {"name": "get_forecast", "arguments": arguments}
        if not body.get("stream"):
            message = {"tool_calls": [{"id": "call-1", "type": "function", "function": call}]}
            return JSONResponse({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
        parts = [{"index": 0, "id": "call-1", "function": {"name": "get_forecast", "arguments": ""}}]
        for place in range(0, len(arguments), 4):
            piece: dict[str, Any] = {"index": 0, "function": {"arguments": arguments[place : place + 4]}}
            if self.fault == "tool id":
                piece["id"] = f"call-{place}"
            parts.append(piece)
        if self.fault == "tool arguments":
            parts.pop()
        groups = [parts[:1], parts[1:3], *([part] for part in parts[3:])]
        if self.fault != "tool chunk":
            groups = [[part] for part in parts]
        chunks = [{"choices": [{"delta": {"tool_calls": group}, "finish_reason": None}]} for group in groups]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
        return _events(chunks)


def _events(chunks: list[dict[str, Any]]) -> Response:
    async def lines() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
