"""Finds the Serve config file of a command, and makes its paths absolute; finds GGUF files given as models (X.gguf, or
OWNER/NAME:TYPE on the hub). All engine starts from files use this module.

A relative path in a config file starts at the file's folder. Serve gives an application its `args`, but not their
folder, so `aerie serve` passes a copy with absolute paths. With `serve run FILE` paths start at the folder of the
packaged files.
"""

import argparse
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from aerie.cluster.config import ConfigError, read_args
from aerie.cluster.http.keys import digest
from aerie.deploy.config.keys import key_lines
from aerie.workers.models.gguf.location import INDEX, location_of

PACKAGED = Path(__file__).resolve().parents[1]
PATH_SECTIONS = ("model", "speculative")  # sections of `args` whose `path` names a folder


def packaged_names() -> list[str]:
    """Return the names of packaged configurations, without the ending."""
    return sorted(path.stem for path in PACKAGED.glob("*.yaml"))


def find_config(argument: str | Path) -> Path:
    """Return the file `argument`, or else the packaged configuration of that name, with or without the ending.

    Raises ConfigError that lists the packaged ones."""
    path = Path(argument).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(
            f"{argument}: is a folder without config.json; give a checkpoint's folder, or download it again"
        )
    name = path.name.removesuffix(".yaml")
    if path.parent == Path() and name in packaged_names():
        return PACKAGED / f"{name}.yaml"
    raise ConfigError(
        f"{argument}: no such file or folder; give a model (its folder, or OWNER/NAME), a Serve config file, or one of "
        f"{', '.join(packaged_names())} "
        "(`aerie config NAME` prints it)"
    )


def make_portable(content: dict[str, Any], base: Path) -> None:
    """Make the content of a file in the folder `base` independent of that folder: make folders absolute, and replace
    API keys by digests. Raises ConfigError."""
    for application in content["applications"]:
        args = application.get("args") or {} if isinstance(application, dict) else {}
        for section in path_sections(args).values():
            section["path"] = str(base / Path(section["path"]).expanduser())
        modules = adapter_folders(args)
        modules.update({name: str(base / Path(folder).expanduser()) for name, folder in modules.items()})
        ingress = args.get("ingress")
        if isinstance(ingress, dict) and isinstance(ingress.get("api_keys"), list):
            ingress["api_keys"] = [_without_key(entry, base) for entry in ingress["api_keys"]]


def _without_key(entry: object, base: Path) -> object:
    """Return an entry of `ingress.api_keys` with digests in the place of keys. Raises ConfigError."""
    if not isinstance(entry, dict):
        return key_digest(entry)
    changes: dict[str, object] = {}
    if key := entry.get("key"):
        changes["key"] = [key_digest(one_key) for one_key in key] if isinstance(key, list) else key_digest(key)
    if file := entry.get("file"):
        changes["file"] = str(base / Path(str(file)).expanduser())
    return entry | changes


def key_digest(key: object) -> str:
    """Return the digest of an API key; a digest is returned unchanged. Raises ConfigError."""
    try:
        return digest(str(key))
    except ValueError as error:
        raise ConfigError(f"ingress.{error}") from None


def run(arguments: argparse.Namespace) -> int:
    """Run `aerie config`."""
    if arguments.keys is not None:
        print("\n".join(key_lines(arguments.keys)))
    else:
        print(starting_point(arguments.name), end="")
    return 0


def starting_point(name: str) -> str:
    """Return the text of a packaged configuration, with comments, for use in any folder: paths of packaged files become
    absolute, paths of downloads stay relative. Raises ConfigError."""
    if name.removesuffix(".yaml") not in packaged_names():
        raise ConfigError(f"{name}: no packaged configuration; there are {', '.join(packaged_names())}")
    path = PACKAGED / f"{name.removesuffix('.yaml')}.yaml"
    text = path.read_text()
    for section in path_sections(read_args(path)).values():
        if (PACKAGED / section["path"]).is_dir():
            text = text.replace(f"path: {section['path']}", f"path: {PACKAGED / section['path']}")
    return text


def adapter_folders(args: Mapping[str, Any]) -> dict[str, str]:
    """Return `lora.modules` of `args`, the mapping itself, if all its folders are strings; else an empty one."""
    lora = args.get("lora")
    modules = lora.get("modules") if isinstance(lora, dict) else None
    is_valid = isinstance(modules, dict) and all(isinstance(folder, str) for folder in modules.values())
    return modules if is_valid and modules else {}


def path_sections(args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of `args` whose `path` is a string, by name."""
    sections = {name: args.get(name) for name in PATH_SECTIONS}
    return {
        name: section
        for name, section in sections.items()
        if isinstance(section, dict) and isinstance(section.get("path"), str)
    }


_WRITER = "aerie.workers.models.gguf.folder"  # imports torch, which only the first start of a file needs here
_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_NOT_MODELS = ("mmproj", "imatrix")


def is_gguf_path(text: str) -> bool:
    """Return whether this is a GGUF file's path."""
    return text.lower().endswith(".gguf") and ":" not in text


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
    return tuple(dict.fromkeys(f"*{spelling}*.gguf" for spelling in (kind, kind.upper(), kind.lower())))


def chosen_file(folder: Path, kind: str, source: str) -> Path:
    """Return the file of a type, the first one if it is split, in a repository's folder. Raises ConfigError."""
    if kind.lower().endswith(".gguf"):
        files = [path for path in (folder / kind,) if path.is_file()]
    else:
        whole_word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])", re.IGNORECASE)
        files = [
            path
            for path in sorted(folder.rglob("*.gguf"))
            if whole_word.search(path.stem) and not _LATER.search(path.stem) and not path.name.startswith(_NOT_MODELS)
        ]
    if not files:
        raise ConfigError(f"{source}: its repository has no GGUF file of {kind}; look up the types on its page")
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ConfigError(f"{source}: several files are of {kind}; give one of {names} after the colon")
    return files[0]
