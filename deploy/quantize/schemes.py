"""Schemes of `--scheme`: presets of compressed-tensors that Aerie serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)

from aerie.cluster.config import ConfigError
from aerie.deploy.quantize.names import SCHEMES


@dataclass(frozen=True)
class Scheme:
    """A scheme with the objects of compressed-tensors.

    name: value of `--scheme`.
    format: compressed-tensors' name of the packed format.
    scheme: scheme of every quantised matrix.
    """

    name: str
    format: str
    scheme: QuantizationScheme

    @property
    def weights(self) -> QuantizationArgs:
        return self.scheme.weights

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return config.json's quantization_config. ignored: modules that are not quantised."""
        config = QuantizationConfig(
            config_groups={"group_0": self.scheme},
            format=self.format,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=list(ignored),
        )
        content: dict[str, Any] = config.model_dump(mode="json")
        return content


def scheme_of(name: str, group_size: int | None, is_asymmetric: bool, is_ordered: bool) -> Scheme:
    """Return the scheme of `--scheme`.

    group_size: inputs that share a scale; -1: one scale per output; None: the preset's.
    is_ordered: whether columns are rounded in the order of their inputs' size; the configuration then says so.
    Raises ConfigError for an option that the scheme does not support.
    """
    preset = SCHEMES[name]
    if not preset.is_integer and (group_size is not None or is_asymmetric):
        option = "--group-size" if group_size is not None else "--asymmetric"
        raise ConfigError(f"{option}: {name} has a fixed layout of scales; leave it out, or take w4a16 or w8a16")
    if group_size is not None and group_size != -1 and (group_size < 8 or group_size % 8):
        raise ConfigError(f"--group-size={group_size}: must be a multiple of 8, or -1 for a scale per output; try 64")
    scheme = preset_name_to_scheme(preset.preset, ["Linear"])
    changes: dict[str, Any] = {}
    if group_size is not None:
        per_output = group_size == -1
        changes = {"strategy": "channel", "group_size": None} if per_output else {"group_size": group_size}
    if is_asymmetric:
        changes["symmetric"] = False
    if is_ordered and preset.is_integer and changes.get("strategy") != "channel":
        changes["actorder"] = "static"  # the groups stay in the order of inputs
    settings = scheme.weights.model_dump() | changes
    return Scheme(name, preset.format, scheme.model_copy(update={"weights": QuantizationArgs(**settings)}))
