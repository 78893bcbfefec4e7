"""Published clients join streams of a scripted engine whose rounds accept 1 to 64 tokens. They are installed into a
temporary folder, so these tests are slow."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support import ROOT
from tests.support.clients.streams import in_rounds
from tests.support.edge_client import served
from tests.support.fake_engine import FakeEngine, small_tokenizer

pytestmark = pytest.mark.slow

CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern", "days": 3, "note": "a \\"b\\" c"}}\n</tool_call>'
)
ANSWER = f"I look.\n{CALL}\n{CALL.replace('Bern', 'Chur')}"
JAVASCRIPT = ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")


async def _run(*command: str | Path, folder: Path, limit_s: float = 300) -> tuple[int, str]:
    """Return a command's exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), limit_s)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def _joins(*command: str | Path, folder: Path, num_forms: int) -> None:
    """Run a script of clients for ten runs against a scripted engine."""
    engine = FakeEngine(in_rounds(ANSWER, 1, small_tokenizer()))
    async with served(engine, tool_tokenizer(), output_parser="hermes", max_model_len=4096) as url:
        status, said = await _run(*(url if part == "URL" else part for part in command), folder=folder)
    assert status == 0 and said.count("0 of 10 broken") == num_forms, said


@pytest.mark.parametrize(
    ("packages", "num_forms"),
    [
        (("openai==2.54.0", "anthropic"), 3),  # this openai keeps a message's first list of calls as it is
        (("instructor==1.17.0",), 3),
        (("langchain-openai==1.7.4", "langchain-anthropic"), 6),
    ],
)
async def test_python(packages: tuple[str, ...], num_forms: int, tmp_path: Path) -> None:
    await _run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    status, said = await _run(python, "-m", "pip", "install", "-q", *packages, folder=tmp_path)
    assert status == 0, said
    script = ("-m", "tests.clients.streamed_calls", "URL", "--parallel")
    await _joins(python, *script, folder=ROOT, num_forms=num_forms)


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm")
async def test_javascript(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "streamed_calls.mjs", tmp_path)
    status, said = await _run("npm", "install", "--silent", *JAVASCRIPT, folder=tmp_path)
    assert status == 0, said
    await _joins("node", "streamed_calls.mjs", "URL", "10", "parallel", folder=tmp_path, num_forms=6)
