"""The wheel of this checkout, built without a network and installed into a folder of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

FOLDERS = ("attention", "workers", "speculative", "cluster", "deploy", "aerie")
SOURCES = (*FOLDERS, "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """The wheel, built below `folder` from a copy: setuptools would leave its own folders in the checkout, and take
    files that are no longer there from those of an earlier build."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources / name)
    stored = ("--config-settings", "--build-option=--compression=stored")  # deflating the models takes 6 s
    _pip("wheel", "--no-deps", "--no-build-isolation", *stored, "--wheel-dir", str(folder), str(sources))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """The folder it was installed into, without what it depends on."""
    _pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def environment(installed: Path, *others: str) -> dict[str, str]:
    """Variables for a process that imports Aerie from `installed`, ahead of any other. others: further entries of
    Python's path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(installed), *others))}


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
