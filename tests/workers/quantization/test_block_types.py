"""Blocks of GGUF files against llama.cpp's own library, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from aerie.kernels.packed.weight import dequantize, pack
from aerie.workers.quantization.block_scheme import BLOCK_TYPES, BlockScheme


def random_blocks(name: str, rows: int, blocks: int, seed: int = 3) -> np.ndarray:
    """Any bytes are blocks; their float16 scales may be NaN, infinite or denormal."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * BLOCK_TYPES[name].num_bytes), np.uint8)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_blocks_mean_what_they_mean_in_llama_cpp(name: str) -> None:
    raw = random_blocks(name, 37, 3)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, Type[name])
    found = BLOCK_TYPES[name].dequantize(torch.from_numpy(raw)).numpy()
    is_nan = np.isnan(expected)
    assert (np.isnan(found) == is_nan).all() and is_nan.mean() < 0.2
    assert (found.view(np.int32) == expected.view(np.int32))[~is_nan].all()


def test_sizes_are_those_of_llama_cpp() -> None:
    for name, kind in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[Type[name]] == (kind.values, kind.num_bytes)


@pytest.mark.parametrize("name", [name for name, kind in BLOCK_TYPES.items() if kind.packed])
def test_packed_blocks_lose_nothing(name: str) -> None:
    weights = np.random.default_rng(5).normal(size=(70, 96)).astype(np.float32)
    raw = gguf.quantize(weights, Type[name])
    matrix = BlockScheme(name).read({"weight": torch.from_numpy(raw)})
    packed = pack(matrix.codes, matrix.scales, matrix.zeros, None, 32, BlockScheme(name).code)
    assert torch.equal(dequantize(packed, torch.float32), torch.from_numpy(gguf.dequantize(raw, Type[name])))


def test_blocks_without_a_finite_scale_are_refused() -> None:
    raw = torch.from_numpy(random_blocks("Q8_0", 2, 1))
    raw[1, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # NaN
    raw[0, :2] = 0
    with pytest.raises(ValueError, match="blocks of Q8_0 have scales that are NaN or infinite; download"):
        BlockScheme("Q8_0").read({"weight": raw})
