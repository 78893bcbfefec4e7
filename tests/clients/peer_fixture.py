"""Stands in for vLLM while its server tests run against a URL: its test fixture and the few things they import.

A pytest plugin in a process of `tests.clients.peer_suites`, beside `peer_outcomes`. Reads PEER_URL, PEER_MODEL and
PEER_TOKENIZER (a folder) from the environment. No other module of ours can be imported here: `tests` is vLLM's package.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import openai
import pytest
from peer_outcomes import LIMIT_S, NotByURL

URL, MODEL = os.environ["PEER_URL"], os.environ["PEER_MODEL"]
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = Path("/nowhere")


class RemoteOpenAIServer:
    """The names of vLLM's fixture, over the server that runs at PEER_URL."""

    DUMMY_API_KEY = "none"
    url_root = URL

    def __init__(self, *args: Any, **options: Any) -> None:
        self.host, _, port = URL.rpartition("://")[2].partition(":")
        self.port = int(port)

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return URL + "/" + "/".join(parts)

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._options(options) | {"base_url": URL})

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._options(options) | {"base_url": URL})

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{URL}/v1", "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": LIMIT_S} | given


def multi_gpu_only(num_gpus: int = 2) -> pytest.MarkDecorator:
    """Stands in for the mark of tests that start engines on several GPUs."""
    return pytest.mark.skip(reason="starts an engine of several GPUs")


LocalAssetServer = NotByURL


@pytest.fixture
def local_asset_server() -> None:
    """Stands in for a server of pictures, which tests of text do not ask."""


def requires_fp8(test: Any) -> Any:
    """Stands in for the mark of tests that start an engine with FP8 weights."""
    return pytest.mark.skip(reason="starts an engine with FP8 weights")(test)


class _Config:
    """`ModelConfig`, of which tests by URL want the vocabulary's size alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(_tokenizer(MODEL))


class _Platform:
    """`current_platform`: none of those that tests ask for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: False


def _tokenizer(*args: Any, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["PEER_TOKENIZER"])


_KNOWN: dict[str, Any] = {
    "get_tokenizer": _tokenizer,
    "ModelConfig": _Config,
    "current_platform": _Platform(),
    "VLLMValidationError": ValueError,
    "hf_api": lambda: types.SimpleNamespace(snapshot_download=lambda *args, **options: ""),
}


class _Module(types.ModuleType):
    """A module of vLLM."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_tokenizer":  # while tests are collected: torch cannot be imported again after a test's limit
            from transformers import AutoTokenizer  # noqa: F401
        return _KNOWN.get(name, NotByURL)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
