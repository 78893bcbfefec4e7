"""The values of `--scheme`, without an import of the library, for `aerie --help`."""

from typing import NamedTuple


class Preset(NamedTuple):
    """A scheme of `aerie quantize`, by its name in compressed-tensors.

    preset: compressed-tensors' name of the scheme.
    format: format of its packed tensors.
    is_integer: whether group size, symmetry and a quantised head can be chosen.
    """

    preset: str
    format: str
    is_integer: bool
    says: str


SCHEMES = {
    "w4a16": Preset("W4A16", "pack-quantized", True, "4-bit integers in groups of 128"),
    "w8a16": Preset("W8A16", "pack-quantized", True, "8-bit integers in groups of 128"),
    "w8a8": Preset("W8A8", "int-quantized", False, "8-bit integers with a scale per output"),
    "fp8": Preset("FP8_DYNAMIC", "float-quantized", False, "FP8 with a scale per output; FP8 activations"),
    "mxfp4": Preset("MXFP4A16", "mxfp4-pack-quantized", False, "4-bit floats in blocks of 32, scales of powers of two"),
    "nvfp4": Preset("NVFP4A16", "nvfp4-pack-quantized", False, "4-bit floats in blocks of 16, scales in FP8"),
}
