"""A configuration made of a model's name and options, for `aerie serve MODEL` and `aerie plan MODEL`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ConfigError
from deploy.configs import find_config, packaged_names
from deploy.hub import model_folder


def chosen_config(arguments: argparse.Namespace, scratch: Path) -> Path:
    """The config file that the command line means: an existing one, a packaged one's name, or one made here for a model
    in a folder or on the hub, written to --save or into `scratch`. Raises ConfigError."""
    given = str(arguments.config)
    if not _names_model(given):
        wanted = {"--draft": arguments.draft, "--tensor-parallel": arguments.tensor_parallel, "--set": arguments.set}
        wanted |= {"--save": arguments.save, "--revision": arguments.revision}
        if used := [name for name, value in wanted.items() if value]:
            raise ConfigError(f"{used[0]}: only beside a model; {given} is a config file: write it there")
        return find_config(arguments.config)
    model = model_folder(given, arguments.revision)
    args: dict[str, Any] = {"model": {"path": str(model)}, "ingress": {"served_model_name": _served_name(given, model)}}
    if arguments.draft:
        draft = model_folder(arguments.draft, None)
        args["speculative"] = {"method": _head_method(draft), "path": str(draft)}
    if arguments.tensor_parallel is not None:
        args["parallel"] = {"tensor_parallel": arguments.tensor_parallel}
    for assignment in arguments.set:
        _assign(args, assignment)
    content = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": getattr(arguments, "port", None) or 8000},
        "logging_config": {"enable_access_log": False},
        "applications": [{"name": "aerie", "route_prefix": "/", "import_path": "deploy.app:build", "args": args}],
    }
    text = yaml.safe_dump(content, sort_keys=False)
    print(text, end="", flush=True)
    path = arguments.save or scratch / "serve.yaml"
    path.write_text(text)
    return Path(path)


def _names_model(given: str) -> bool:
    """A folder with a checkpoint, or a name of the form OWNER/NAME that is no file."""
    path = Path(given).expanduser()
    if path.is_dir():
        return (path / "config.json").is_file()
    is_name = given.count("/") == 1 and not given.startswith((".", "/", "~")) and not given.endswith((".yaml", ".yml"))
    return is_name and not path.is_file() and given not in packaged_names()


def _served_name(given: str, folder: Path) -> str:
    return folder.name if Path(given).expanduser().is_dir() else given.partition("@")[0]


def _head_method(folder: Path) -> str:
    """Which kind of EAGLE head a checkpoint is: only EAGLE-3's say so, by architecture or by their own vocabulary."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--draft {folder}: its config.json cannot be read ({error})") from None
    architectures = " ".join(config.get("architectures") or [])
    return "eagle3" if "eagle3" in architectures.lower() or "draft_vocab_size" in config else "eagle"


def _assign(args: dict[str, Any], assignment: str) -> None:
    """`cache.memory_gb=4`: values as YAML has them. Whether a key exists is checked with the whole configuration."""
    key, found, value = assignment.partition("=")
    parts: Sequence[str] = key.split(".")
    if not found or not all(parts):
        raise ConfigError(f"--set {assignment}: must be KEY=VALUE, such as cache.memory_gb=4")
    section: Any = args
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {assignment}: {part} is no section")
    try:
        section[parts[-1]] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {assignment}: the value is not YAML; quote it") from None
