"""What a command line or a config file amounts to, read and checked once. Used by `aerie serve`, `aerie plan`, `aerie
doctor`, `aerie eval-draft` and `aerie.LLM`; `aerie.cluster.plan.resolve` makes the plan of it."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie.cluster.config import AerieConfig, parse, read_content
from aerie.deploy.config.files import PACKAGED, find_config, locate
from aerie.deploy.config.hub import with_downloads
from aerie.deploy.config.model import check_file_options, content_of_model, names_model, quick_start


@dataclass(frozen=True)
class Chosen:
    """A server's configuration.

    name: of its file or model, for messages.
    content: of a Serve config file, with the command line's options, without relative paths.
    application: its first Aerie application, a part of `content`.
    config: the checked `args` of that application.
    """

    name: str
    content: dict[str, Any]
    application: dict[str, Any]
    config: AerieConfig

    @property
    def has_one_engine(self) -> bool:
        """Whether there is one application, with one engine."""
        return len(self.content["applications"]) == self.config.parallel.replicas == 1


def configuration(args: Mapping[str, Any], base: Path = PACKAGED) -> AerieConfig:
    """Return the checked configuration of an application's `args`. Checkpoints named by hub names are downloaded. base:
    folder of relative paths. Raises ConfigError."""
    return parse(with_downloads(args, base), base)


def read_file(given: str) -> Chosen:
    """Return the configuration of a file, or of the packaged one of this name. Raises ConfigError."""
    path = find_config(given)
    return _chosen(str(path), *read_content(path), path.resolve().parent)


def read_command_line(arguments: argparse.Namespace) -> Chosen:
    """Return the configuration of the arguments of `aerie serve`: a file's, or that of a model in a folder or on the
    hub, which is written to --save. Raises ConfigError."""
    given = str(arguments.config or quick_start())
    is_model = names_model(given)
    if is_model:
        content = content_of_model(given, arguments)
        application, name, base = content["applications"][0], given, Path.cwd()
    else:
        path = find_config(given)
        check_file_options(path, arguments)
        (content, application), name, base = read_content(path), str(path), path.resolve().parent
    root_path = None if arguments.root_path is None else arguments.root_path.rstrip("/")
    http = {"host": arguments.host, "port": arguments.port, "root_path": root_path}
    content["http_options"] = dict(content.get("http_options") or {}) | _set(http)
    application |= {"name": "aerie", "route_prefix": "/"} | application
    application |= _set({"name": arguments.name, "route_prefix": arguments.route_prefix})
    if is_model:
        text = yaml.safe_dump(content, sort_keys=False)
        if arguments.shows_config:
            print(text, end="", flush=True)
        if arguments.save:
            arguments.save.write_text(text)
    return _chosen(name, content, application, base)


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _chosen(name: str, content: dict[str, Any], application: dict[str, Any], base: Path) -> Chosen:
    config = configuration(application["args"], base)
    locate(content, base)
    return Chosen(name, content, application, config)
