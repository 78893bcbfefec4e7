"""Products with weights of few bits against float64: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1),
which `tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from aerie.kernels.packed import product_triton, tiles  # noqa: E402
from aerie.kernels.packed.product_triton import TritonPackedProduct, dequantize_rows  # noqa: E402
from aerie.kernels.packed.tiles import FIXED_ROWS, MAX_STREAM_ROWS, BlockPlan, fixed_tiles, packed_workspace_size  # noqa: E402
from aerie.kernels.packed.weight import BITS, Code, PackedWeight, dequantize, pack  # noqa: E402
from tests.bench.kernels.packed import VARIANTS  # noqa: E402
from tests.kernels.gemm.test_ordered_experts import terms  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS

KINDS: list[tuple[Code, int, bool, torch.dtype]] = [
    # code, group (0: a scale per output), zeros, scales
    ("int4", 64, False, torch.bfloat16),
    ("int4", 32, True, torch.float16),
    ("int4", 0, True, torch.bfloat16),
    ("int8", 64, True, torch.bfloat16),
    ("int8", 0, False, torch.bfloat16),
    ("e2m1", 32, False, torch.bfloat16),
    ("e2m1", 16, False, torch.bfloat16),
]
SMALL = [(70, 192)] if INTERPRETED else [(70, 384), (192, 640)]
# Llama-3 8B and 70B, Qwen3-8B and 27B, gpt-oss
LARGE = [
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    *((10240, 8192), (8192, 28672), (24576, 4096), (4096, 12288)),
    *((34816, 5120), (5120, 17408), (5120, 2880), (2880, 4096)),
]
ROWS = (3, 12, 40) if INTERPRETED else (*range(1, 65), 96, 200, 600)
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
# Sums in float32, and one rounding of the result: its root mean square is at most 2^-7 / sqrt(12) = 2.3e-3 of it in
# bfloat16 and 2.8e-4 in float16, and a fifth more where outputs are few.
BOUND = {torch.bfloat16: 2.75e-3, torch.float16: 3.4e-4}
# More rows multiply weights that are rounded to the rows' type.
DENSE_BOUND = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def weight_of(
    n: int, k: int, code: Code, group: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> PackedWeight:
    generator = torch.Generator(device).manual_seed(n + k)
    group = group or k
    codes = torch.randint(1 << BITS[code], (n, k), generator=generator, dtype=torch.uint8, device=device)
    scales = 0.02 * (0.5 + torch.rand((n, k // group), generator=generator, device=device))
    scales = scales.to(torch.float8_e4m3fn).to(dtype) if group == 16 else scales.to(dtype)
    zero = None
    if zeros:
        zero = torch.randint(1 << BITS[code], scales.shape, generator=generator, dtype=torch.uint8, device=device)
    row_scale = torch.rand(n, generator=generator, device=device) if group == 16 else None
    return pack(codes, scales, zero, row_scale, group, code)


def product_of(weight: PackedWeight, deterministic: bool = False) -> TritonPackedProduct:
    shape = weight.out_features, weight.in_features
    workspace = Workspace.allocate(*packed_workspace_size([shape]), torch.device(DEVICE))
    return TritonPackedProduct(weight, workspace, deterministic)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_is_that_of_float64(kind: tuple[Code, int, bool, torch.dtype], dtype: torch.dtype) -> None:
    code, group, zeros, scales = kind
    for (n, k), bias in product(SMALL, (False, True)):
        weight = weight_of(n, k, code, group, zeros, scales, DEVICE)
        ours, exact = product_of(weight), dequantize(weight, torch.float32).double()
        b = torch.randn(n, device=DEVICE).to(dtype) if bias else None
        for rows in ROWS:
            x = torch.randn(rows, 2 * k, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)[:, :k]
            expected = x.double() @ exact.T + (0.0 if b is None else b.double())
            out = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
            assert ours.multiply(x, b, out) is out
            bound = (BOUND if rows <= MAX_STREAM_ROWS else DENSE_BOUND)[dtype]
            assert error(out, expected) < bound, (n, k, rows)
        assert int(ours.workspace.tickets.abs().sum()) == 0


@pytest.mark.skipif(INTERPRETED, reason="large")
@pytest.mark.parametrize("n,k", LARGE)
def test_products_of_known_models_are_those_of_float64(n: int, k: int) -> None:
    for code, group in (("int4", 64 if k == 2880 else 128), ("e2m1", 32)):
        weight = weight_of(n, k, code, group, False, torch.bfloat16, DEVICE)  # type: ignore[arg-type]
        ours, exact = product_of(weight), dequantize(weight, torch.float32).double()
        x = torch.randn(200, k, device=DEVICE).bfloat16()
        expected = x.double() @ exact.T
        for rows in (*range(1, 65), 65, 128, 200):
            bound = (BOUND if rows <= MAX_STREAM_ROWS else DENSE_BOUND)[torch.bfloat16]
            assert error(ours.multiply(x[:rows], None), expected[:rows]) < bound, rows
            gated = silu_mul(expected[:rows].float()).double()
            # two roundings before the product, one after
            assert error(ours.multiply_gated(x[:rows]), gated) < 2 * bound, rows


@pytest.mark.parametrize("plan", VARIANTS.values(), ids=VARIANTS)
def test_every_plan_of_blocks_gives_the_product_of_float64(plan: BlockPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond the last output, inputs that are no whole step, and scales of a group, of half a step, of a row."""
    for module in (tiles, product_triton):
        monkeypatch.setattr(module, "product_tiles", lambda rows, n, k, gated, *_: plan.tiles(rows, n, k, gated))
    kinds: list[tuple[int, int, Code, int, bool]] = [
        (200, 384, "int4", 128, True),
        (128, 320, "e2m1", 32, False),
        (130, 192, "int8", 0, True),
    ]
    for (n, k, code, group, zeros), rows in zip(kinds, (11, 33, 20) if INTERPRETED else (11, 64, 20), strict=True):
        weight = weight_of(n, k, code, group, zeros, torch.bfloat16, DEVICE)
        ours, exact = product_of(weight), dequantize(weight, torch.float32).double()
        x = torch.randn(rows, k, device=DEVICE).half()
        assert error(ours.multiply(x, None), x.double() @ exact.T) < DENSE_BOUND[torch.float16], (n, k)
        if n % 128 == 0:
            gated = silu_mul((x.double() @ exact.T).float()).double()
            assert error(ours.multiply_gated(x), gated) < 2 * DENSE_BOUND[torch.float16]
        assert int(ours.workspace.tickets.abs().sum()) == 0


def test_gated_product_is_silu_mul_of_the_product() -> None:
    for (n, k), rows in product([(128, 192)], ROWS[:2]):
        weight = weight_of(n, k, "int4", 64, True, torch.bfloat16, DEVICE)
        x = torch.randn(rows, k, device=DEVICE).half()
        ours = product_of(weight)
        expected = silu_mul((x.double() @ dequantize(weight, torch.float32).double().T).float()).double()
        assert error(ours.multiply_gated(x), expected) < 1e-3


def test_a_row_does_not_depend_on_the_others() -> None:
    n, k = SMALL[-1]
    weight = weight_of(n, k, "int4", 64, False, torch.bfloat16, DEVICE)
    ours = product_of(weight)
    x = torch.randn(12, k, device=DEVICE).half()
    whole = ours.multiply(x, None)
    x[:7], x[8:] = 3.0, -80.0
    assert torch.equal(ours.multiply(x, None)[7], whole[7])


def test_deterministic_products_of_a_row_do_not_depend_on_the_number_of_rows() -> None:
    """Nor on how many blocks of rows fit in the workspace. 600 rows take two launches."""
    n, k = SMALL[0]
    weight = weight_of(n, k, "int4", 64, False, torch.bfloat16, DEVICE)
    ours = product_of(weight, deterministic=True)
    x = torch.randn(600, k, device=DEVICE).half()
    whole = ours.multiply(x, None)
    exact = x.double() @ dequantize(weight, torch.float32).double().T
    assert error(whole, exact) < BOUND[torch.float16]
    assert not ours.multiply(x[:0], None).numel()
    for first, count in ((0, 5), (FIXED_ROWS, 5), (3, 1), (7, 8), (2, 16), (1, 31), (9, 64), (8, 65), (5, 127)):
        assert torch.equal(ours.multiply(x[first : first + count], None), whole[first : first + count])
    cells = max(1, fixed_tiles(600, n, k).part_cells(n))
    part = Workspace.allocate(2 * cells, 64, torch.device(DEVICE))
    assert torch.equal(TritonPackedProduct(weight, part, True).multiply(x[:150], None), whole[:150])


@pytest.mark.parametrize("deterministic", [True, False])
def test_sums_in_which_the_order_matters(deterministic: bool) -> None:
    """2^24, 1, -2^24, 2, 1 in turns. Other engines add few rows in another order than many, which is found."""
    n, k = 64, 2560
    codes, scales = torch.full((n, k), 9, dtype=torch.uint8), torch.full((n, k // 64), 2.0**12)
    weight = pack(codes.to(DEVICE), scales.to(DEVICE, torch.bfloat16), None, None, 64, "int4")
    x = terms(k, 64).repeat(127, 1).to(DEVICE, torch.bfloat16)
    ours = product_of(weight, deterministic)
    sums = [ours.multiply(x[:rows], None)[:, 0] for rows in (1, 9, FIXED_ROWS + 1, 127)]
    found = set(torch.cat(sums).tolist())
    assert (len(found) == 1) == deterministic


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_rows_are_rounded_once(kind: tuple[Code, int, bool, torch.dtype], dtype: torch.dtype) -> None:
    code, group, zeros, scales = kind
    for n, k in SMALL:
        weight = weight_of(n, k, code, group, zeros, scales, DEVICE)
        expected = dequantize(weight, torch.float32)
        for first, end in ((0, n), (64, n)):
            out = torch.full((end - first, k), float("nan"), dtype=dtype, device=DEVICE)
            dequantize_rows(weight, first, out)
            if weight.row_scale is None:
                assert torch.equal(out, expected[first:end].to(dtype))
            else:
                assert error(out, expected[first:end].double()) < DENSE_BOUND[dtype]
