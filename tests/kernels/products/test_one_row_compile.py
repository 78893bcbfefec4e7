"""Compiles the kernels of few rows for Hopper without a GPU: no spills, and before the wait of an early
launch nothing is read but constants and what a fence has made visible."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.experts.few_row_products_triton import down_of_one_row  # noqa: E402
from aerie.kernels.experts.norm_route_triton import _norm_route  # noqa: E402
from aerie.kernels.experts.weights import ExpertSizes, few_row_tiles  # noqa: E402
from aerie.kernels.packed.expert_down_triton import down_of_listed  # noqa: E402
from aerie.kernels.packed.expert_gate_up_triton import gate_up_of_blocks  # noqa: E402
from aerie.kernels.packed.expert_tiles import packed_expert_tiles  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402
from tests.kernels.products import test_expert_kernels_compile as experts  # noqa: E402
from tests.kernels.products import test_packed_experts_compile as few_bits  # noqa: E402
from tests.kernels.test_pdl import pointers_read  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
QWEN35 = ExpertSizes(256, 1, 8, 2048, 512, step=64)


def test_few_bits_fit_hopper(tmp_path: Path) -> None:
    tiles = packed_expert_tiles(1, few_bits.GPT_OSS)
    for kernel, one in ((gate_up_of_blocks, tiles.gate_up), (down_of_listed, tiles.down)):
        pointers, constants = few_bits.product(kernel, few_bits.GPT_OSS, one, "e2m1 moved", 32, True)
        spills, shared, ptx = compiled(kernel, tmp_path, pointers, constants, one.warps_n * one.warps_k, 3)
        assert spills == 0 and shared <= SHARED_PER_SM
        before, after = ptx.split("griddepcontrol.wait", 1)
        if kernel is down_of_listed:
            names = [name for name in kernel.arg_names if name not in constants]
            assert pointers_read(before, names) <= {"used_ptr", "num_used_ptr", "bias_ptr"}
            # weights are on their way, rows are not
            assert "cp.async" in before and "ld.global.v4" not in before and "ld.global.v4" in after
        else:
            assert "ld.global" not in before and "cp.async" not in before
        assert not re.search(r"\b(st|atom|red)\.global", before)


def test_the_experts_of_one_row_in_16_bits_fit_hopper(tmp_path: Path) -> None:
    down = few_row_tiles(1, QWEN35).down
    assert down.ahead and down.splits == QWEN35.max_used(1)
    constants = {"WIDTH": QWEN35.width, "SIZE": QWEN35.size, "BLOCK_M": 16, "BLOCK_N": down.block_n}
    constants |= {"SPLITS": down.splits, "IN_FP8": False, "BY_GROUP": False}
    constants |= dict.fromkeys(("factor_ptr", "w_scales_ptr"))
    pointers = {"hidden_ptr": "bf16", "out_ptr": "bf16", "part_ptr": "fp32"}
    blocks, ahead = {"w_desc": (down.block_n, QWEN35.width)}, frozenset({"used_ptr", "num_used_ptr"})
    options = (down.warps, down.stages)
    ptx = experts.check(tmp_path, down_of_one_row, pointers, constants, options, blocks, read_ahead=ahead)
    assert "cp.async.bulk.tensor" not in ptx[ptx.index("griddepcontrol.wait") :] and "wgmma.mma_async" in ptx


@pytest.mark.parametrize("size,width,k", [(2880, 32, 4), *slow((2880, 128, 4), (2048, 128, 8))])
def test_norm_and_routing_fit_hopper(size: int, width: int, k: int, tmp_path: Path) -> None:
    """gpt-oss-20b and 120b, Qwen3-30B-A3B."""
    up = lambda number: 1 << (number - 1).bit_length()  # noqa: E731
    constants: dict[str, Any] = {
        "SIZE": size,
        "BLOCK": up(size),
        "SPAN": 128,
        "BLOCK_N": min(64, up(width)),
        "PARTS": -(-size // 128),
        "EXPERTS": width,
        "WIDTH": width,
        "GATED": False,
        "K": k,
        "SHARED": 0,
        "GROUPS": 1,
        "GROUPS_PADDED": 1,
        "SIZE_PADDED": up(width),
        "BEST_GROUPS": 1,
        "BEST_OF_GROUP": 1,
        "SOFTMAX": True,
        "NORMALISE": True,
        "HAS_BIAS": False,
        "SCALES_EXPERTS": False,
        "HAS_LIVE": True,
        "SLOTS_PADDED": up(k),
        "PDL": True,
        "eps": 1e-5,
        "expert_scale_ptr": None,
        "bias_ptr": None,
    }
    inputs = ("x_ptr", "residual_ptr", "norm_ptr", "w_ptr", "logit_bias_ptr", "stream_ptr")
    pointers = dict.fromkeys(inputs, "bf16") | {"normed_ptr": "bf16", "token_slot_ptr": "i64"}
    pointers |= dict.fromkeys(("part_ptr", "weight_ptr"), "fp32")
    spills, _, ptx = compiled(_norm_route, tmp_path, pointers, constants, 4, 3)
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert spills == 0 and not re.search(r"\b(st|atom|red)\.global", before)
    names = [name for name in _norm_route.arg_names if name not in constants]
    assert pointers_read(before, names) == {"w_ptr", "norm_ptr"}
    assert re.search(r"ld\.global\S*\.v4", before), "weights 16 bytes at a time"
