"""Stands in for SGLang while its server tests run against a URL: what starts their server, and what they import.

A pytest plugin in a process of `tests.clients.peer_suites`, beside `peer_outcomes`. Reads PEER_URL, PEER_MODEL,
PEER_TOKENIZER (a folder) and PEER_SOURCES (folders whose `kits` are SGLang's test mixins) from the environment.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import openai
from peer_outcomes import NotByURL

URL, MODEL = os.environ["PEER_URL"], os.environ["PEER_MODEL"]
SOURCES = [Path(folder) for folder in os.environ["PEER_SOURCES"].split(os.pathsep)]


class Process:
    """The server's, which their tests start and end."""

    pid = 0

    def poll(self) -> None:
        return None


class ServerTest(unittest.TestCase):
    """The attributes that mixins read."""

    base_url = URL
    model = served_model_name = MODEL
    api_key = "none"
    process = Process()

    @classmethod
    def setUpClass(cls) -> None:
        cls.client = openai.OpenAI(base_url=f"{URL}/v1", api_key=cls.api_key, max_retries=0)

    @property
    def tokenizer(self) -> Any:
        return tokenizer()


def mixed(module: str) -> dict[str, type]:
    """Return a test class for each mixin of one of their modules, by name."""
    mixins = [
        each
        for each in vars(importlib.import_module(module)).values()
        if isinstance(each, type) and each.__module__ == module and any(name.startswith("test_") for name in vars(each))
    ]
    return {each.__name__: type(each.__name__, (each, ServerTest), {"__module__": __name__}) for each in mixins}


def tokenizer(*args: Any, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["PEER_TOKENIZER"])


def _known(name: str) -> Any:
    if name in _KNOWN:
        return _KNOWN[name]
    if name.startswith("DEFAULT_"):
        return URL if "URL" in name else 60 if "TIMEOUT" in name else MODEL
    return (lambda *args, **options: False) if name.startswith("is_") else NotByURL


_KNOWN: dict[str, Any] = {
    "CustomTestCase": unittest.TestCase,
    "popen_launch_server": lambda *args, **options: Process(),
    "kill_process_tree": lambda *args, **options: None,
    "terminate_process": lambda *args, **options: None,
    "get_tokenizer": tokenizer,
    "auto_config_device": lambda: "cpu",
    "try_cached_model": lambda name: name,
}


class _Module(types.ModuleType):
    """A module of SGLang."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _known(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "sglang":
            return None
        if name.startswith("sglang.test.kits."):
            for folder in SOURCES:
                if (file := folder / "kits" / f"{name.rpartition('.')[2]}.py").exists():
                    return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
