"""Compiles products of experts with weights of few bits for Hopper without a GPU: no spills, tensor cores, and weights
that are copied to shared memory 16 bytes at a time."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402

from aerie.kernels.experts.weights import ExpertSizes  # noqa: E402
from aerie.kernels.packed.expert_down_triton import down_of_blocks, down_of_listed  # noqa: E402
from aerie.kernels.packed.expert_gate_up_triton import gate_up_of_blocks  # noqa: E402
from aerie.kernels.packed.expert_steps_triton import MOVED, RAISED  # noqa: E402
from aerie.kernels.packed.expert_tiles import PackedTiles, lists_experts, packed_expert_tiles  # noqa: E402
from aerie.kernels.packed.weight import empty  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

META = torch.device("meta")
CODES: dict[str, Any] = {RAISED.value: "e2m1", MOVED.value: "e2m1"}
GPT_OSS = ExpertSizes(32, 0, 4, 2880, 2880, 64)
QWEN = ExpertSizes(256, 0, 8, 2048, 512, 64)
_POINTERS = dict.fromkeys(("x_ptr", "scales_ptr", "hidden_ptr", "out_ptr"), "bf16") | {"zeros_ptr": "i16"}
_POINTERS |= dict.fromkeys(
    ("row_scale_ptr", "bias_ptr", "down_scale_ptr", "share_ptr", "weight_ptr", "part_ptr"), "fp32"
)


def product(
    kernel: Any, sizes: ExpertSizes, tiles: PackedTiles, code: str, group: int, listed: bool
) -> tuple[Any, Any]:
    """Pointers and constants of a kernel for gpt-oss's activation and biases."""
    is_first = kernel is gate_up_of_blocks
    k = sizes.size if is_first else sizes.width
    absent = ["zeros_ptr", "row_scale_ptr", "down_scale_ptr"]
    if is_first:
        absent += ["pair_ptr", "count_ptr"] if listed else ["share_ptr", "part_ptr", "ticket_ptr"]
    constants = {
        "WIDTH": sizes.width,
        "SIZE": sizes.size,
        "SPAN": sizes.size,
        "GROUP": group,
        "SLOTS": sizes.experts_per_token,
        "EXPERTS": sizes.num_routed,
        "BINS": sizes.num_routed,
        "ROW_TILES": tiles.row_tiles,
        "WARPS_N": tiles.warps_n,
        "WARPS_K": tiles.warps_k,
        "STEPS": tiles.steps(k, tiles.splits if is_first else 1),
        "SPLITS": tiles.splits,
        "STAGES": tiles.stages_for(empty(64, k, group, CODES.get(code, code), META, torch.bfloat16, False, False)),
        "LISTED": listed,
        "CLAMPED": True,
        "CUBED": True,
        "RAW": False,
        "CODE": code,
        "SCALES": tiles.scales_weights,
        "TYPE": tl.bfloat16,
        "SCALE_TYPE": tl.bfloat16,
        "PDL": True,
        "INTERPRETED": False,
        **dict.fromkeys(("alpha", "limit", "shift", "cubic"), 1.0),
        **dict.fromkeys(absent),
    }
    pointers = _POINTERS | ({"part_ptr": "bf16"} if kernel is down_of_blocks else {})
    return pointers, {name: value for name, value in constants.items() if name in kernel.arg_names}


def cases(
    rows: int, sizes: ExpertSizes, code: str, group: int, deterministic: bool = False
) -> list[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Both products of so many rows: kernel, pointers, constants, warps."""
    tiles, listed = packed_expert_tiles(rows, sizes, deterministic), lists_experts(rows, deterministic)
    down = down_of_listed if listed else down_of_blocks
    return [
        (kernel, *product(kernel, sizes, one, code, group, listed), one.warps_n * one.warps_k)
        for kernel, one in ((gate_up_of_blocks, tiles.gate_up), (down, tiles.down))
    ]


@pytest.mark.parametrize(
    "rows,sizes,code,group,deterministic",
    [
        (1, GPT_OSS, MOVED.value, 32, False),
        (8, GPT_OSS, MOVED.value, 32, True),
        (16, QWEN, RAISED.value, 16, False),
        (512, GPT_OSS, MOVED.value, 32, False),
        (64, QWEN, "int8", 512, False),
        *slow(
            (8, GPT_OSS, MOVED.value, 32, False),
            (64, GPT_OSS, MOVED.value, 32, False),
            (1, QWEN, "int4", 128, False),
            (8, QWEN, "int4", 128, True),
        ),
    ],
)
def test_products_of_experts_of_few_bits_fit_hopper(
    rows: int, sizes: ExpertSizes, code: str, group: int, deterministic: bool, tmp_path: Path
) -> None:
    for kernel, pointers, constants, warps in cases(rows, sizes, code, group, deterministic):
        spills, shared, ptx = compiled(kernel, tmp_path, pointers, constants, warps, 3)
        own = sum(int(size) for size in re.findall(r"\.shared\s+\.align 16 \.b8 sums_\w+\[(\d+)\]", ptx))
        # the assembler puts up to four addresses of a loop on the stack, though registers are left
        assert spills <= 16 and shared + own <= SHARED_PER_SM
        # Triton asks for more than 48 KB only if its own part needs it
        assert own > 0 and (shared > 48 << 10 or shared + own <= 48 << 10)
        assert "mma.sync.aligned.m16n8k16" in ptx
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", ptx)
        assert copies and {int(size, 0) for size in copies} == {16}
