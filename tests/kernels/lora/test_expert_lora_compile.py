"""The kernels of experts' adapters, compiled for Hopper without a GPU: no spills, and room for several programs on a
multiprocessor."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.experts.adapted import product_triton as expert_lora_triton  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
POINTERS = dict.fromkeys(("x_ptr", "down_ptr", "up_ptr", "y_ptr"), "bf16") | {"part_ptr": "fp32", "weight_ptr": "fp32"}


def constants(
    rows: int, block_m: int, rank: int, inputs: int, parts: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of both launches for 128 experts, 8 of a row; the second product's with one part."""
    tiles = expert_lora_triton.expert_lora_tiles(rows, inputs, rank)
    shared = {"EXPERTS": 128, "SLOTS": 8, "BLOCK_M": block_m, "PDL": True, "UPCAST": False}
    shrink = {"K": inputs, "INNER": (len(parts) - 1) * rank, "SPAN": tiles.span, "BY_CELL": len(parts) == 2}
    expand = {"N": parts[-1], "RANK": rank, "PARTS": parts, "SPLITS": tiles.splits}
    if len(parts) > 2:
        expand["weight_ptr"] = None
    return (
        shared | shrink | {"BLOCK_N": tiles.block_r, "BLOCK_K": tiles.block_k},
        shared | expand | {"BLOCK_N": tiles.block_n, "BLOCK_R": tiles.block_r},
    )


@pytest.mark.parametrize(("inputs", "parts"), [(2048, (0, 768, 1536)), (768, (0, 2048))])
@pytest.mark.parametrize(("rows", "block_m", "rank"), [(8, 16, 16), (256, 32, 128), (2048, 64, 16)])
def test_the_kernels_fit_hopper(
    rows: int, block_m: int, rank: int, inputs: int, parts: tuple[int, ...], tmp_path: Path
) -> None:
    shrink, expand = constants(rows, block_m, rank, inputs, parts)
    for kernel, chosen, stages in (
        (expert_lora_triton._expert_lora_shrink, shrink, expert_lora_triton.SHRINK_STAGES),
        (expert_lora_triton._expert_lora_expand, expand, expert_lora_triton.EXPAND_STAGES),
    ):
        spilled, bytes_shared, ptx = compiled(kernel, tmp_path, POINTERS, chosen, 4, stages)
        assert spilled == 0 and 2 * bytes_shared <= SHARED_PER_SM
        assert "mma" in ptx, "tensor cores multiply"
