"""The runner of peers' suites: it replaces their fixture and model, and reports unexpected failures."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.clients import peer_suites
from tests.support import MODELS
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
TOKENIZING = """
from vllm.tokenizers import get_tokenizer


def test_tokenizer():
    assert get_tokenizer(tokenizer_name="Qwen/Qwen3-0.6B").encode("hello")
"""
KIT = """
import requests
from sglang.test.run_eval import run_eval


class GreetingMixin:
    def test_greeting(self):
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 4}}
        assert requests.post(self.base_url + "/generate", json=body).json()["text"] == "hello"

    def test_own_function(self):
        run_eval(self.process.pid)
"""
KIT_USER = """
import unittest
import openai
from sglang.test.kits.greeting_kit import GreetingMixin
from sglang.test.test_utils import (
    DEFAULT_SMALL_MODEL_NAME_FOR_TEST, DEFAULT_URL_FOR_TEST, CustomTestCase, popen_launch_server
)


class TestIt(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.process = popen_launch_server(DEFAULT_SMALL_MODEL_NAME_FOR_TEST, DEFAULT_URL_FOR_TEST, timeout=9)
        cls.client = openai.OpenAI(base_url=DEFAULT_URL_FOR_TEST + "/v1", api_key="none")

    def test_chat(self):
        reply = self.client.chat.completions.create(
            model="meta-llama/Llama-3.1-8B-Instruct", messages=[{"role": "user", "content": "hi"}]
        )
        assert reply.choices[0].message.content == "bye"
"""
KIT_EXPECTED = """
files = ["kits/greeting_kit.py", "openai_server/test_it.py", "openai_server/test_absent.py"]
[expected]
"""
EXPECTED = """
files = ["entrypoints/test_it.py"]
[expected."entrypoints/test_it.py"]
"test_passes*" = "it was broken once"
"""


@pytest.mark.parametrize(
    ("known", "status"),
    [
        ('"test_answer[[]bye]" = "the answer is another"', 0),
        pytest.param("", 1, marks=pytest.mark.slow),
    ],
)
async def test_new_failures_are_told_apart_from_known_ones(
    known: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _run(SUITE, known, tmp_path, tmp_path, 100, monkeypatch) == status
    said = capsys.readouterr().out
    assert "passes  entrypoints/test_it.py::test_passes_again" in said and "1 skipped" in said
    if status:
        assert "FAILED  entrypoints/test_it.py::test_answer[bye]" in said and f"'{MODEL}'" not in said
        assert said.endswith("1 failed, 2 passed, 1 skipped\n")
    else:
        assert "FAILED" not in said and said.endswith("1 expected to fail, 2 passed, 1 skipped\n")


@pytest.mark.slow
async def test_the_import_of_the_tokenizer_is_no_part_of_a_tests_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _run(TOKENIZING, "", tmp_path, MODELS / "target", 2, monkeypatch) == 0, capsys.readouterr().out


@pytest.mark.slow
async def test_sglangs_kits_and_files_run_from_several_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"wheel/kits/greeting_kit.py": KIT, "registered/openai_server/test_it.py": KIT_USER}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    options = ["--sglang", tmp_path / "wheel", tmp_path / "registered"]
    assert await _report(options, "sglang", KIT_EXPECTED, tmp_path, tmp_path, 20, monkeypatch) == 1
    said = capsys.readouterr()
    assert said.err == "openai_server/test_absent.py: in none of the folders\n"
    assert "FAILED  openai_server/test_it.py::TestIt::test_chat" in said.out
    assert said.out.endswith("1 failed, 1 passed, 1 skipped\n")


async def _run(
    suite: str, known: str, folder: Path, tokenizer: Path, limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Return the exit status for a suite of one file. known: its expected failures, as TOML. folder: for files."""
    file = folder / "vllm" / "tests" / "entrypoints" / "test_it.py"
    file.parent.mkdir(parents=True)
    file.write_text(suite)
    options = ["--vllm", folder / "vllm"]
    return await _report(options, "vllm", EXPECTED + known, folder, tokenizer, limit_s, monkeypatch)


async def _report(
    suite: list[str | Path],
    peer: str,
    expected: str,
    folder: Path,
    tokenizer: Path,
    limit_s: int,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    expectations = folder / "expectations.toml"
    expectations.write_text(expected)
    monkeypatch.setitem(peer_suites.EXPECTATIONS, peer, expectations)
    async with served(FakeEngine(says("hello"))) as url:
        options = [*suite, "--url", url, "--tokenizer", tokenizer, "--limit-s", limit_s]
        monkeypatch.setattr(sys, "argv", ["", *map(str, options)])
        return await asyncio.to_thread(peer_suites.main)
