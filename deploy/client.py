"""A client of a server's HTTP API, for `aerie chat` and `aerie bench`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from aerie.cluster.config import ConfigError
from aerie.deploy.arguments import DEFAULT_URL, KEY_VARIABLE

CONNECT_TIMEOUT_S = 10.0  # maximum time to connect


class AnswerError(Exception):
    """The server answered with an error; the message is the server's."""


@dataclass(frozen=True)
class Server:
    """A server with OpenAI's API.

    url: where the application is, without /v1.
    key: the API key, "" for none.
    """

    url: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str) -> Any:
        """Return a JSON document. Raises ConfigError if there is no server, AnswerError if it answers with an error."""
        try:
            reply = httpx.get(f"{self.url}{path}", headers=self.headers, timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code != 200:
            raise AnswerError(message_of(reply))
        return reply.json()

    def model(self, name: str = "") -> dict[str, Any]:
        """Return the card of the served model, or of `name` among several. Raises ConfigError."""
        try:
            cards = self.get("/v1/models")["data"]
        except AnswerError as error:
            raise ConfigError(f"{self.url}: {error}") from None
        for card in cards:
            if name in ("", card["id"]):
                return dict(card)
        served = ", ".join(card["id"] for card in cards)
        raise ConfigError(f"--model {name}: {self.url} serves {served}")

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of an answer; closing the generator aborts it. Raises ConfigError and AnswerError."""
        limits = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        asked = {**body, "stream": True}
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=asked, headers=self.headers, timeout=limits
            ) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise AnswerError(message_of(reply))
                for line in reply.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise AnswerError(chunk["error"]["message"])
                    yield chunk
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> ConfigError:
        reason = str(error) or type(error).__name__
        return ConfigError(f"{self.url}: no server answers ({reason}); start one with `aerie serve`, or give its URL")


def parse_server(arguments: argparse.Namespace) -> Server:
    """Return the server of the command line. Raises ConfigError."""
    url = str(arguments.url) if "://" in arguments.url else f"http://{arguments.url}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        where = urlsplit(url)
        valid = where.scheme in ("http", "https") and bool(where.hostname) and where.port != 0
        valid = valid and not where.query and not where.fragment
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{arguments.url}: must be a server's URL, such as {DEFAULT_URL}")
    return Server(url, arguments.key or os.environ.get(KEY_VARIABLE, ""))


def message_of(reply: httpx.Response) -> str:
    """Return the message of an error."""
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{reply.status_code} {reply.text[:200]}"
    return f"{message} (--key, or ${KEY_VARIABLE})" if reply.status_code == 401 else message
