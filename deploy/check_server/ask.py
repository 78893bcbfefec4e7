"""Sends requests to a server with OpenAI's routes, and reads what a client can see of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from aerie.cluster.config import ConfigError
from aerie.deploy.check_cache import WORDS
from aerie.deploy.client import AnswerError, Server, message_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_TRIES = 20  # of one request while the server refuses it as too busy
LONGEST_WAIT_S = 10.0  # before another try, whatever Retry-After says
BUSY = (429, 503)  # HTTP status codes after which a request is tried again
HEAD_START_S = 0.3  # time for neighbours to start before the first answer is asked for


@dataclass(frozen=True)
class Usage:
    """Counts of tokens; -1 where the server gives none."""

    prompt: int
    completion: int
    total: int

    @staticmethod
    def of(document: Mapping[str, Any]) -> Usage:
        usage = document.get("usage") or {}
        return Usage(*(usage.get(f"{name}_tokens", -1) for name in ("prompt", "completion", "total")))


@dataclass(frozen=True)
class Sample:
    """An answer to a completion.

    tokens: the text of each token, or "token_id:" and its id where the server gives ids.
    logprobs: log-probability of each token, as the server printed it.
    """

    text: str
    finish: str
    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    usage: Usage


@dataclass(frozen=True)
class Abilities:
    """What a server understands beyond OpenAI's fields.

    ids: returns token ids (`return_token_ids`: Aerie, vLLM).
    salt: keeps requests with a `cache_salt` of their own apart.
    switch: answers a request without speculation if it says `"speculative": false` (Aerie).
    """

    ids: bool
    salt: bool
    switch: bool


class Asker:
    """Requests answers of one model. Every method raises ConfigError if there is no server, and AnswerError if it
    answers with an error. A request that the server is too busy for is sent again."""

    def __init__(self, server: Server, model: str, client: httpx.AsyncClient) -> None:
        self._server = server
        self._model = model
        self._client = client
        self.abilities = Abilities(False, False, False)

    async def learn(self, owner: str) -> None:
        """Find out what the server understands. owner: `owned_by` of its model."""
        body = {"prompt": "river stone", "max_tokens": 1, "temperature": 0}
        ids = salt = True
        try:
            document = await self.post(COMPLETIONS, body | {"return_token_ids": True})
            ids = document["choices"][0].get("token_ids") is not None
        except AnswerError:
            ids = False
        try:
            await self.post(COMPLETIONS, body | {"cache_salt": "a"})
        except AnswerError:
            salt = False
        self.abilities = Abilities(ids, salt, owner == "aerie")

    async def complete(self, prompt: str, **more: Any) -> Sample:
        """Return one answer with the log-probabilities of its tokens."""
        body = {"prompt": prompt, "logprobs": 1, **more}
        if self.abilities.ids:
            body["return_token_ids"] = True
        document = await self.post(COMPLETIONS, body)
        choice = document["choices"][0]
        shown = choice.get("logprobs") or {}
        tokens = tuple(shown.get("tokens") or ())
        if self.abilities.ids:
            tokens = tuple(f"token_id:{token}" for token in choice.get("token_ids") or ())
        logprobs = tuple(shown.get("token_logprobs") or ())
        return Sample(choice["text"], choice.get("finish_reason") or "", tokens, logprobs, Usage.of(document))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON document of an answer."""
        for attempt in range(MAX_TRIES):
            async with self._sent(path, body) as reply:
                await reply.aread()
                if reply.status_code == 200:
                    return dict(reply.json())
                if reply.status_code not in BUSY or attempt + 1 == MAX_TRIES:
                    raise AnswerError(message_of(reply))
                wait_s = _seconds(reply.headers.get("retry-after", "1"))
            await asyncio.sleep(min(wait_s, LONGEST_WAIT_S))
        raise AssertionError("the last try returns or raises")

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks of a streamed answer."""
        chunks: list[dict[str, Any]] = []
        async with self._sent(path, {**body, "stream": True}) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise AnswerError(message_of(reply))
            async for line in reply.aiter_lines():
                if line.startswith("data:") and line.removeprefix("data:").strip() != "[DONE]":
                    chunks.append(json.loads(line.removeprefix("data:")))
        for chunk in chunks:
            if "error" in chunk:
                raise AnswerError(str(chunk["error"].get("message", chunk["error"])))
        return chunks

    @contextlib.asynccontextmanager
    async def _sent(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """Send a request; yields the reply with its body unread. Raises ConfigError without a reply."""
        url, document = f"{self._server.url}{path}", {"model": self._model, **body}
        try:
            async with self._client.stream("POST", url, json=document, headers=self._server.headers) as reply:
                yield reply
        except httpx.HTTPError as error:
            raise ConfigError(f"{url}: {type(error).__name__}: {error}") from None


def _seconds(header: str) -> float:
    try:
        return max(0.1, float(header))
    except ValueError:
        return 1.0


def words_of(rng: random.Random, count: int) -> str:
    """Return a text of `count` words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


@contextlib.asynccontextmanager
async def neighbours(ask: Asker, count: int, longest: int, seed: int) -> AsyncIterator[None]:
    """Keep `count` other requests of up to `longest` words at the server. They may fail; what they answer is not
    read."""
    rng = random.Random(f"neighbours-{seed}")

    async def one() -> None:
        """Send requests one after another until cancelled."""
        while True:
            prompt = words_of(rng, rng.randint(1, max(1, longest)))
            body = {"prompt": prompt, "max_tokens": rng.randint(4, 64), "temperature": 1.0}
            try:
                await ask.post(COMPLETIONS, body)
            except (AnswerError, ConfigError):
                await asyncio.sleep(0.5)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        if tasks:
            await asyncio.sleep(HEAD_START_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
