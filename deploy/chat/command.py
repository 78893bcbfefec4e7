"""`aerie chat`: reads lines and shows the answers as they arrive."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from deploy.chat.conversation import CommandError, Conversation, StreamedAnswer
from deploy.client import AnswerError, Server, parse_server

STYLES = {True: "green", False: "magenta", None: ""}  # of drafted tokens, of the target's own, of unknown ones

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
