"""A picture of `aerie chat` with a server that runs, for `docs/`:

python -m tests.e2e.screenshots.chat http://127.0.0.1:8000 docs/chat.svg
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from aerie.deploy.chat import Conversation, chat
from aerie.deploy.client import Server
from tests.e2e.screenshots.page import PROMPT


def take(url: str, file: Path) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100, record=True, highlight=False
    )
    lines = iter((PROMPT, "/clear", "/spec off", PROMPT))

    def read() -> str:
        line = next(lines, None)
        console.print(f"[bold cyan]>[/] {line or ''}")
        if line is None:
            raise EOFError
        return line

    server = Server(url)
    chat(server, Conversation(server.model()["id"]), console, read)
    svg = console.export_svg(title="aerie chat")
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # fonts from elsewhere


if __name__ == "__main__":
    take(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
