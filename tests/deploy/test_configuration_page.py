"""docs/configuration.md: every key of a configuration, with its default, and no other."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

from cluster.config import AerieConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def _defaults() -> dict[str, Any]:
    """section.key -> default, of all sections; of the keys outside of sections key -> default."""
    found: dict[str, Any] = {}
    for name, field in AerieConfig.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if dataclasses.is_dataclass(kind)]
        for kind in kinds:
            found |= {f"{name}.{f.name}": f.default for f in dataclasses.fields(kind)}
        if not kinds:
            found[name] = field.default
    return found


def _listed() -> dict[str, str]:
    """The same of the page, defaults as they are written there."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        names = re.findall(r"`(\w+)`", section.partition("\n")[0])
        for key, default in re.findall(r"^\| `([\w.]+)` \| ([^|]*?) \|", section, re.MULTILINE):
            inside = "." not in key and key not in names and len(names) == 1
            found[f"{names[0]}.{key}" if inside else key] = default
    return found


def _written(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if default == "":
        return '""'
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_page_lists_every_key_with_its_default() -> None:
    listed, defaults = _listed(), _defaults()
    assert set(listed) == set(defaults)
    for key, default in defaults.items():
        same = listed[key] == _written(default) or (isinstance(default, float) and float(listed[key]) == default)
        assert same, f"{key}: the page says {listed[key]}, its default is {_written(default)}"
