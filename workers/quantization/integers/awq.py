"""AWQ (arXiv 2306.00978) in AutoAWQ's GEMM layout: `quant_method: awq`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.workers.quantization.integers.scheme import IntScheme, SchemeQuant
from aerie.workers.quantization.module_lists import bits_of, contains, flag_in, group_of, only
from aerie.workers.quantization.quant_method import QuantMethod, list_of_names

# Not quantised by default: the vocabulary head, and projections of drafts.
UNQUANTISED = ("lm_head", "shared_head.head", "eh_proj", "fc")


@dataclass(frozen=True)
class Awq(SchemeQuant):
    """left: unquantised modules; see `contains`."""

    scheme: IntScheme
    left: tuple[str, ...]

    def declared(self, name: str) -> IntScheme | None:
        return None if any(contains(entry, name) for entry in self.left) else self.scheme


def awq_scheme(group: int | None, symmetric: bool) -> IntScheme:
    return IntScheme("awq", 4, group, symmetric)


def read_awq(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """See `aerie.workers.quantization.table.QuantReader`."""
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
