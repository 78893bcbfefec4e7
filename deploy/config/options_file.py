"""Options from a file: the YAML of vLLM's and SGLang's `--config`, which has the options of the command line as keys.
Used by `aerie.deploy.command_line`; the command line has priority."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from aerie.deploy.config.vllm_values import OptionError

_OPTION = "--config"


def with_file(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with the options of `--config FILE` in front, and without it. Raises
    OptionError for a file that cannot be read or has other content."""
    plain: list[str] = []
    options: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if name == _OPTION:
            options += _options(value if equals else next(left, ""))
        else:
            plain.append(argument)
    model = list(takewhile(lambda word: not word.startswith("-"), plain))
    return [*model, *options, *plain[len(model) :]]


def _options(name: str) -> Iterator[str]:
    """Yield the options of a file: `flag: true`, `option: value`, lists, and objects as JSON."""
    shown = f"{_OPTION} {name}"
    try:
        content = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{shown}: cannot be read ({error}); give the file of options") from None
    except yaml.YAMLError as error:
        raise OptionError(f"{shown}: is not YAML ({str(error).splitlines()[0]}); correct it") from None
    if not isinstance(content, Mapping):
        raise OptionError(f"{shown}: must be a mapping of options, such as `max-model-len: 8192`")
    if "applications" in content:
        raise OptionError(f"{shown}: is a config file of Aerie: give it as the first argument, without {_OPTION}")
    for key, value in content.items():
        yield from _spelled(f"--{str(key).lstrip('-').replace('_', '-')}", value)


def _spelled(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"{name}={str(value).lower()}"  # for flags; `normalised` makes --no-flag of it
    elif isinstance(value, Mapping):
        yield f"{name}={json.dumps(value)}"
    elif isinstance(value, list):
        yield from (name, *map(str, value))
    elif value is not None:
        yield f"{name}={value}"
