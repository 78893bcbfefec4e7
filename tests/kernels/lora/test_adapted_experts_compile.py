"""The kernels of experts with adapters, compiled for Hopper without a GPU."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.experts.adapted import cells_triton  # noqa: E402
from aerie.kernels.experts.adapted.sorted_rows_triton import adapted_row_tiles  # noqa: E402
from aerie.kernels.experts.weights import ExpertSizes  # noqa: E402
from tests.kernels.attend.test_triton_compile import compiled  # noqa: E402
from tests.kernels.products.test_expert_kernels_compile import DEEPSEEK_V3, QWEN3, check  # noqa: E402
from tests.kernels.products.test_packed_experts_compile import GPT_OSS, MOVED, cases  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]


@pytest.mark.parametrize("sizes", [QWEN3, DEEPSEEK_V3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [8, 2048])
def test_gate_and_up_projections_fit_hopper(sizes: ExpertSizes, rows: int, tmp_path: Path) -> None:
    tiles, in_fp8 = adapted_row_tiles(rows, sizes), sizes.step == 128
    kind, product = "fp8e4nv" if in_fp8 else "bf16", tiles.gate_up
    constants = {"WIDTH": sizes.width, "SIZE": sizes.size, "BLOCK_M": tiles.block_m, "IN_FP8": in_fp8}
    constants |= {"BY_GROUP": in_fp8, "BLOCK_N": product.block_n, "STEP": sizes.step, "SLOTS": 8, "EXPERTS": 256}
    constants |= {"BINS": 256, "WEIGHTS_FIRST": tiles.weights_first, "bias_ptr": None}
    constants |= {} if in_fp8 else {"x_scales_ptr": None, "w_scales_ptr": None}
    ptx = check(
        tmp_path,
        cells_triton.gate_up_of_cells,
        {"x_ptr": kind, "inner_ptr": "bf16"},
        constants,
        (product.warps, product.stages),
        {"w_desc": (product.block_n, sizes.step)},
        kind,
    )
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx


@pytest.mark.parametrize("in_fp8", [False, True])
def test_activations_fit_hopper(in_fp8: bool, tmp_path: Path) -> None:
    constants = {"WIDTH": 768, "BLOCK_M": 64, "BLOCK_N": 64, "PLAIN": True, "CLAMPED": False, "CUBED": False}
    constants |= {} if in_fp8 else {"values_ptr": None, "factors_ptr": None}
    pointers = {"inner_ptr": "bf16", "hidden_ptr": "bf16", "values_ptr": "fp8e4nv", "factors_ptr": "fp32"}
    pointers |= dict.fromkeys(("alpha", "limit", "shift", "cubic"), "fp32")
    check(tmp_path, cells_triton.activate_cells, pointers, constants, (4, 3), {})


def test_gates_of_few_bits_fit_hopper(tmp_path: Path) -> None:
    """Gate and up themselves, of blocks of 16 rows."""
    kernel, pointers, constants, warps = cases(1 << 20, GPT_OSS, MOVED.value, 32)[0]
    spills, _, ptx = compiled(kernel, tmp_path, pointers, constants | {"RAW": True}, warps, 3)
    assert constants["ROW_TILES"] == 2 and spills <= 16 and "mma.sync.aligned.m16n8k16" in ptx
