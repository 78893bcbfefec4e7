"""`aerie chat`: a conversation in the terminal that shows how tokens come: a line in, an answer out."""

from __future__ import annotations

import argparse
import base64
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from aerie.deploy.client import AnswerError, Server, parse_server

STYLES = {True: "green", False: "magenta", None: ""}  # is a token drafted; None: unknown

# Nor as commands to the terminal.
_SHOWN = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ConfigError."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and keys to edit with

    server = parse_server(arguments)
    conversation = Conversation(
        str(server.model(arguments.model)["id"]),
        not arguments.no_spec,
        arguments.temperature,
        arguments.max_tokens,
        arguments.seed,
        arguments.system,
    )
    console = Console(highlight=False)
    return chat(server, conversation, console, lambda: console.input("[bold cyan]> [/bold cyan]"))


def chat(server: Server, conversation: Conversation, console: Console, read: Callable[[], str]) -> int:
    """Run until `read` raises EOFError (Ctrl-D) or a line is /quit. KeyboardInterrupt (Ctrl-C) stops an answer, or
    drops a line. Raises ConfigError if the server cannot be reached."""
    console.print(f"[bold]{conversation.model}[/bold] at {server.url}. /help says what can be done; Ctrl-D leaves.")
    console.print(f"[{STYLES[True]}]drafted and accepted[/], [{STYLES[False]}]the target's own token[/]\n")
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            console.print()
            continue
        except EOFError:
            console.print()
            return 0
        if line == "/quit":
            return 0
        if line.startswith("/"):
            try:
                console.print(conversation.command(line), style="dim", markup=False)
            except CommandError as error:
                console.print(str(error), style="red", markup=False)
        elif line:
            answer(server, conversation, console, line)


def answer(server: Server, conversation: Conversation, console: Console, prompt: str) -> None:
    """Show the answer to `prompt` as it arrives. A stopped answer stays in the conversation, a failed one does not.
    Raises ConfigError."""
    answer = StreamedAnswer(time.monotonic())
    end = ""
    try:
        with contextlib.closing(server.stream_chat(conversation.body(prompt))) as chunks:
            for chunk in chunks:
                for text, drafted in answer.push(chunk, time.monotonic()):
                    # Text, so that a model's output is never interpreted as markup.
                    console.print(Text(text.translate(_SHOWN), style=STYLES[drafted]), end="", soft_wrap=True)
    except KeyboardInterrupt:
        end = "stopped · "
    except AnswerError as error:
        console.print(Text(f"\n{error}", style="red"))
        return
    console.print(f"\n{end}{answer.figures()}\n", style="dim", markup=False)
    if answer.content:
        conversation.keep(prompt, answer.content)


Number = TypeVar("Number", int, float)

IMAGE_TYPES = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp", "gif": "gif", "bmp": "bmp"}  # by suffix

HELP = """/image PATH    show a picture with the next line
/spec on|off   speculation
/temp NUMBER   temperature, 0 is greedy
/max N         most tokens of an answer, 0: as many as fit
/seed N        of sampling
/system TEXT   system prompt; without TEXT: none
/clear         forget what was said
/help, /quit   Ctrl-C stops an answer, Ctrl-D leaves"""


class CommandError(ValueError):
    """A command that cannot be executed; the message says why."""


@dataclass
class Conversation:
    """speculative, temperature, max_tokens (0: as many as fit), seed: used for later answers.

    images: data URLs of pictures that go with the next prompt.
    """

    model: str
    speculative: bool = True
    temperature: float = 0.0
    max_tokens: int = 0
    seed: int = 1
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def body(self, prompt: str) -> dict[str, Any]:
        """Return the chat request for an answer to `prompt`."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*first, *self.messages, self._turn(prompt)],
            "temperature": self.temperature,
            "seed": self.seed,
            "speculative": self.speculative,
            "return_token_origins": True,
        }
        return body | ({"max_tokens": self.max_tokens} if self.max_tokens else {})

    def keep(self, prompt: str, answer: str) -> None:
        """Add a prompt, with the pictures, and its answer to the conversation."""
        self.messages += [self._turn(prompt), {"role": "assistant", "content": answer}]
        self.images.clear()

    def _turn(self, prompt: str) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*images, {"type": "text", "text": prompt}] if images else prompt}

    def command(self, line: str) -> str:
        """Execute a line that begins with a slash; return the text to show. Raises CommandError."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/help":
            return HELP
        if name == "/clear":
            self.messages.clear()
            self.images.clear()
            return "forgotten"
        if name == "/system":
            self.system = value
            return "system prompt set" if value else "system prompt removed"
        if name == "/image":
            self.images.append(_data_url(value))
            return f"{value} goes with the next line"
        if name == "/spec":
            if value not in ("on", "off"):
                raise CommandError("/spec: on or off")
            self.speculative = value == "on"
            return f"speculation is {value}"
        if name == "/temp":
            self.temperature = _number(line, float, 0, 2)
            return f"temperature is {self.temperature:g}"
        if name == "/max":
            self.max_tokens = _number(line, int, 0, 2**31 - 1)
            return f"at most {self.max_tokens} tokens" if self.max_tokens else "as many tokens as fit"
        if name == "/seed":
            self.seed = _number(line, int, -(2**63), 2**63 - 1)
            return f"seed is {self.seed}"
        raise CommandError(f"{name}: no such command; /help lists them")


def _data_url(path: str) -> str:
    """Return a picture's file as a data URL. Raises CommandError."""
    kind = IMAGE_TYPES.get(path.rpartition(".")[2].lower())
    if kind is None:
        raise CommandError(f"/image: a file that ends with .{', .'.join(IMAGE_TYPES)}")
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise CommandError(f"/image: {path} cannot be read: {error.strerror}") from None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _number(line: str, kind: type[Number], least: float, most: float) -> Number:
    name, _, value = line.partition(" ")
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise CommandError(f"{name}: a number from {least:g} to {most:g}")
    return number


@dataclass
class StreamedAnswer:
    """An answer while it arrives.

    started_s: when the request was sent, by the clock of `push`.

    content: text for the history.
    num_first: tokens of the first event, which the rate does not count.
    """

    started_s: float
    content: str = ""
    num_tokens: int = 0
    num_drafted: int = 0
    num_first: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    histogram: Sequence[int] = field(default_factory=list)

    def push(self, chunk: Mapping[str, Any], now_s: float) -> Iterator[tuple[str, bool | None]]:
        """Yield the texts of a chunk, each with whether it was drafted; None if the server does not report it."""
        metrics = chunk.get("metrics") or {}
        self.histogram = metrics.get("speculative_decoding", {}).get("acceptance_histogram", self.histogram)
        for choice in chunk["choices"]:
            content = choice["delta"].get("content") or ""
            self.content += content
            origins = choice.get("token_origins")
            if origins is None:
                if content:
                    yield content, None
                continue
            if origins:
                self._count(len(origins), now_s)
            for origin in origins:
                self.num_drafted += origin["drafted"]
                yield origin["text"], origin["drafted"]

    def _count(self, num_tokens: int, now_s: float) -> None:
        if self.num_tokens == 0:
            self.first_s, self.num_first = now_s, num_tokens
        self.num_tokens += num_tokens
        self.last_s = now_s

    def figures(self) -> str:
        """Return the figures as one line."""
        if self.num_tokens == 0:
            return "no tokens"
        parts = [f"{self.num_tokens} tokens, {self.num_drafted} drafted"]
        if self.last_s > self.first_s:
            parts.append(f"{(self.num_tokens - self.num_first) / (self.last_s - self.first_s):.1f} tokens/s")
        parts.append(f"first after {1000 * (self.first_s - self.started_s):.0f} ms")
        num_rounds = sum(self.histogram)
        if num_rounds:
            accepted = sum(k * count for k, count in enumerate(self.histogram))
            shares = [sum(self.histogram[k:]) / num_rounds for k in range(1, len(self.histogram))]
            parts.append(f"{1 + accepted / num_rounds:.2f} tokens a round")
            parts.append("accepted by position " + " ".join(f"{share:.0%}" for share in shares))
        return " · ".join(parts)
