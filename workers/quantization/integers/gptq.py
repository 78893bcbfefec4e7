"""GPTQ (arXiv 2210.17323), as exported by AutoGPTQ, GPTQModel and AutoRound: `quant_method: gptq`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.workers.quantization.integers.awq import UNQUANTISED
from aerie.workers.quantization.integers.scheme import IntScheme, SchemeQuant
from aerie.workers.quantization.module_lists import bits_of, check_pattern, contains, flag_in, group_of, only, refuse
from aerie.workers.quantization.quant_method import QuantMethod

_OVERRIDES = ("bits", "group_size", "desc_act", "sym")


@dataclass(frozen=True)
class Rule:
    """An entry of GPTQModel's `dynamic`: another scheme, or none, for modules whose names start with `pattern`."""

    pattern: str
    scheme: IntScheme | None


@dataclass(frozen=True)
class Gptq(SchemeQuant):
    """rules: the first match applies.
    only: quantised modules, see `contains`; empty: all but the head.
    quantises_head: whether the vocabulary head is quantised.
    """

    scheme: IntScheme
    rules: tuple[Rule, ...]
    only: tuple[str, ...]
    quantises_head: bool

    def declared(self, name: str) -> IntScheme | None:
        for rule in self.rules:
            if re.match(rule.pattern, name):
                return rule.scheme
        if name == "lm_head":
            return self.scheme if self.quantises_head else None
        if any(contains(entry, name) for entry in UNQUANTISED):
            return None
        return self.scheme if not self.only or any(contains(entry, name) for entry in self.only) else None


def gptq_scheme(bits: int, group: int | None, symmetric: bool, ordered: bool = False, v2: bool = False) -> IntScheme:
    """Return the scheme. ordered: `desc_act`; without groups, the order of inputs has no effect."""
    return IntScheme("gptq", bits, group, symmetric, ordered=ordered and group is not None, zeros_less_one=not v2)


def read_gptq(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """See `aerie.workers.quantization.table.QuantReader`."""
    for key in ("checkpoint_format", "format"):
        only(quantization, source, key, "gptq", "gptq_v2")
    only(quantization, source, "is_marlin_format", False)
    only(quantization, source, "pack_dtype", "int32")
    rotation = quantization.get("rotation")
    if rotation:
        refuse(source, "rotation", rotation, "is not supported: inputs would have to be rotated, too")
    v2 = "gptq_v2" in (quantization.get("checkpoint_format"), quantization.get("format"))
    return Gptq(
        source,
        _scheme(quantization, source, v2),
        _rules(quantization, source, v2),
        _only(quantization, source),
        flag_in(quantization, source, "lm_head", False),
    )


def _scheme(quantization: Mapping[str, Any], source: str, v2: bool) -> IntScheme:
    return gptq_scheme(
        bits_of(quantization, source, "bits"),
        group_of(quantization, source, "group_size"),
        flag_in(quantization, source, "sym", True),
        flag_in(quantization, source, "desc_act", False),
        v2,
    )


def _rules(quantization: Mapping[str, Any], source: str, v2: bool) -> tuple[Rule, ...]:
    dynamic = quantization.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        refuse(source, "dynamic", dynamic, "must be an object of patterns", "download the checkpoint again")
    rules = []
    for pattern, changes in dynamic.items():
        plain = pattern.removeprefix("-:").removeprefix("+:")
        check_pattern(plain, "dynamic", source)
        if pattern.startswith("-:"):
            rules.append(Rule(plain, None))
            continue
        changes = changes if isinstance(changes, dict) else {}
        other = {key: changes[key] for key in _OVERRIDES if changes.get(key) is not None}
        if other.get("bits") == 16:  # AutoRound marks unquantised modules so
            rules.append(Rule(plain, None))
        elif other or pattern.startswith("+:"):
            rules.append(Rule(plain, _scheme({**quantization, **other}, source, v2)))
    return tuple(rules)


def _only(quantization: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Read a list of modules, or of lists of them."""
    given = quantization.get("modules_in_block_to_quantize") or []
    flat = [name for each in given for name in (each if isinstance(each, list) else [each])]
    if not isinstance(given, list) or not all(isinstance(name, str) for name in flat):
        refuse(source, "modules_in_block_to_quantize", given, "must be modules' names", "download the checkpoint again")
    return tuple(flat)
