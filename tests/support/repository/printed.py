"""Commands of Ray, Serve and Aerie that the pages for operators print, to be run as printed against a server."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support import DOCS, ROOT

PAGES = (
    ROOT / "README.md",
    DOCS / "runbook.md",
    DOCS / "clusters.md",
    DOCS / "alerts.md",
    DOCS / "commands.md",
    ROOT / "examples" / "cluster.md",
)
_OF_A_SERVER = re.compile(r"(eval |ray |serve (?!FILE)|aerie (?:status|env)\b)")
_WITHOUT_VALUES = {"serve run FILE", "serve run", "serve deploy", "ray start", "ray stop"}  # prose about a command


def printed_commands() -> list[str]:
    """Lines of code blocks and inline code that ask a running server or change it, in the order of the pages."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        for command in (*blocks, *re.findall(r"`([^`\n]+)`", text)):
            plain = command.partition("  #")[0].strip()
            if _OF_A_SERVER.match(plain) and plain not in _WITHOUT_VALUES:
                found[plain] = None
    return list(found)


def run_printed(command: str, variables: Mapping[str, str], folder: Path) -> str:
    """Run a command in a shell, after those that the pages print before commands of Ray and Serve. Return what it
    prints; fail if its exit status is not 0.

    variables: its environment.
    folder: its current folder."""
    before = (
        [each for each in printed_commands() if each.startswith("eval ")] if command[:4] in ("ray ", "serv") else []
    )
    script = "\n".join(("set -e", *before, command))
    done = subprocess.run(
        ["bash", "-c", script], env=variables, cwd=folder, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout
