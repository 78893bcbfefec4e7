"""AutoRound (arXiv 2309.05516): `quant_method: auto-round`, packed in the layout of GPTQ or of AWQ."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.workers.quantization.integers.awq import UNQUANTISED, awq_scheme
from aerie.workers.quantization.integers.gptq import gptq_scheme
from aerie.workers.quantization.integers.scheme import IntScheme, SchemeQuant
from aerie.workers.quantization.module_lists import bits_of, check_pattern, contains, flag_in, group_of, only, refuse
from aerie.workers.quantization.quant_method import QuantMethod

_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_PLAIN_BITS = 16


@dataclass(frozen=True)
class AutoRound(SchemeQuant):
    """modules: schemes of modules by name or pattern of the full name; None: not quantised.
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
    """See `aerie.workers.quantization.table.QuantReader`."""
    only(quantization, source, "packing_format", *_PACKINGS)
    only(quantization, source, "data_type", "int", "int_sym", "int_asym")
    only(quantization, source, "act_bits", 16, 32)
    return AutoRound(
        source,
        _scheme(quantization, source),
        tuple(_modules(quantization, source)),
        tuple(_blocks(quantization, source)),
    )


def _scheme(quantization: Mapping[str, Any], source: str) -> IntScheme:
    packing = str(quantization.get("packing_format") or _PACKINGS[0])
    group, symmetric = group_of(quantization, source, "group_size"), flag_in(quantization, source, "sym", True)
    if "awq" in packing:
        bits_of(quantization, source, "bits", supported=(4,))
        return awq_scheme(group, symmetric)
    return gptq_scheme(bits_of(quantization, source, "bits"), group, symmetric)


def _modules(quantization: Mapping[str, Any], source: str) -> list[tuple[str, IntScheme | None]]:
    extra = quantization.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        refuse(source, "extra_config", extra, "must be an object of modules", "download the checkpoint again")
    modules = []
    for name, changes in extra.items():
        check_pattern(name, "extra_config", source)
        is_plain = (changes.get("bits") or 0) >= _PLAIN_BITS
        modules.append((name, None if is_plain else _scheme({**quantization, **changes}, source)))
    return modules


def _blocks(quantization: Mapping[str, Any], source: str) -> list[str]:
    given = quantization.get("block_name_to_quantize") or quantization.get("to_quant_block_names") or []
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(source, "block_name_to_quantize", given, "must be modules' names", "download the checkpoint again")
    return [name.strip() for name in names]
