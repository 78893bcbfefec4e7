"""The keys of a configuration with defaults, options and descriptions. The descriptions are `key: description` in the
docstrings of its dataclasses. Printed by `aerie config --keys`; `make docs` puts them into docs/configuration.md;
`aerie.deploy.config.option_table` makes options of the command line of them."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from aerie.attention.setting import Setting, settings
from aerie.cluster.config import AerieConfig, ConfigError
from aerie.cluster.http.keys import KeyConfig

_MARK = re.compile(r"<!-- keys of ([\w., ]+) -->\n")
_WIDTH = 100


@dataclass(frozen=True)
class Key:
    """name: `section.key`, or a key outside of sections. default: as printed. kind: its type. setting: what else its
    field declares."""

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
    """Return the keys of a section, or the key of this name outside of sections. Raises ConfigError."""
    owner: type = KeyConfig
    prefix = ""
    if section != "ingress.api_keys":
        if section not in AerieConfig.model_fields:
            raise ConfigError(f"--keys {section}: no such section; there are {', '.join(AerieConfig.model_fields)}")
        kinds = [kind for kind in _types(section) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        owner, prefix = (kinds[0], f"{section}.") if kinds else (AerieConfig, "")
    defaults = {section: AerieConfig.model_fields[section].default} if owner is AerieConfig else {}
    if dataclasses.is_dataclass(owner):
        defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    told, types, declared = _descriptions(owner), get_type_hints(owner), settings(owner)
    return [
        Key(f"{prefix}{name}", _printed(default), told[name], types[name], declared.get(name, Setting()))
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
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for line in re.sub(r"\n {4,}", " ", inspect.cleandoc(base.__doc__ or "")).splitlines():
            key, colon, meaning = line.partition(": ")
            if colon and key.isidentifier():
                found[key] = meaning.strip().removesuffix(".")
    return found


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
