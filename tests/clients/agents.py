"""Runs coding agents against the HTTP application through a task of three tool turns: write a file, read it, run a
command. `python -m tests.clients.agents FOLDER [NAME ...]` installs the programs into FOLDER with npm and pip if they
are missing, and prints a table; `--list` prints their names.

The engine is scripted: it answers like a model that calls the agent's own tools, in pieces of one to 16 tokens as a
draft makes them. Each program runs in a network namespace that has only the loopback, so nothing leaves the machine,
and in a process namespace, so that servers which it starts end with it.
"""

import argparse
import asyncio
import fcntl
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aerie.cluster.http.endpoint import IGNORED_HEADER
from aerie.workers.scheduling.plan import SamplingParams
from tests.clients.agent_programs import AGENTS, DONE, MODEL, NO_TELEMETRY, TEXT, Agent
from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import served
from tests.support.fake_engine import FakeEngine, Step, says, small_tokenizer

LIMIT_S = 120
TURN = "\x01"  # begins each turn of the prompt
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <tool_call> arguments{{ '\n' }}{% endif %}{% for m in messages %}"
    + TURN
    + "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Outcome:
    """What a run was: the program's exit code, replies by status, fields that were ignored, and what was wrong."""

    version: str
    statuses: list[int]
    ignored: list[str]
    fault: str


def binary(agent: Agent, folder: Path) -> Path:
    """Path of the program, installed below `folder` if it is not there."""
    root = folder / agent.binary
    if agent.package.startswith("pip:"):
        path = root / "bin" / agent.binary
        if not path.exists():
            subprocess.run([sys.executable, "-m", "venv", root], check=True)
            subprocess.run([root / "bin/pip", "install", "-q", agent.package.removeprefix("pip:")], check=True)
        return path
    path = root / "node_modules/.bin" / agent.binary
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(root), agent.package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def engine_of(agent: Agent, path: Path) -> FakeEngine:
    """An engine that calls the agent's tools, one in each turn, and then says that it is done."""
    tokenizer, rng = small_tokenizer(), random.Random(11)
    calls = json.loads(json.dumps(agent.calls).replace("{path}", str(path)))

    def script(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
        text = tokenizer.decode(prompt)
        by_text = isinstance(calls[0], str)
        turn = len(engine.calls) - 1 if by_text else text.count(f"{TURN}tool: ")
        if turn >= len(calls) or not (by_text or "TOOLS [" in text):
            answer = DONE
        elif by_text:
            answer = calls[turn]
        else:
            name, arguments = calls[turn]
            answer = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        pieces = []
        while answer:
            size = rng.randint(1, 16)
            pieces.append(answer[:size])
            answer = answer[size:]
        return says(*pieces, tokenizer=tokenizer)(prompt, sampling)

    engine = FakeEngine(script)
    return engine


def recorded(app: ASGIApp, seen: list[tuple[int, str]]) -> ASGIApp:
    """The application, which adds each reply's status and ignored fields to `seen`."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.append((message["status"], dict(message["headers"]).get(IGNORED_HEADER, b"").decode()))
            await send(message)

        await app(scope, receive, send_recorded)

    return application


async def run(agent: Agent, program: Path) -> Outcome:
    """Run the program through the task, inside this process's network."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        path = Path(work, "a.txt")
        engine = engine_of(agent, path)
        seen: list[tuple[int, str]] = []
        settings: dict[str, Any] = {"max_model_len": 1 << 22, "output_parser": "hermes", "served_model_name": MODEL}
        async with served(engine, tool_tokenizer(TEMPLATE), lambda app: recorded(app, seen), **settings) as url:

            def filled(text: str) -> str:
                return text.replace("{url}", url).replace("{home}", home).replace("{path}", str(path))

            for name, content in agent.files.items():
                target = Path(home, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(content.replace("SERVER", url))
            environment = {"PATH": os.environ["PATH"], "HOME": home, "TERM": "dumb", **NO_TELEMETRY}
            environment |= {name: filled(value) for name, value in agent.environment.items()}

            async def program_run(*arguments: str) -> tuple[int, str]:
                process = await asyncio.create_subprocess_exec(
                    program,
                    *map(filled, arguments),
                    cwd=work,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                try:
                    async with asyncio.timeout(LIMIT_S):
                        out, _ = await process.communicate()
                except TimeoutError:
                    process.kill()
                    return -1, "took too long"
                return process.returncode or 0, out.decode(errors="replace")

            _, version = await program_run("--version")
            if agent.before:
                await program_run(*agent.before)
            code, output = await program_run(*agent.arguments)
        last = small_tokenizer().decode(engine.calls[-1].prompt) if engine.calls else ""
        written = path.read_text() if path.exists() else None
    ignored = dict.fromkeys(name for _, names in seen for name in names.split(",") if name)
    faults = [
        f"exit code {code}: {output[-500:]}" if code else "",
        f"a.txt has {written!r}" if written != TEXT else "",
        "" if isinstance(agent.calls[0], str) or "HELLO" in last else "no tool printed HELLO",
        "" if len(engine.calls) >= len(agent.calls) else f"only {len(engine.calls)} requests",
        "" if all(status == 200 for status, _ in seen) else "a reply was no 200",
    ]
    statuses = [status for status, _ in seen]
    return Outcome(version.strip().split("\n")[-1], statuses, list(ignored), "; ".join(filter(None, faults)))


def loopback_up() -> None:
    """Bring up the loopback of a new network namespace."""
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of the programs")
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list or options.folder is None:
        print("\n".join(AGENTS))
        return 0
    names = options.names or list(AGENTS)
    if not options.inside:
        for name in names:
            binary(AGENTS[name], options.folder.resolve())
        inside = [sys.executable, "-m", "tests.clients.agents", "--inside", str(options.folder.resolve()), *names]
        return subprocess.run(
            ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", *inside]
        ).returncode
    loopback_up()
    print("| agent | version | replies | ignored and named | result |\n| --- | --- | --- | --- | --- |", flush=True)
    failed = 0
    for name in names:
        outcome = asyncio.run(run(AGENTS[name], binary(AGENTS[name], options.folder)))
        failed += bool(outcome.fault)
        ignored = ", ".join(f"`{each}`" for each in outcome.ignored) or "none"
        result = outcome.fault or "done"
        print(f"| {name} | {outcome.version} | {len(outcome.statuses)} | {ignored} | {result} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
