"""The C++ products for CPUs against float64, and what a row's result must not depend on."""

import dataclasses

import pytest
import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.kernels.gemm.choice import choose_gemm
from aerie.kernels.gemm.host_cpp import HostGEMM, multiply, rows_of
from aerie.kernels.gemm.host_weight import BFLOAT16, FLOAT32, INT4, INT8, HostWeight, packed, stored_exactly
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.packed.product import HostPackedProduct, choose_product
from aerie.kernels.packed.weight import dequantize, pack

pytestmark = pytest.mark.skipif(not compiles(Capability.of(torch.device("cpu"))), reason="no C++ compiler")

OPTIONS = GEMMOptions(host=True)
SIZES = ((37, 96), (16, 32), (130, 160), (64, 480))  # outputs, inputs: also no whole blocks of 16 outputs
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 23, 24, 41)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(58)


def _weights(n: int, k: int) -> dict[str, tuple[HostWeight, Tensor]]:
    """Return a weight of each format, and what it stands for in float64."""
    generator = _generator()
    dense = torch.randn(n, k, generator=generator)
    found = {"float32": (stored_exactly(dense), dense.double())}
    halves = dense.bfloat16().float()
    found["bfloat16"] = stored_exactly(halves), halves.double()
    scales = torch.rand(n, k // 32, generator=generator) + 0.5
    offsets = torch.randn(n, k // 32, generator=generator)
    for bits in (4, 8):
        codes = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
        centred = codes.double() - (1 << bits - 1)
        scaled = centred * scales.double().repeat_interleave(32, 1)
        found[f"int{bits}"] = packed(codes, scales, None, 32, bits), scaled
        moved = scaled + offsets.double().repeat_interleave(32, 1)
        found[f"int{bits} and offsets"] = packed(codes, scales, offsets, 32, bits), moved
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(_weights(1, 32)))
def test_products_equal_those_of_the_dequantised_weight(size: tuple[int, int], name: str) -> None:
    n, k = size
    weight, dense = _weights(n, k)[name]
    bias = torch.randn(n, generator=_generator())
    for rows in (1, 6, 17, 40):
        x = torch.randn(rows, k, generator=_generator())
        expected = x.double() @ dense.T + bias.double()
        # each of k products and additions errs by at most 2^-24 of the sum of magnitudes
        bound = (x.double().abs() @ dense.abs().T + bias.abs()) * (k + 4) * 2.0**-24
        # an offset is added apart: its product has the magnitudes of inputs and of codes before they cancel
        bound = bound + (x.double().abs().sum(1, keepdim=True) * 160 * (k + 4) * 2.0**-24 if "offsets" in name else 0)
        assert bool(((multiply(weight, x, bias).double() - expected).abs() <= bound).all())
    assert torch.allclose(rows_of(weight, torch.arange(n)).double(), dense, rtol=2.0**-23, atol=2.0**-18)


@pytest.mark.parametrize("name", list(_weights(1, 32)))
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_how_many_rows_there_are(name: str, threads: int) -> None:
    weight, _ = _weights(530, 256)[name]  # large enough to be shared by threads
    x = torch.randn(max(ROWS), 256, generator=_generator())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([multiply(weight, row.unsqueeze(0), None) for row in x])
        for rows in ROWS:
            assert torch.equal(multiply(weight, x[:rows], None), alone[:rows]), rows
            assert torch.equal(multiply(weight, x[-rows:], None), alone[-rows:]), rows
    finally:
        torch.set_num_threads(before)


def test_rows_may_lie_apart_and_results_are_written_where_the_caller_wants() -> None:
    weight, _ = _weights(48, 64)["int4"]
    wide = torch.randn(5, 100, generator=_generator())
    out = torch.empty(5, 48)
    assert multiply(weight, wide[:, :64], None, out) is out
    assert torch.equal(out, multiply(weight, wide[:, :64].contiguous(), None))


def test_no_rows_give_no_results() -> None:
    assert multiply(_weights(48, 64)["int8"][0], torch.empty(0, 64), None).shape == (0, 48)


@pytest.mark.parametrize(("made", "format"), [("float32", FLOAT32), ("bfloat16", BFLOAT16), ("int8", INT8)])
def test_a_weight_is_stored_in_the_smallest_format_that_loses_nothing(made: str, format: int) -> None:
    dense = torch.randn(200, 320, generator=_generator())
    if made == "bfloat16":
        dense = dense.bfloat16().float()
    elif made == "int8":  # as ggml's Q8_0: the largest code of a group is 127, and scales have 11 bits
        scale = (dense.view(200, -1, 32).abs().amax(-1, keepdim=True) / 127).half().float()
        dense = ((dense.view(200, -1, 32) / scale).round().clamp(-127, 127) * scale).view(200, 320)
        dense[:, ::32] = 127 * scale[..., 0]
    gemm = HostGEMM.of(dense, OPTIONS)
    assert gemm.stored.format == format
    assert torch.equal(gemm.dense(), dense)
    ids = torch.tensor([3, 199, 0, 3])
    assert torch.equal(gemm.rows(ids), dense[ids])


def test_a_group_of_zeros_is_stored_exactly() -> None:
    dense = torch.zeros(20, 64)
    assert torch.equal(HostGEMM.of(dense, OPTIONS).dense(), dense)


@pytest.mark.parametrize(("code", "top"), [("int4", 16), ("int8", 256)])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_packed_weights_are_multiplied_as_they_are(code: str, top: int, has_zeros: bool) -> None:
    generator = _generator()
    codes = torch.randint(0, top, (72, 192), generator=generator, dtype=torch.uint8)
    scales = torch.rand(72, 3, generator=generator).half()
    zeros = torch.randint(0, top, (72, 3), generator=generator) if has_zeros else None
    weight = pack(codes, scales, zeros, None, 64, code)  # type: ignore[arg-type]
    product = choose_product(weight, OPTIONS)
    assert isinstance(product, HostPackedProduct) and product.weight.codes.is_meta
    dense = dequantize(weight, torch.float32)
    # offsets are rounded once more than (code - zero) * scale
    assert torch.allclose(product.dense(torch.float32), dense, rtol=0, atol=top * 2.0**-22)
    x = torch.randn(3, 192, generator=generator)
    assert torch.allclose(product.multiply(x, None), x @ dense.T, rtol=1e-4, atol=top * 1e-3)


def test_other_weights_keep_torchs_products() -> None:
    small = torch.randn(8, 8)
    assert not isinstance(choose_gemm(small, OPTIONS), HostGEMM)
    large = torch.randn(512, 512)
    assert isinstance(choose_gemm(large, OPTIONS), HostGEMM)
    assert not isinstance(choose_gemm(large, dataclasses.replace(OPTIONS, host=False)), HostGEMM)


def test_dequantised_blocks_of_q4_1_are_stored_in_4_bits() -> None:
    generator = _generator()
    scales = (torch.rand(70, 6, 1, generator=generator) * 0.1).half().float()
    minima = torch.randn(70, 6, 1, generator=generator).half().float()
    codes = torch.randint(0, 16, (70, 6, 32), generator=generator).float()
    codes[..., 3], codes[..., 30] = 0, 15
    dense = (codes * scales + minima).view(70, 192)
    gemm = HostGEMM.of(dense, OPTIONS)
    assert gemm.stored.format == INT4
    # the offset, the scaled code and their sum are rounded: 1.5 units in the last place of numbers up to 8
    assert torch.allclose(gemm.dense(), dense, rtol=0, atol=1.5 * 2.0**-21)
    dense[69, 191] += 0.01
    assert HostGEMM.of(dense, OPTIONS).stored.format == FLOAT32


def test_results_are_float32_whatever_the_default_dtype_is() -> None:
    """Kernels write float32: into memory for bfloat16 they would write beyond its end."""
    x = torch.randn(5, 96, generator=_generator())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for weight, dense in _weights(40, 96).values():
            assert multiply(weight, x, None).dtype == rows_of(weight, torch.tensor([1, 3])).dtype == torch.float32
            torch.testing.assert_close(multiply(weight, x, None), x @ dense.float().T, rtol=1e-4, atol=1e-4)
        assert silu_mul(x).dtype == torch.float32
        assert stored_exactly(torch.ones(40, 96)).scales.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
