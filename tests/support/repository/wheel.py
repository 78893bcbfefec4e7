"""The wheel of this checkout, built without a network and installed into a folder of its own."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import ROOT
from tests.support.repository.names import FLOORS

FILES = ("pyproject.toml", "README.md", "LICENSE")


KEPT_S = 86400.0  # wheels of files that have changed since


def kept_wheel() -> Path:
    """The folder that holds the wheel of the checkout's present files, and what it was installed into as `installed`.
    Made once for all processes and runs of tests, outside the checkout."""
    cache = Path(tempfile.gettempdir()) / f"aerie-wheels-of-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = cache / _state()
        if not (folder / "complete").exists():
            for other in cache.iterdir():
                if other == folder or (other.is_dir() and time.time() - other.stat().st_mtime > KEPT_S):
                    shutil.rmtree(other)
            folder.mkdir()
            install_wheel(build_wheel(folder), folder / "installed")
            shutil.rmtree(folder / "sources")
            (folder / "complete").touch()
    return folder


def _state() -> str:
    """A digest of the names, sizes and times of all files that the wheel is made of."""
    digest = hashlib.sha256(sys.version.encode())
    for name in (*FLOORS, "aerie", *FILES):
        root = ROOT / name
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.is_file() and "__pycache__" not in path.parts:
                stat = path.stat()
                digest.update(f"{path.relative_to(ROOT)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def build_wheel(folder: Path) -> Path:
    """The wheel, built below `folder` from a copy: setuptools would leave its own folders in the checkout, and take
    files that are no longer there from those of an earlier build."""
    sources = folder / "sources"
    sources.mkdir()
    shutil.copytree(ROOT / "aerie", sources / "aerie", ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
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
