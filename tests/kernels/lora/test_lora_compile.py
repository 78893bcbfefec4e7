"""The kernels of adapters, compiled for Hopper without a GPU: no spills, and room for several programs on a
multiprocessor."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.lora import product_triton  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
POINTERS = dict.fromkeys(("x_ptr", "down_ptr", "up_ptr", "y_ptr"), "bf16") | {"part_ptr": "fp32"}


def constants(rows: int, rank: int, parts: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the constants of both launches for 4,096 inputs, and the second one's warps."""
    tiles = product_triton.lora_tiles(rows, 4096, parts[-1], len(parts) - 1, rank)
    shared = {"BLOCK_M": tiles.block_m, "PDL": True, "UPCAST": False}
    shrink = {"K": 4096, "INNER": (len(parts) - 1) * rank, "SPAN": tiles.span}
    expand = {"N": parts[-1], "RANK": rank, "PARTS": parts, "SPLITS": tiles.splits}
    return (
        shared | shrink | {"BLOCK_N": tiles.block_r, "BLOCK_K": tiles.block_k},
        shared | expand | {"BLOCK_N": tiles.block_n, "BLOCK_R": tiles.block_r},
        tiles.warps,
    )


@pytest.mark.parametrize(("rank", "parts"), [(16, (0, 4096, 5120, 6144)), (64, (0, 14336, 28672)), (256, (0, 4096))])
@pytest.mark.parametrize("rows", [1, 256, 2048])
def test_the_kernels_fit_hopper(rows: int, rank: int, parts: tuple[int, ...], tmp_path: Path) -> None:
    shrink, expand, expand_warps = constants(rows, rank, parts)
    for kernel, chosen, warps, stages in (
        (product_triton._lora_shrink, shrink, 4, product_triton.SHRINK_STAGES),
        (product_triton._lora_expand, expand, expand_warps, product_triton.EXPAND_STAGES),
    ):
        spilled, bytes_shared, ptx = compiled(kernel, tmp_path, POINTERS, chosen, warps, stages)
        assert spilled == 0 and 2 * bytes_shared <= SHARED_PER_SM
        assert "mma" in ptx, "tensor cores multiply"
