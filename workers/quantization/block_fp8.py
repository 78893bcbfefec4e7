"""FP8 weights with a scale per block of rows and columns, as DeepSeek-V3 and Qwen3 publish them (arXiv 2412.19437,
section 3.3): `quant_method: fp8` with `weight_block_size`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.quantization.fp8_quant import Fp8Quant
from workers.quantization.fp8_weight import Block, Fp8Scheme
from workers.quantization.quant_method import QuantMethod, list_of_names
from workers.quantization.tensor_fp8 import read_tensor_fp8

_KIND = "weight_scale_inv"
_UNQUANTISED = ("lm_head", "eh_proj", "shared_head.head")  # not listed in published checkpoints


@dataclass(frozen=True)
class BlockFp8(Fp8Quant):
    """block: rows and columns that share a scale.
    ignored: modules that are left in bf16, with all in them.
    """

    block: Block
    ignored: tuple[str, ...]

    @property
    def scheme(self) -> Fp8Scheme:
        return Fp8Scheme(_KIND, self.block)

    def ignores(self, name: str) -> bool:
        """Whether an entry of the list is the module, contains it, or is a part of its name."""
        return any(f".{entry}." in f".{name}." for entry in self.ignored)


def read_block_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """See `workers.quantization.table.QuantReader`."""
    block = quantization.get("weight_block_size")
    if not block:
        return read_tensor_fp8(quantization, source)
    for key, only in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        value = quantization.get(key) or only
        if value != only:
            raise ValueError(f"{source}: quantization_config.{key}={value!r} is not supported; only {only!r} is")
    are_sizes = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not are_sizes or len(block) != 2:
        raise ValueError(f"{source}: quantization_config.weight_block_size={block!r}: must be two sizes, as [128, 128]")
    left = list_of_names(quantization, "modules_to_not_convert", source)
    return BlockFp8((block[0], block[1]), (*_UNQUANTISED, *left))
