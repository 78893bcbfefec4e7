"""Serve config files: which one a command means, and where the paths in it start.

A relative path in a config file starts at the file's own folder. Serve gives an application its `args` and not where
they stood, so `aerie serve` hands it a copy with absolute paths, and what `serve run FILE` hands over starts at the
folder of the packaged files. Everything that starts an engine from a file comes through here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ConfigError, read_args

PACKAGED = Path(__file__).resolve().parent
PATH_SECTIONS = ("model", "speculative")  # sections of `args` whose `path` names a folder


def packaged_names() -> list[str]:
    """The configurations that come with Aerie, without their ending."""
    return sorted(path.stem for path in PACKAGED.glob("*.yaml"))


def find_config(given: str | Path) -> Path:
    """The file `given`; if there is none, the packaged configuration of that name, with or without its ending.

    Raises ConfigError that lists the packaged ones."""
    path = Path(given).expanduser()
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    if path.parent == Path() and name in packaged_names():
        return PACKAGED / f"{name}.yaml"
    raise ConfigError(
        f"{given}: no such file; give a Serve config file or one of {', '.join(packaged_names())} "
        "(`aerie config NAME` prints it)"
    )


def located(path: Path) -> dict[str, Any]:
    """The whole content of a Serve config file, its folders absolute. Raises ConfigError."""
    read_args(path)
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    for application in content["applications"]:
        for section in _sections(application.get("args") or {} if isinstance(application, dict) else {}):
            section["path"] = str(path.resolve().parent / Path(section["path"]).expanduser())
    return content


def use_checked(content: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Change the content of a file that was checked so that Serve need not check it again, and import torch for it.
    found: what the check found, keys of the section `model`."""
    for application in content["applications"]:
        if isinstance(application, dict) and application.get("import_path") == "deploy.app:build":
            application["import_path"] = "deploy.app:build_checked"
            application["args"]["model"] |= found
            return  # the first is the one that `read_args` reads


def starting_point(name: str) -> str:
    """The text of a packaged configuration, comments and all, fit to be kept in any folder: what is packaged with it is
    named by its absolute path, and what is to be downloaded stays relative. Raises ConfigError."""
    if name.removesuffix(".yaml") not in packaged_names():
        raise ConfigError(f"{name}: no packaged configuration; there are {', '.join(packaged_names())}")
    path = PACKAGED / f"{name.removesuffix('.yaml')}.yaml"
    text = path.read_text()
    for section in _sections(read_args(path)):
        if (PACKAGED / section["path"]).is_dir():
            text = text.replace(f"path: {section['path']}", f"path: {PACKAGED / section['path']}")
    return text


def _sections(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of `args` that name a folder."""
    sections = (args.get(name) for name in PATH_SECTIONS)
    return [section for section in sections if isinstance(section, dict) and isinstance(section.get("path"), str)]
