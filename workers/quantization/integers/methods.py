"""Readers of quantization_config for checkpoints in GPTQ's or AWQ's layout: `gptq` (arXiv 2210.17323, as exported by
AutoGPTQ, GPTQModel and AutoRound), `awq` (arXiv 2306.00978, AutoAWQ's GEMM layout) and `auto-round` (arXiv 2309.05516,
either layout)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.workers.quantization.integers.scheme import IntScheme, SchemeQuant
from aerie.workers.quantization.quant_method import (
    QuantMethod,
    bits_of,
    check_pattern,
    contains,
    flag_in,
    group_of,
    list_of_names,
    only,
    refuse,
)

# Not quantised by default: the vocabulary head, and projections of drafts.
UNQUANTISED = ("lm_head", "shared_head.head", "eh_proj", "fc")


@dataclass(frozen=True)
class Awq(SchemeQuant):
    """A checkpoint of AWQ.

    left: unquantised modules; see `contains`.
    """

    scheme: IntScheme
    left: tuple[str, ...]

    def declared(self, name: str) -> IntScheme | None:
        return None if any(contains(entry, name) for entry in self.left) else self.scheme


def awq_scheme(group: int | None, symmetric: bool) -> IntScheme:
    return IntScheme("awq", 4, group, symmetric)


def read_awq(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Return the method of a quantization_config. source: the checkpoint's name, for errors. Raises ValueError."""
    bits_of(quantization, source, "bits", "w_bit", supported=(4,))
    only(quantization, source, "version", "gemm")
    only(quantization, source, "checkpoint_format", "gemm")
    group = group_of(quantization, source, "group_size", "q_group_size")
    symmetric = not flag_in(quantization, source, "zero_point", True)
    left = list_of_names(quantization, "modules_to_not_convert", source)
    if flag_in(quantization, source, "lm_head", False):
        default = tuple(name for name in UNQUANTISED if name != "lm_head")
    else:
        default = UNQUANTISED
    return Awq(source, awq_scheme(group, symmetric), (*default, *left))


_OVERRIDES = ("bits", "group_size", "desc_act", "sym")


@dataclass(frozen=True)
class Rule:
    """An entry of GPTQModel's `dynamic`: modules whose names match `pattern` from their start have another scheme.
    scheme: None: they are not quantised."""

    pattern: str
    scheme: IntScheme | None


@dataclass(frozen=True)
class Gptq(SchemeQuant):
    """A checkpoint of GPTQ.

    rules: the first match applies.
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
    """Return the method of a quantization_config. source: the checkpoint's name, for errors. Raises ValueError."""
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
        _quantized_modules(quantization, source),
        flag_in(quantization, source, "lm_head", False),
    )


def _scheme(quantization: Mapping[str, Any], source: str, v2: bool) -> IntScheme:
    """Read the scheme of a GPTQ checkpoint. v2: zero points are stored as they are, not minus 1."""
    return gptq_scheme(
        bits_of(quantization, source, "bits"),
        group_of(quantization, source, "group_size"),
        flag_in(quantization, source, "sym", True),
        flag_in(quantization, source, "desc_act", False),
        v2,
    )


def _rules(quantization: Mapping[str, Any], source: str, v2: bool) -> tuple[Rule, ...]:
    """Read GPTQModel's `dynamic`: an object of patterns for names of modules. "-:pattern" leaves modules unquantised.
    "+:pattern", or a pattern without a sign, has an object of keys that differ from the checkpoint's own."""
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


def _quantized_modules(quantization: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Return the modules to which quantisation is limited, which the key lists flat or by block; () without limit."""
    declared = quantization.get("modules_in_block_to_quantize") or []
    flat = [name for item in declared for name in (item if isinstance(item, list) else [item])]
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in flat):
        refuse(
            source, "modules_in_block_to_quantize", declared, "must be modules' names", "download the checkpoint again"
        )
    return tuple(flat)


_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_PLAIN_BITS = 16  # bits from which a layer is not quantised


@dataclass(frozen=True)
class AutoRound(SchemeQuant):
    """A checkpoint of AutoRound.

    modules: schemes of modules by name or pattern of the full name; None: not quantised.
    blocks: prefixes of the names of quantised modules; empty: all but the head.
    """

    scheme: IntScheme
    modules: tuple[tuple[str, IntScheme | None], ...]
    blocks: tuple[str, ...]

    def declared(self, name: str) -> IntScheme | None:
        for entry, scheme in self.modules:
            if entry == name:
                return scheme
        for entry, scheme in self.modules:
            if re.fullmatch(entry, name):
                return scheme
        if self.blocks:
            return self.scheme if any(f"{name}.".startswith(f"{block}.") for block in self.blocks) else None
        return None if any(contains(entry, name) for entry in UNQUANTISED) else self.scheme


def read_auto_round(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Return the method of a quantization_config. source: the checkpoint's name, for errors. Raises ValueError."""
    only(quantization, source, "packing_format", *_PACKINGS)
    only(quantization, source, "data_type", "int", "int_sym", "int_asym")
    only(quantization, source, "act_bits", 16, 32)
    return AutoRound(
        source,
        _auto_round_scheme(quantization, source),
        tuple(_modules(quantization, source)),
        tuple(_blocks(quantization, source)),
    )


def _auto_round_scheme(quantization: Mapping[str, Any], source: str) -> IntScheme:
    """Read the scheme of an AutoRound checkpoint, packed like AWQ's or GPTQ's."""
    packing = str(quantization.get("packing_format") or _PACKINGS[0])
    group, symmetric = group_of(quantization, source, "group_size"), flag_in(quantization, source, "sym", True)
    if "awq" in packing:
        bits_of(quantization, source, "bits", supported=(4,))
        return awq_scheme(group, symmetric)
    return gptq_scheme(bits_of(quantization, source, "bits"), group, symmetric)


def _modules(quantization: Mapping[str, Any], source: str) -> list[tuple[str, IntScheme | None]]:
    """Read AutoRound's `extra_config`: for names or patterns of modules, the keys that differ from the checkpoint's
    own; 16 bits or more leave them unquantised."""
    extra = quantization.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(entry, dict) for entry in extra.values()):
        refuse(source, "extra_config", extra, "must be an object of modules", "download the checkpoint again")
    modules = []
    for name, changes in extra.items():
        check_pattern(name, "extra_config", source)
        is_plain = (changes.get("bits") or 0) >= _PLAIN_BITS
        modules.append((name, None if is_plain else _auto_round_scheme({**quantization, **changes}, source)))
    return modules


def _blocks(quantization: Mapping[str, Any], source: str) -> list[str]:
    """Return the names of AutoRound's quantised blocks, which are a list, or one string with commas."""
    declared = quantization.get("block_name_to_quantize") or quantization.get("to_quant_block_names") or []
    names = declared.split(",") if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(source, "block_name_to_quantize", declared, "must be modules' names", "download the checkpoint again")
    return [name.strip() for name in names]
