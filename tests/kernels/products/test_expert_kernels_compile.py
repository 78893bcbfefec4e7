"""Compiles the kernels of experts for Hopper without a GPU: no spills, the matrix unit for groups of warps, tensor
maps, and nothing read before the wait of an early launch."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.experts import few_row_products_triton as few_row_products  # noqa: E402
from aerie.kernels.experts import many_rows_triton as many_rows  # noqa: E402
from aerie.kernels.experts import order_triton as order  # noqa: E402
from aerie.kernels.experts import route_triton as route  # noqa: E402
from aerie.kernels.experts import sorted_rows_triton as sorted_rows  # noqa: E402
from aerie.kernels.experts.ordered import ordered_row_products_triton as ordered_row_products  # noqa: E402
from aerie.kernels.experts.weights import MAX_FEW_ROWS, ExpertSizes, few_row_tiles  # noqa: E402
from aerie.kernels.gemm.tiles import SHARED_BYTES  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402
from tests.kernels.test_pdl import pointers_read  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
DEEPSEEK_V3 = ExpertSizes(256, 1, 8, 7168, 256, step=128)
QWEN3 = ExpertSizes(128, 0, 8, 2048, 768, step=64)
# Only deterministic engines multiply these by our kernels. RAGGED: one of two ranks of gpt-oss-20b in bf16, with biases
# and its activation. NARROW: one of four ranks of Qwen3-30B-A3B.
RAGGED, NARROW = ExpertSizes(32, 0, 4, 2880, 1440, step=64), ExpertSizes(128, 0, 8, 2048, 192, step=64)
POINTERS = dict.fromkeys(
    ("x_scales_ptr", "w_scales_ptr", "factor_ptr", "hidden_scales_ptr", "weight_ptr", "logit_ptr", "bias_ptr"), "fp32"
)


def check(
    path: Path,
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    options: tuple[int, int],
    blocks: dict[str, tuple[int, int]],
    mapped: str = "bf16",
    on_their_way: int = 0,
    triggers: bool = True,
    read_ahead: frozenset[str] = frozenset(),
) -> str:
    """options: warps and stages. on_their_way: bytes of tiles that shared memory must hold. triggers: before it waits.
    read_ahead: pointers that are read before the wait, and tiles of W with them. Returns the PTX."""
    constants |= {"PDL": True}
    if "INTERPRETED" in kernel.arg_names:
        constants |= {"INTERPRETED": False}
    spills, shared, ptx = compiled(
        kernel, path, POINTERS | pointers, constants, *options, descriptors=blocks, mapped=mapped
    )
    assert spills == 0 and on_their_way <= shared <= SHARED_PER_SM
    before_the_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert ("griddepcontrol.launch_dependents" in before_the_wait) == triggers
    assert not re.search(r"\b(st|atom|red)\.global", before_the_wait)
    given = [name for name in kernel.arg_names if name not in constants]
    names = [name for given_name in given for name in [given_name] * (5 if given_name in blocks else 1)]  # maps' parts
    assert pointers_read(before_the_wait, names) == read_ahead
    assert ("cp.async.bulk.tensor" in before_the_wait) == bool(read_ahead)
    return ptx


@pytest.mark.parametrize(
    "sizes,rows",
    [
        *((DEEPSEEK_V3, rows) for rows in (2, 64, 2048)),
        *((QWEN3, rows) for rows in (16, 256)),
        *((sizes, rows) for sizes in (RAGGED, NARROW) for rows in (17, 2048)),
        *slow(
            *((DEEPSEEK_V3, rows) for rows in (16, 32, 256, 512)), *((QWEN3, rows) for rows in (2, 32, 64, 512, 2048))
        ),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{value.size}-{value.width}",
)
def test_products_of_experts_fit_hopper(sizes: ExpertSizes, rows: int, tmp_path: Path) -> None:
    few, deterministic = rows <= MAX_FEW_ROWS, sizes in (RAGGED, NARROW)
    tiles = few_row_tiles(rows, sizes) if few else many_rows.many_row_tiles(rows, sizes, deterministic)
    in_fp8 = sizes.step == 128
    kind, slots = "fp8e4nv" if in_fp8 else "bf16", sizes.experts_per_token + sizes.num_shared
    weights_first = tiles.block_m < 64 or deterministic
    common = {"WIDTH": sizes.width, "SIZE": sizes.size, "BLOCK_M": tiles.block_m, "IN_FP8": in_fp8, "BY_GROUP": in_fp8}
    for product, step in ((tiles.gate_up, sizes.step), (tiles.down, tiles.gate_up.block_n if in_fp8 else 64)):
        is_first = product is tiles.gate_up
        constants = common | {"BLOCK_N": product.block_n, "STEP": step}
        blocks = {"w_desc": (product.block_n, step)}
        if few or not is_first:
            blocks["x_desc" if is_first else "hidden_desc"] = (tiles.block_m, step)
        if is_first:
            constants |= {"SLOTS": slots} | ({"SLOTS_PADDED": 16} if few else {"EXPERTS": 257, "BINS": 512})
        held = {"HOLDS": sizes.width <= 256, "BLOCKS": product.blocks}
        if few:
            constants |= {"SPLITS": product.splits}
            if is_first:
                constants |= {"SPAN": sizes.size // step // product.splits, "pair_ptr": None}
            kernel: Any = few_row_products.gate_up_of_few_rows if is_first else few_row_products.down_of_few_rows
        else:
            kernel = sorted_rows.gate_up_of_sorted_rows if is_first else sorted_rows.down_of_sorted_rows
            constants |= {"WEIGHTS_FIRST": weights_first} | ({} if is_first else held | {"SPAN": sizes.size})
            biased = sizes is RAGGED
            constants |= {} if biased else {"bias_ptr": None}
            constants |= {"PLAIN": not biased, "CLAMPED": biased, "CUBED": False} if is_first else {}
        absent = () if in_fp8 else ("x_scales_ptr", "w_scales_ptr", "factor_ptr")
        constants |= {name: None for name in absent if name in kernel.arg_names}
        part = "fp32" if few else "bf16"
        pointers = {"x_ptr": kind, "hidden_ptr": kind, "down_ptr": kind, "out_ptr": "bf16", "part_ptr": part}
        pointers |= dict.fromkeys(("alpha", "limit", "shift", "cubic"), "fp32") if is_first and not few else {}
        of_stage = sum(height * width for height, width in blocks.values()) * 128 // sizes.step
        asked = of_stage * product.stages if few and not is_first else 0
        ahead = frozenset({"used_ptr", "num_used_ptr"} if few and not is_first else ())
        options, triggers = (product.warps, product.stages), not (few and is_first)
        ptx = check(tmp_path, kernel, pointers, constants, options, blocks, kind, asked, triggers, ahead)
        assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and "cp.async.bulk.tensor" in ptx
        assert ("f32.e4m3.e4m3" in ptx) == in_fp8


def test_the_experts_of_one_row_fit_beside_its_gates(tmp_path: Path) -> None:
    """Two programs of the second product beside one of the first, which read all of their weights before the wait."""
    sizes, tiles = DEEPSEEK_V3, few_row_tiles(1, DEEPSEEK_V3)
    down = tiles.down
    assert down.splits == sizes.max_used(1)
    constants = {"WIDTH": sizes.width, "SIZE": sizes.size, "BLOCK_M": tiles.block_m, "BLOCK_N": down.block_n}
    constants |= {"SPLITS": down.splits, "IN_FP8": True, "BY_GROUP": True}
    pointers, blocks = {"hidden_ptr": "fp8e4nv", "out_ptr": "bf16", "part_ptr": "fp32"}, {"w_desc": (128, sizes.width)}
    ahead, options = frozenset({"used_ptr", "num_used_ptr", "w_scales_ptr"}), (down.warps, down.stages)
    kernel = few_row_products.down_of_one_row
    ptx = check(tmp_path, kernel, pointers, constants, options, blocks, "fp8e4nv", read_ahead=ahead)
    assert "cp.async.bulk.tensor" not in ptx[ptx.index("griddepcontrol.wait") :] and "f32.e4m3.e4m3" in ptx
    gates = (2 * 128 + tiles.block_m) * 128 * tiles.gate_up.stages
    downs = 2 * (128 + 16) * sizes.width
    assert gates + downs + 4 * 1024 <= SHARED_BYTES
    assert not few_row_tiles(1, QWEN3).down.ahead and not few_row_tiles(2, sizes).down.ahead


@pytest.mark.parametrize("sizes", [DEEPSEEK_V3, QWEN3], ids=lambda value: value.size)
def test_gates_of_few_ordered_rows_fit_hopper(sizes: ExpertSizes, tmp_path: Path) -> None:
    in_fp8, slots = sizes.step == 128, sizes.experts_per_token + sizes.num_shared
    gate_up = many_rows.many_row_tiles(8, sizes, True).gate_up
    constants = {"WIDTH": sizes.width, "SIZE": sizes.size, "SLOTS": slots, "SLOTS_PADDED": 16, "BLOCK_M": 16}
    constants |= {"BLOCK_N": gate_up.block_n, "STEP": sizes.step, "SPLITS": 1, "SPAN": sizes.size // sizes.step}
    constants |= {"IN_FP8": in_fp8, "BY_GROUP": in_fp8, "part_ptr": None, "ticket_ptr": None}
    constants |= {} if in_fp8 else {"x_scales_ptr": None, "w_scales_ptr": None}
    kind, blocks = (
        "fp8e4nv" if in_fp8 else "bf16",
        {"x_desc": (16, sizes.step), "w_desc": (gate_up.block_n, sizes.step)},
    )
    options = (gate_up.warps, gate_up.stages)
    kernel = few_row_products.gate_up_of_few_rows
    ptx = check(tmp_path, kernel, {"hidden_ptr": kind}, constants, options, blocks, kind, triggers=False)
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and ("f32.e4m3.e4m3" in ptx) == in_fp8


def test_the_experts_of_one_ordered_row_fit_hopper(tmp_path: Path) -> None:
    """Programs of the second product read all of their weights before the wait."""
    sizes, pointers = DEEPSEEK_V3, {"x_ptr": "fp8e4nv", "hidden_ptr": "fp8e4nv", "out_ptr": "bf16", "part_ptr": "fp32"}
    constants = {"WIDTH": sizes.width, "SIZE": sizes.size, "TOGETHER": 4}
    blocks = {"w_desc": (64, 512)}
    kernel = ordered_row_products.gate_up_of_ordered_row
    ptx = check(tmp_path, kernel, pointers, constants, (4, 5), blocks, "fp8e4nv", 4 * 64 * 512, triggers=False)
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and "f32.e4m3.e4m3" in ptx
    constants = {"WIDTH": sizes.width, "SIZE": sizes.size, "BLOCK_N": 128, "SLOTS": 9}
    ahead = frozenset({"chosen_ptr", "weight_ptr", "w_scales_ptr"})
    kernel, blocks = ordered_row_products.down_of_ordered_row, {"w_desc": (128, sizes.width)}
    ptx = check(tmp_path, kernel, pointers, constants, (8, 1), blocks, "fp8e4nv", read_ahead=ahead)
    assert "cp.async.bulk.tensor" not in ptx[ptx.index("griddepcontrol.wait") :] and "f32.e4m3.e4m3" in ptx


# blocks of columns of a program -> us, of a layer's down-projections and sums on an H200 (`78f1fe7`)
MEASURED = {
    24: {7: 75.0, 16: 73.0, 28: 84.8},
    32: {7: 85.6, 14: 85.4, 16: 89.9, 28: 91.8},
    48: {7: 104.5, 16: 102.8, 28: 103.8},
    64: {7: 117.6, 14: 116.5, 16: 116.6, 28: 115.5},
    128: {14: 132.8, 16: 133.3, 28: 131.3},
    256: {7: 145.2, 14: 144.6, 16: 141.0, 28: 148.6},
    512: {14: 167.7, 16: 164.4, 28: 161.4},
}


@pytest.mark.parametrize("rows", MEASURED)
def test_down_projections_end_together(rows: int) -> None:
    found, measured = many_rows.many_row_tiles(rows, DEEPSEEK_V3).down, MEASURED[rows]
    assert measured[found.blocks] <= min(measured.values()) + 0.3, found


@pytest.mark.parametrize("rows,first,held", [(2048, 0, 256), (64, 32, 32), *slow((1, 0, 256), (64, 0, 256))])
def test_routing_fits_hopper(rows: int, first: int, held: int, tmp_path: Path) -> None:
    listed = rows <= route.MAX_LISTED
    constants = {
        "PARTS": 14,
        "EXPERTS": 256,
        "WIDTH": 272 if rows == 64 else 256,
        "GATED": rows == 64,
        "FIRST": first,
        "HELD": held,
        "K": 8,
        "SHARED": 1,
        "GROUPS": 8,
        "GROUPS_PADDED": 8,
        "SIZE_PADDED": 32,
        "BEST_GROUPS": 4,
        "BEST_OF_GROUP": 2,
        "SOFTMAX": False,
        "NORMALISE": True,
        "HAS_BIAS": True,
        "SCALES_EXPERTS": rows == 64,
        "HAS_LIVE": True,
        "SLOTS_PADDED": 16,
        "LIST": listed,
        "ROWS_PADDED": rows if listed else 1,
        "BINS": 512,
    }
    check(tmp_path, route._route, {"token_slot_ptr": "i64"}, constants, (4 if listed and rows > 8 else 1, 1), {})


@pytest.mark.parametrize("block_m", [16, 128, *slow(64)])
def test_ordering_fits_hopper(block_m: int, tmp_path: Path) -> None:
    constants = {"EXPERTS": 257, "SHARED": 1, "BINS": 512, "BLOCK_M": block_m, "PAIRS": 256, "BLOCKS": 32}
    check(tmp_path, order._order, {}, constants, (8, 1), {})


@pytest.mark.parametrize("partly", [True, False])
def test_sums_fit_hopper(partly: bool, tmp_path: Path) -> None:
    constants = {"SIZE": 7168, "STEP": 1792, "SPAN": 1792, "CHOICES": 9, "BLOCK": 1024, "SOME_ABSENT": partly}
    ptx = check(tmp_path, many_rows._sum_choices, {"part_ptr": "bf16", "out_ptr": "bf16"}, constants, (4, 1), {})
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 9 and len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == 1
