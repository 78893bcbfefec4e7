"""Options of `vllm serve` and of SGLang's server for `aerie serve MODEL`, and the configuration keys that they set.

`aerie.deploy.config.option_table` declares each option once, with all its spellings: with the same meaning, with a
difference (its note is printed), without effect (all are named in one line), or refused (with a remedy). `aerie.LLM`
takes the same names as keyword arguments. Imports nothing heavy.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from aerie.deploy.config.option_table import GROUPS, OPTIONS, Option
from aerie.deploy.config.vllm_values import SPECULATIVE_PARTS, Changes, OptionError, settled

_DRAFT, _DRAFT_REVISION = "speculative_draft_model_path", "speculative_draft_model_revision"


def add_options(parser: argparse.ArgumentParser, prefix: str = "vllm_") -> None:
    """Add every option of the table. A flag also has a form with `--no-`. Options that set keys have help. prefix: of
    the names of the parsed values."""
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for option in OPTIONS:
        group = groups.get(option.group, parser)
        text = option.help or argparse.SUPPRESS
        if option.nargs == 0:
            group.add_argument(*option.flags, dest=_dest(option, prefix), action="store_const", const=True, help=text)
            opposite = [f"--no-{flag.removeprefix('--')}" for flag in option.flags if flag.startswith("--")]
            how: dict[str, Any] = {"action": "store_const", "const": False}
            group.add_argument(*opposite, dest=_dest(option, prefix), help=argparse.SUPPRESS, **how)
        else:
            how = {"nargs": option.nargs, "metavar": option.metavar}
            group.add_argument(*option.flags, dest=_dest(option, prefix), default=None, help=text, **how)


def given(arguments: argparse.Namespace, prefix: str = "vllm_") -> dict[str, Any]:
    """Return the command line's options of the table, by name. prefix: see `add_options`."""
    values = {option.name: getattr(arguments, _dest(option, prefix), None) for option in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def changes(values: Mapping[str, Any], python: bool = False) -> tuple[Changes, list[str]]:
    """Return the keys that `values` (by name) set, a line for each option that differs from its server's, and one for
    all that have no effect. python: whether the values are keyword arguments. Raises OptionError that names option,
    value and remedy."""
    keys: Changes = {}
    notes, unused = [], []
    for name, value in _with_parts(values).items():
        option = _BY_NAME[name]
        shown = f"{name}={value!r}" if python else f"{option.flags[0]} {_text(value)}".rstrip()
        if not python and value is False:
            shown = f"--no-{option.flags[0].removeprefix('--')}"
        try:
            new_keys = option.keys(value)
        except OptionError as error:
            raise OptionError(f"{shown}: {error}") from None
        keys |= new_keys
        if option.is_unused:
            unused.append(shown)
        elif option.note:
            became = ", ".join(f"{key}={value}" for key, value in new_keys.items())
            notes.append(f"{shown}: {became + '; ' if became else ''}{option.note}")
    if unused:
        notes.append(f"no effect here: {', '.join(unused)}")
    return settled(keys), notes


def is_option(name: str) -> bool:
    """Whether the table has this option."""
    return name in _BY_NAME


def is_flag(spelling: str) -> bool:
    """Whether a spelling, such as `--enable-lora`, is one of a flag, which takes no value."""
    return spelling in _FLAGS


def _with_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the options that are parts of --speculative-config (`--spec-method`) inside it, and SGLang's
    revision of a draft beside its name on the hub."""
    parts = {SPECULATIVE_PARTS[name]: value for name, value in values.items() if name in SPECULATIVE_PARTS}
    plain = {name: value for name, value in values.items() if name not in SPECULATIVE_PARTS}
    if parts and "speculative_config" in plain:
        raise OptionError(f"--speculative-config: {', '.join(parts)} are in it and given beside it; give them once")
    head, revision = plain.get(_DRAFT, ""), plain.get(_DRAFT_REVISION)
    if revision and head and not head.startswith(("/", ".", "~")):
        plain = {name: value for name, value in plain.items() if name != _DRAFT_REVISION}
        plain[_DRAFT] = f"{head}@{revision}"
    return plain | ({"speculative_config": parts} if parts else {})


def _dest(option: Option, prefix: str) -> str:
    return prefix + option.name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_BY_NAME = {option.name: option for option in OPTIONS}
_FLAGS = {flag for option in OPTIONS if option.nargs == 0 for flag in option.flags}
