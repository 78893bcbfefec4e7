"""`Setting`: the declaration of a configuration key beside its name, type, default and description.

    max_running: Annotated[int | Auto, Setting("--max-num-seqs --max-running-requests", ge=1)] = "auto"

From it follow the check, the options of the command line and the documentation (`docs/add-an-option.md`). Without
torch, because the command line imports it."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

Number = int | float | bool
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}
_UNITS = {"_s": " seconds", "_ms": " milliseconds"}  # by the end of a name


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number.

    rule: what follows "must be" in the error; "": the bounds.
    """

    ge: Number | None = None
    gt: Number | None = None
    le: Number | None = None
    lt: Number | None = None
    rule: str = ""

    @property
    def bounds(self) -> dict[str, Any]:
        """The bounds that are set, by their names."""
        return {name: bound for name in _BOUNDS if (bound := getattr(self, name)) is not None}

    def check(self, label: str, value: Number) -> None:
        """Raise ValueError if a value is out of bounds. label: its name in the message."""
        if all(_BOUNDS[name][1](value, bound) for name, bound in self.bounds.items()):
            return
        rule = " and ".join(f"{_BOUNDS[name][0]} {bound:g}" for name, bound in self.bounds.items())
        unit = _UNITS.get(label[label.rfind("_") :], "") if "_" in label else ""
        raise ValueError(f"{label}={value}: must be {self.rule or rule + unit}")


@dataclass(frozen=True)
class Setting(Bounds):
    """Metadata of an annotated field of a section. Bounds apply to numbers only, not to `auto` or none.

    flags: spellings of its option, separated by spaces: vLLM's first, then SGLang's; "": the key has no option.
    note: how the key differs from the option of that name of other servers; printed when it is used.
    metavar: name of the value in the help; "": by the type.
    """

    flags: str = ""
    note: str = ""
    metavar: str = ""


@cache
def settings(section: type) -> Mapping[str, Setting]:
    """Return the declarations of a section's annotated fields, by name."""
    return {
        name: setting
        for name, hint in get_type_hints(section, include_extras=True).items()
        for setting in getattr(hint, "__metadata__", ())
        if isinstance(setting, Setting)
    }


def check_settings(section: object) -> None:
    """Raise ValueError, naming field, value and rule, for a value out of its declared bounds."""
    kind: type = type(section)
    for name, setting in settings(kind).items():
        if isinstance(value := getattr(section, name), int | float):
            setting.check(name, value)
