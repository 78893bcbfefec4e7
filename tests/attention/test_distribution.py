"""The commands in error messages that install Aerie's extras: pip itself can run each of them."""

import importlib.metadata
import json
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.attention import distribution
from aerie.attention.distribution import NAME, install_command, pip
from tests.support import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
WHEEL = f"{NAME.replace('-', '_')}-{VERSION}-py3-none-any.whl"
REQUIRES = ["torch>=2.11", 'accelerate>=1.1; extra == "train"', "opentelemetry-sdk>=1.39; extra == 'tracing'"]


Record = Callable[[object], None]


class Installed:
    """Stands in for the distribution as pip has recorded it."""

    def __init__(self, origin: object) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.fixture
def came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Record:
    monkeypatch.setattr(distribution, "_ROOT", tmp_path / "site-packages")

    def install(origin: object) -> None:
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)

    return install


def arguments(extra: str = "train") -> list[str]:
    """pip's arguments after `install`, split as a shell splits the command."""
    program, *words = shlex.split(install_command(extra))
    assert program == sys.executable and words[:3] == ["-m", "pip", "install"]
    return words[3:]


def test_a_folder_is_installed_from_there(came_from: Record, tmp_path: Path) -> None:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    came_from({"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert arguments() == ["-e", f"{folder}[train]"] and arguments("") == ["-e", str(folder)]
    came_from({"url": folder.as_uri(), "dir_info": {}})
    assert arguments() == [f"{folder}[train]"]


def test_a_wheel_is_installed_from_its_file_while_it_is_there(came_from: Record, tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    wheel.touch()
    came_from({"url": f"file://{wheel}", "archive_info": {}})
    assert arguments() == [f"{wheel}[train]"]
    wheel.unlink()
    assert arguments() == ["accelerate>=1.1"] and arguments("tracing") == ["opentelemetry-sdk>=1.39"]


def test_an_address_is_installed_from_there(came_from: Record) -> None:
    came_from({"url": f"https://example.org/{WHEEL}", "archive_info": {}})
    assert arguments() == [f"{NAME}[train] @ https://example.org/{WHEEL}"]
    commit = {"vcs": "git", "commit_id": "a1b2", "requested_revision": "main"}
    came_from({"url": "https://example.org/aerie.git", "vcs_info": commit})
    assert arguments() == [f"{NAME}[train] @ git+https://example.org/aerie.git@a1b2"]
    came_from(None)  # from a package index
    assert arguments() == [f"{NAME}[train]"]


def test_an_environment_of_uv_has_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "find_spec", lambda name: None)
    assert pip("uninstall") == f"uv pip uninstall --python {sys.executable}"


def test_this_installation_names_itself(installed: Path) -> None:
    """The wheel's own record, and this checkout, also where a build has left an egg-info without a record."""
    assert arguments() == ["-e", f"{ROOT}[train]"]
    (record,) = installed.glob("*.dist-info/direct_url.json")
    assert json.loads(record.read_text())["url"].endswith(WHEEL)
