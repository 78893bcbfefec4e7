"""compressed-tensors' integer weights, with a scheme per group of modules (`quant_method: compressed-tensors`):
`pack-quantized`, 4 and 8 bits with 16-bit activations, and `int-quantized`, W8A8, whose activations stay in the model's
dtype here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aerie.workers.quantization.integers.format import Layout
from aerie.workers.quantization.integers.scheme import IntScheme, SchemeQuant
from aerie.workers.quantization.quant_method import (
    QuantMethod,
    bits_of,
    check_pattern,
    flag_in,
    group_of,
    list_of_names,
    matches,
    refuse,
)

_PACKED: Layout = "pack-quantized"
_W8A8: Layout = "int-quantized"
_W8A16_NOTE = "activations stay in the model's type (int8 weights are multiplied as W8A16 here), which is more exact"
_LINEAR = "Linear"  # the class of all linear layers
_PRESETS: dict[str, dict[str, Any]] = {  # of compressed-tensors 0.20, compressed_tensors/quantization/quant_scheme.py
    "W4A16": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True},
    "W4A16_ASYM": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
    "W8A16": {"num_bits": 8, "strategy": "group", "group_size": 128, "symmetric": True},
}


@dataclass(frozen=True)
class PackQuantized(SchemeQuant):
    """A checkpoint of compressed-tensors with integer weights.

    groups: targets and their scheme. Names have priority over patterns, and patterns over the class.
    ignored: unquantised modules.
    """

    groups: tuple[tuple[str, IntScheme], ...]
    ignored: tuple[str, ...]

    def fallback(self, device: torch.device) -> str | None:
        has_w8a8 = any(scheme.layout == _W8A8 for _, scheme in self.groups)
        reasons = [super().fallback(device), _W8A16_NOTE if has_w8a8 else None]
        return "; ".join(filter(None, reasons)) or None

    def declared(self, name: str) -> IntScheme | None:
        if any(entry == _LINEAR or matches(entry, name) for entry in self.ignored):
            return None
        matching = [(target, scheme) for target, scheme in self.groups if target == _LINEAR or matches(target, name)]
        matching.sort(key=lambda pair: (pair[0] == _LINEAR, pair[0].startswith("re:")))
        return matching[0][1] if matching else None


def read_pack_quantized(quantization: Mapping[str, Any], source: str) -> QuantMethod | None:
    """Read integer weights; None if there are none. See `aerie.workers.quantization.table.QuantReader`."""
    declared = quantization.get("config_groups")
    groups = {name: _expanded(name, group) for name, group in declared.items()} if isinstance(declared, dict) else {}
    if not any(_weights(group).get("type", "int") == "int" for group in groups.values()):
        return None
    _refuse_others(quantization, source)
    schemes = []
    for name, group in groups.items():
        scheme = _scheme(name, group, quantization.get("format"), source)
        targets = list_of_names(group, "targets", source)
        if not targets:
            refuse(source, f"config_groups.{name}.targets", targets, 'must name modules, such as ["Linear"]')
        for target in targets:
            if target.startswith("re:"):
                check_pattern(target[3:], f"config_groups.{name}.targets", source)
            elif target != _LINEAR and "." not in target and target[:1].isupper():
                refuse(source, f"config_groups.{name}.targets", target, f"is not supported; of classes {_LINEAR} is")
        schemes += [(target, scheme) for target in targets]
    ignored = list_of_names(quantization, "ignore", source)
    for entry in ignored:
        if entry.startswith("re:"):
            check_pattern(entry[3:], "ignore", source)
    return PackQuantized(source, tuple(schemes), ignored)


def _expanded(name: str, group: Any) -> Mapping[str, Any]:
    """Return a group in full; it may be a preset's name with targets."""
    if isinstance(group, list) and name.upper() in _PRESETS:
        return {"targets": group, "weights": {"type": "int", **_PRESETS[name.upper()]}}
    return group if isinstance(group, dict) else {}


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, dict) else {"type": ""}


def _refuse_others(quantization: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for sparse weights and for transformed inputs."""
    sparsity = quantization.get("sparsity_config") or {}
    if sparsity and sparsity.get("format") != "dense":
        refuse(source, "sparsity_config", sparsity, "is not supported; only dense weights are")
    transforms = quantization.get("transform_config") or {}
    if transforms.get("config_groups"):
        refuse(source, "transform_config", transforms, "is not supported: inputs would have to be rotated, too")


def _scheme(name: str, group: Mapping[str, Any], layout: Any, source: str) -> IntScheme:
    """Read the scheme of one group of compressed-tensors' config_groups. Raises ValueError for what is not supported.

    name: of the group, for errors. layout: format of the checkpoint, for a group that declares none.
    """
    key, weights = f"config_groups.{name}", _weights(group)
    layout = group.get("format") or layout
    if layout not in (_PACKED, _W8A8):
        refuse(source, "format", layout, f"is not supported for integer weights; {_PACKED!r} and {_W8A8!r} are")
    inputs = group.get("input_activations") or {}
    if inputs and (layout != _W8A8 or inputs.get("num_bits") != 8 or inputs.get("type", "int") != "int"):
        refuse(source, f"{key}.input_activations", inputs, "is not supported with integer weights")
    if group.get("output_activations"):
        refuse(source, f"{key}.output_activations", group["output_activations"], "is not supported")
    if weights.get("type", "int") != "int":
        refuse(source, f"{key}.weights.type", weights.get("type"), "is not supported with groups of integer weights")
    supported = (8,) if layout == _W8A8 else (4, 8)
    bits = bits_of(weights, source, "num_bits", supported=supported, within=f"{key}.weights.")
    is_symmetric = flag_in(weights, source, "symmetric", True)
    if layout == _W8A8 and not is_symmetric:
        refuse(source, f"{key}.weights.symmetric", False, f"is not supported for {_W8A8}; only true is")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        refuse(source, f"{key}.weights.strategy", strategy, "is not supported; 'group' and 'channel' are")
    size = group_of(weights, source, "group_size") if strategy == "group" else None
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        refuse(source, f"{key}.weights.actorder", order, "is not supported")
    ordered = order in (True, "group", "dynamic") and size is not None
    if ordered and layout == _W8A8:
        refuse(source, f"{key}.weights.actorder", order, f"is not supported for {_W8A8}")
    return IntScheme(layout, bits, size, is_symmetric, ordered)
