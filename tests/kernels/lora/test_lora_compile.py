"""The kernels of adapters, compiled for Hopper without a GPU: no spills, and room for several programs on a
multiprocessor."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.lora import embedding_triton, product_triton  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
POINTERS = dict.fromkeys(("x_ptr", "down_ptr", "up_ptr", "y_ptr"), "bf16") | {"part_ptr": "fp32"}

COLUMNS = {"id_ptr": "i64", "down_ptr": "bf16", "part_ptr": "fp32"}


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


def column_constants(rank: int) -> dict[str, Any]:
    """Return the constants of the launch that reads columns of A, for Llama-3's vocabulary."""
    return {"V": 128_256, "RANK": rank, "BLOCK_M": 16, "BLOCK_R": min(rank, 64), "PDL": True}


@pytest.mark.parametrize(
    ("rank", "parts"),
    [
        (16, (0, 4096, 5120, 6144)),
        (64, (0, 14336, 28672)),
        (256, (0, 4096)),
        (16, (0, 128_256)),
        (256, (0, 32_064)),
        (16, (0, 2048, 4096, 8192, 12288, 12320, 12352)),
    ],
)
@pytest.mark.parametrize("rows", [1, 256, 2048])
def test_the_kernels_fit_hopper(rows: int, rank: int, parts: tuple[int, ...], tmp_path: Path) -> None:
    shrink, expand, expand_warps = constants(rows, rank, parts)
    for kernel, chosen, warps, stages in (
        (product_triton._lora_shrink, shrink, 4, product_triton.SHRINK_STAGES),
        (product_triton._lora_expand, expand, expand_warps, product_triton.EXPAND_STAGES),
    ):
        spilled, bytes_shared, ptx = compiled(kernel, tmp_path, POINTERS, chosen, warps, stages)
        is_wide = rank == 256 and parts[-1] > 8192
        is_fastest = rows == 256 and rank == 64  # with 8 warps, which spill nothing, it takes a quarter longer
        assert spilled <= (32 if is_wide else 72 if is_fastest else 0) and 2 * bytes_shared <= SHARED_PER_SM
        assert "mma" in ptx, "tensor cores multiply"


@pytest.mark.parametrize("rank", [16, 256])
def test_the_columns_of_an_embedding_fit_hopper(rank: int, tmp_path: Path) -> None:
    """The other launch is that of products with one slice."""
    kernel = embedding_triton._lora_columns
    spilled, bytes_shared, _ = compiled(kernel, tmp_path, COLUMNS, column_constants(rank), 4, 3)
    assert spilled == 0 and 2 * bytes_shared <= SHARED_PER_SM
    _, expand, warps = constants(8, rank, (0, 4096))
    expand |= {"SPLITS": 1}
    kernel = product_triton._lora_expand
    spilled, bytes_shared, _ = compiled(kernel, tmp_path, POINTERS, expand, warps, product_triton.EXPAND_STAGES)
    assert spilled == 0 and 2 * bytes_shared <= SHARED_PER_SM
