"""All supported quantisations, and the one that a config.json names.

Adding one is a file beside this one (the `QuantMethod`, its `LinearMethod`) and a row in `QUANT_METHODS`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from aerie.workers.quantization.block_scheme import METHOD, read_blocks
from aerie.workers.quantization.floats import (
    read_compressed_fp4,
    read_compressed_fp8,
    read_fp8,
    read_modelopt,
    read_mxfp4,
)
from aerie.workers.quantization.integers.methods import read_auto_round, read_awq, read_gptq
from aerie.workers.quantization.integers.pack_quantized import read_pack_quantized
from aerie.workers.quantization.quant_method import QuantMethod, Unquantized

# Arguments: quantization_config, and the checkpoint's name for errors.
QuantReader = Callable[[Mapping[str, Any], str], QuantMethod]


def read_compressed_tensors(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Return the method of a quantization_config. source: the checkpoint's name, for errors. Raises ValueError."""
    others = (read_compressed_fp4, read_pack_quantized)
    methods = (read(quantization, source) for read in others)
    return next((method for method in methods if method is not None), None) or read_compressed_fp8(quantization, source)


# Key: quantization_config.quant_method.
QUANT_METHODS: dict[str, QuantReader] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    METHOD: read_blocks,
}


def read_quant_method(config: Mapping[str, Any], source: str) -> QuantMethod:
    """Return the method of a config.json. Raises ValueError that lists the supported ones for an unsupported one.
    source: its name in errors."""
    quantization = config.get("quantization_config")
    if not quantization:
        return Unquantized()
    if not isinstance(quantization, dict):
        raise ValueError(
            f"{source}: config.json: quantization_config={quantization!r}: must be an object; download it again"
        )
    name = quantization.get("quant_method")
    if not isinstance(name, str) or name not in QUANT_METHODS:
        known = ", ".join(sorted(QUANT_METHODS))
        raise ValueError(
            f"{source}: quantization_config.quant_method={name!r} is not supported; supported: {known}; "
            "use the checkpoint in bf16 or fp16"
        )
    return QUANT_METHODS[name](quantization, source)
