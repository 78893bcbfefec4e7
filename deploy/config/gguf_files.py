"""GGUF files as models: X.gguf, or OWNER/NAME:TYPE on the hub. Used by `aerie.deploy.config.hub`."""

import os
import re
from importlib import import_module
from pathlib import Path

from aerie.cluster.config import ConfigError
from aerie.workers.models.gguf.location import INDEX, location_of

_WRITER = "aerie.workers.models.gguf.folder"  # imports torch, which only the first start of a file needs here
_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_NOT_MODELS = ("mmproj", "imatrix")


def is_gguf_path(given: str) -> bool:
    """Return whether this is a GGUF file's path."""
    return given.lower().endswith(".gguf") and ":" not in given


def is_gguf_folder(folder: Path) -> bool:
    """Return whether the folder stands for a GGUF file."""
    return (folder / INDEX).is_file()


def gguf_folder(path: Path, tokenizer: Path | None = None) -> Path:
    """Return the folder that stands for a GGUF file, written if it is missing; see
    `aerie.workers.models.gguf.location.location_of`. Raises ConfigError."""
    try:
        location = location_of(path, cache_folder() / "gguf", tokenizer)
        if not location.is_written:
            import_module(_WRITER).write_folder(location)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{cache_folder()}: cannot be written ({error}); set XDG_CACHE_HOME") from None
    return location.folder


def with_tokenizer(folder: Path, tokenizer: Path) -> Path:
    """Return the folder that stands for the same GGUF file as `folder`, with the tokenizer of another folder. Raises
    ConfigError."""
    index = import_module("aerie.workers.models.gguf.tensors").read_index(folder)
    return gguf_folder(Path(index.paths[0]), tokenizer)


def cache_folder() -> Path:
    """Return the folder for files that Aerie can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "aerie"


def patterns_of(kind: str) -> tuple[str, ...]:
    """Return the patterns of a repository's files of one type, which are written in either case; or of one file."""
    if kind.lower().endswith(".gguf"):
        return (kind,)
    return tuple(dict.fromkeys(f"*{each}*.gguf" for each in (kind, kind.upper(), kind.lower())))


def chosen_file(folder: Path, kind: str, given: str) -> Path:
    """Return the file of a type, the first one if it is split, in a repository's folder. Raises ConfigError."""
    if kind.lower().endswith(".gguf"):
        found = [path for path in (folder / kind,) if path.is_file()]
    else:
        whole_word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])", re.IGNORECASE)
        found = [
            path
            for path in sorted(folder.rglob("*.gguf"))
            if whole_word.search(path.stem) and not _LATER.search(path.stem) and not path.name.startswith(_NOT_MODELS)
        ]
    if not found:
        raise ConfigError(f"{given}: its repository has no GGUF file of {kind}; look up the types on its page")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{given}: several files are of {kind}; give one of {names} after the colon")
    return found[0]
