"""The tables of docs/configuration.md, made from the configuration's docstrings, which have `key: description` for each
field. `python -m tests.support.repository.configuration_page` writes them into the page."""

import dataclasses
import inspect
import re
from typing import Any, get_args

from cluster.config import AerieConfig
from tests.support import DOCS

PAGE = DOCS / "configuration.md"
_HEADER = "| key | default | meaning |\n| --- | --- | --- |\n"
_TABLE = re.compile(rf"(<!-- keys of ([\w, ]+) -->\n)(?:{re.escape(_HEADER)}(?:\|.*\n)*)?")


def sections() -> dict[str, type]:
    """Section of the configuration -> its dataclass."""
    found: dict[str, type] = {}
    for name, field in AerieConfig.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if dataclasses.is_dataclass(kind)]
        if kinds:
            found[name] = kinds[0]
    return found


def descriptions(kind: type) -> dict[str, str]:
    """Field -> its description, of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for line in re.sub(r"\n {4,}", " ", inspect.cleandoc(base.__doc__ or "")).splitlines():
            key, colon, text = line.partition(": ")
            if colon and key.isidentifier():
                found[key] = text.strip()
    return found


def written(default: Any) -> str:
    """A default as the page has it."""
    if default is None or default == ():
        return "none"
    if default == "":
        return '""'
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def page(text: str) -> str:
    """The page with its tables made anew. Raises KeyError for a key without a description."""

    def table(match: re.Match[str]) -> str:
        return match.group(1) + _HEADER + "".join(_rows(match.group(2).split(", ")))

    return _TABLE.sub(table, text)


def listed(text: str) -> set[str]:
    """What the page has a table of: sections, and keys outside of sections."""
    return {name for match in _TABLE.finditer(text) for name in match.group(2).split(", ")}


def _rows(names: list[str]) -> list[str]:
    found = []
    for name in names:
        kind = sections().get(name)
        prefix = f"{name}." if len(names) > 1 else ""
        if kind is None:
            keys = {name: (AerieConfig.model_fields[name].default, descriptions(AerieConfig)[name])}
        else:
            told = descriptions(kind)
            keys = {f"{prefix}{f.name}": (f.default, told[f.name]) for f in dataclasses.fields(kind)}
        found += [f"| `{key}` | {written(default)} | {_cell(text)} |\n" for key, (default, text) in keys.items()]
    return found


def _cell(text: str) -> str:
    return text.removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
