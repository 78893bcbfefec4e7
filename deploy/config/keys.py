"""The keys of a configuration with defaults, options and descriptions, which are `key: description` in the docstrings
of its dataclasses. Printed by `aerie config --keys`; `make docs` and `aerie.deploy.config.option_table` read them too.
Also reads the YAML of vLLM's and SGLang's `--config`, whose keys are options of the command line, which has priority.
"""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from aerie.attention.setting import Setting, settings
from aerie.cluster.config import AerieConfig, ConfigError
from aerie.cluster.http.keys import KeyConfig
from aerie.deploy.config.vllm_values import OptionError

_MARK = re.compile(r"<!-- keys of ([\w., ]+) -->\n")
_WIDTH = 100  # columns to which explanations are wrapped


@dataclass(frozen=True)
class Key:
    """A key of the configuration, as `aerie config` prints it.

    name: `section.key`, or a key outside of sections.
    default: as printed.
    kind: its type.
    setting: what else its field declares.
    """

    name: str
    default: str
    meaning: str
    kind: Any = str
    setting: Setting = Setting()

    @property
    def explanation(self) -> str:
        """The meaning, and the options that set the key."""
        return "; ".join([self.meaning, *(f"`{flag}`" for flag in self.setting.flags.split())])


def keys(section: str) -> list[Key]:
    """Return the keys of a section; of a name outside of sections, that key alone. "ingress.api_keys" names the keys of
    an API key. Raises ConfigError."""
    prefix = ""
    if section == "ingress.api_keys":
        owner: type = KeyConfig
    elif section not in AerieConfig.model_fields:
        raise ConfigError(f"--keys {section}: no such section; there are {', '.join(AerieConfig.model_fields)}")
    else:
        classes = [kind for kind in _types(section) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        owner, prefix = (classes[0], f"{section}.") if classes else (AerieConfig, "")
    if dataclasses.is_dataclass(owner):
        defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    else:  # AerieConfig, a pydantic model
        defaults = {section: AerieConfig.model_fields[section].default}
    descriptions, types, declared = _descriptions(owner), get_type_hints(owner), settings(owner)
    return [
        Key(f"{prefix}{name}", _printed(default), descriptions[name], types[name], declared.get(name, Setting()))
        for name, default in defaults.items()
    ]


def key_lines(sections: Iterable[str]) -> Iterator[str]:
    """Return lines for a terminal: each key with its default, and its description below. No sections: all. Raises
    ConfigError."""
    for key in (key for section in list(sections) or AerieConfig.model_fields for key in keys(section)):
        yield f"{key.name}: {key.default}"
        yield from textwrap.wrap(key.explanation, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def with_tables(page: str) -> str:
    """Return a page in Markdown with a table below each line `<!-- keys of SECTION, SECTION -->`."""

    def table(match: re.Match[str]) -> str:
        rows = [key for section in match.group(1).split(", ") for key in keys(section)]
        lines = [f"| `{key.name}` | {key.default} | {key.explanation.replace('|', chr(92) + '|')} |\n" for key in rows]
        return match.group() + "| key | default | meaning |\n| --- | --- | --- |\n" + "".join(lines)

    return _MARK.sub(table, page)


def _types(section: str) -> tuple[Any, ...]:
    annotation = AerieConfig.model_fields[section].annotation
    return get_args(annotation) or (annotation,)


def _descriptions(kind: type) -> dict[str, str]:
    """Return the description of each field of a class and its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for line in re.sub(r"\n {4,}", " ", inspect.cleandoc(base.__doc__ or "")).splitlines():
            key, colon, meaning = line.partition(": ")
            if colon and key.isidentifier():
                descriptions[key] = meaning.strip().removesuffix(".")
    return descriptions


def _printed(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default == ():
        return "none"
    if default == "":
        return '""'
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


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
    """Yield a key of a YAML file as words of a command line."""
    if isinstance(value, bool):
        yield f"{name}={str(value).lower()}"  # for flags; `normalised` makes --no-flag of it
    elif isinstance(value, Mapping):
        yield f"{name}={json.dumps(value)}"
    elif isinstance(value, list):
        yield from (name, *map(str, value))
    elif value is not None:
        yield f"{name}={value}"
