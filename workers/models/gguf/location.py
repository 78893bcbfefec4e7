"""The path of the model folder that is made from a GGUF file. Imports no torch, so that a start finds the folder
quickly."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

INDEX = "gguf.json"  # in the folder: the list of tensors
_VERSION = 2  # version of the model folder's contents: raise it with a change
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Location:
    """A GGUF file and the model folder that is made from it.

    folder: the model folder.
    paths: paths of the file, or of its parts.
    tokenizer: files to copy instead of writing the file's own tokenizer; none: its own.
    """

    folder: Path
    paths: tuple[Path, ...]
    tokenizer: tuple[Path, ...]

    @property
    def is_written(self) -> bool:
        return (self.folder / INDEX).is_file()


def location_of(path: Path, cache: Path, tokenizer: Path | None = None) -> Location:
    """Return the folder for a GGUF file: named after it, in `cache`, and another one after each change of the file.

    path: the file, or any one of several that belong together.
    tokenizer: a folder with the tokenizer's files to use instead of the file's own.
    Raises ValueError, in one line, if a file is missing.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    paths = split_parts(path.resolve())
    chosen = () if tokenizer is None else _tokenizer_files(tokenizer)
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in (*paths, *chosen)]
    digest = hashlib.sha256(json.dumps([_VERSION, states]).encode()).hexdigest()[:16]
    return Location(cache / digest / model_name(paths[0]), paths, chosen)


def split_parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a model, of which `path` is one. Raises ValueError for missing ones."""
    split = _SPLIT_NAME.fullmatch(path.name)
    if split is None:
        return (path,)
    stem, _, count = split.groups()
    parts = tuple(path.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf") for i in range(int(count)))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{path}: is one of {int(count)} files, and {', '.join(missing)} is missing beside it")
    return parts


def model_name(path: Path) -> str:
    """Return a file's name without its ending and its number."""
    split = _SPLIT_NAME.fullmatch(path.name)
    return split[1] if split else path.stem


def _tokenizer_files(folder: Path) -> tuple[Path, ...]:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--tokenizer {folder}: has no tokenizer.json; give the folder of a model or a tokenizer")
    return tuple(folder / name for name in _TOKENIZER_FILES if (folder / name).is_file())
