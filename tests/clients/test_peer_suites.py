"""The runner of vLLM's suites: it replaces their fixture and model, and reports unexpected failures."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.clients import peer_suites
from tests.support.edge_client import MODEL, served
from tests.support.fake_engine import FakeEngine, says

SUITE = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.entrypoints.openai.protocol import ChatCompletionRequest

MODEL_NAME = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="module")
def server():
    with RemoteOpenAIServer(MODEL_NAME, ["--max-model-len", "2048"]) as remote:
        yield remote


@pytest.mark.asyncio
@pytest.mark.parametrize("text", ["hello", "bye"])
async def test_answer(server, text):
    async with server.get_async_client() as client:
        reply = await client.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == text


def test_own_class():
    ChatCompletionRequest(model=MODEL_NAME)


def test_passes_again():
    pass
"""
EXPECTED = """
files = ["entrypoints/test_it.py"]
[expected."entrypoints/test_it.py"]
"test_passes*" = "it was broken once"
"""


@pytest.mark.parametrize(
    ("known", "status"),
    [('"test_answer[[]bye]" = "the model says hello"', 0), pytest.param("", 1, marks=pytest.mark.slow)],
)
async def test_new_failures_are_told_apart_from_known_ones(
    known: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite = tmp_path / "vllm" / "tests" / "entrypoints" / "test_it.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    expectations = tmp_path / "expectations.toml"
    expectations.write_text(EXPECTED + known)
    monkeypatch.setattr(peer_suites, "EXPECTATIONS", expectations)
    async with served(FakeEngine(says("hello"))) as url:
        arguments = [
            "",
            "--vllm",
            str(tmp_path / "vllm"),
            "--url",
            url,
            "--tokenizer",
            str(tmp_path),
            "--limit-s",
            "20",
        ]
        monkeypatch.setattr(sys, "argv", arguments)
        assert await asyncio.to_thread(peer_suites.main) == status
    said = capsys.readouterr().out
    assert "passes  entrypoints/test_it.py::test_passes_again" in said and "1 skipped" in said
    if status:
        assert "FAILED  entrypoints/test_it.py::test_answer[bye]" in said and f"'{MODEL}'" not in said
        assert said.endswith("1 failed, 2 passed, 1 skipped\n")
    else:
        assert "FAILED" not in said and said.endswith("1 expected to fail, 2 passed, 1 skipped\n")
