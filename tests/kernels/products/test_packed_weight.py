"""Weights of few bits: what is packed is what comes back, and the place of each code is the documented one."""

import pytest
import torch
from torch import Tensor

from aerie.kernels.packed import weight as packed
from aerie.kernels.packed.product import packed_product
from aerie.kernels.packed.weight import BITS, SYMMETRIC_ZERO, Code, dequantize, pack

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
KINDS = [("int4", False), ("int4", True), ("int8", False), ("int8", True), ("e2m1", False)]
SHAPES = [(64, 64, 32), (96, 256, 128), (130, 192, 192), (7, 96, 32), (200, 1440, 32), (48, 40, 40)]


def parts(
    n: int, k: int, group: int, code: Code, zeros: bool, dtype: torch.dtype, *experts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(n * k + group)
    codes = torch.randint(1 << BITS[code], (*experts, n, k), generator=generator, dtype=torch.uint8)
    scales = torch.randn((*experts, n, k // group), generator=generator).to(dtype)
    if not zeros:
        return codes, scales, None
    return codes, scales, torch.randint(1 << BITS[code], scales.shape, generator=generator, dtype=torch.uint8)


def literal(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, code: Code) -> Tensor:
    """The contract's formula, float64."""
    values = torch.tensor(E2M1)[codes.int()].double() if code == "e2m1" else codes.double()
    if code != "e2m1":
        zero = float(SYMMETRIC_ZERO[code]) if zeros is None else zeros.double().repeat_interleave(group, -1)
        values = values - zero
    return values * scales.double().repeat_interleave(group, -1)


@pytest.mark.parametrize("n,k,group", SHAPES)
@pytest.mark.parametrize(
    "code,zeros", [("int4", False), ("int4", True), ("int8", False), ("int8", True), ("e2m1", False)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_packed_weight_keeps_every_bit(
    n: int, k: int, group: int, code: Code, zeros: bool, dtype: torch.dtype
) -> None:
    codes, scales, zero = parts(n, k, group, code, zeros, dtype)
    weight = pack(codes, scales, zero, None, group, code)
    assert torch.equal(dequantize(weight, torch.float32).double(), literal(codes, scales, zero, group, code))


def test_blocks_of_nvfp4_and_the_scale_of_its_tensor() -> None:
    codes, scales, _ = parts(96, 192, 16, "e2m1", False, torch.bfloat16)
    scales = scales.to(torch.float8_e4m3fn).to(torch.bfloat16)
    row_scale = torch.rand(96, generator=torch.Generator().manual_seed(1))
    weight = pack(codes, scales, None, row_scale, 16, "e2m1")
    expected = literal(codes, scales, None, 16, "e2m1").float() * row_scale[:, None]
    assert torch.equal(dequantize(weight, torch.float32), expected)


@pytest.mark.parametrize("code", ["int4", "int8", "e2m1"])
def test_experts_are_weights_side_by_side(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_MAX_SCRATCH_VALUES", 1)  # a tile at a time
    codes, scales, zeros = parts(130, 160, 32, code, code == "int4", torch.bfloat16, 3)
    row_scale = torch.rand((3, 130), generator=torch.Generator().manual_seed(1))
    weight = pack(codes, scales, zeros, row_scale, 32, code)
    whole = dequantize(weight, torch.float32)
    assert weight.num_experts == 3 and whole.shape == codes.shape
    for index in range(3):
        one = pack(codes[index], scales[index], None if zeros is None else zeros[index], row_scale[index], 32, code)
        assert torch.equal(weight.expert(index).codes, one.codes)
        assert torch.equal(whole[index], dequantize(one, torch.float32))


def test_places_of_codes_are_the_documented_ones() -> None:
    n, k = 128, 192
    for code in ("int4", "int8"):
        codes, scales, _ = parts(n, k, 64, code, False, torch.bfloat16)  # type: ignore[arg-type]
        weight = pack(codes, scales, None, None, 64, code)  # type: ignore[arg-type]
        for row, column in ((0, 0), (127, 191), (77, 45), (8, 2), (1, 33), (64, 70)):
            big_j, i, h, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
            big_c, s, t, r, u, p = (
                column // 64,
                column // 32 % 2,
                column // 8 % 4,
                column // 4 % 2,
                column // 2 % 2,
                column % 2,
            )
            if code == "int4":
                found = int(weight.codes[big_j, big_c, i, g, t, 2 * s + r]) >> (16 * p + 8 * u + 4 * h) & 15
            else:
                found = int(weight.codes[big_j, big_c, i, s, g, t, 2 * r + u]) >> (16 * p + 8 * h) & 255
            assert found == int(codes[row, column])
            assert weight.scales[big_j, column // 64, g, i, h] == scales[row, column // 64]


def test_product_is_that_of_the_dequantized_weight() -> None:
    codes, scales, zeros = parts(96, 256, 128, "int4", True, torch.bfloat16)
    weight = pack(codes, scales, zeros, None, 128, "int4")
    x, bias = torch.randn((5, 256), generator=torch.Generator().manual_seed(2)), torch.ones(96)
    expected = torch.nn.functional.linear(x, dequantize(weight, torch.float32), bias)
    out = torch.empty(5, 96)
    assert torch.equal(packed_product(x, weight, bias), expected)
    assert packed_product(x, weight, bias, out) is out and torch.equal(out, expected)


@pytest.mark.parametrize(
    "change,error",
    [
        ({"group": 48}, "group=48: must divide K=128 and be a multiple of 32"),
        ({"group": 16}, "group=16: must divide"),
        ({"code": "int3"}, "code='int3': must be one of int4, int8, e2m1"),
        ({"codes": torch.zeros(64, 128)}, r"codes: torch.float32 \[64, 128\]: must be uint8"),
        ({"scales": torch.zeros(64, 2)}, r"scales: .*\[64, 2\]: must be .* \[64, 4\]"),
        ({"zeros": torch.zeros(64, 1)}, r"zeros: \[64, 1\]: must have the scales' shape"),
        ({"row_scale": torch.zeros(63)}, r"row_scale: \[63\]: must be \[64\]"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(change: dict[str, object], error: str) -> None:
    given: dict[str, object] = {
        "codes": torch.zeros((64, 128), dtype=torch.uint8),
        "scales": torch.zeros((64, 4)),
        "zeros": None,
        "row_scale": None,
        "group": 32,
        "code": "int4",
    }
    with pytest.raises(ValueError, match=error):
        pack(**(given | change))  # type: ignore[arg-type]
