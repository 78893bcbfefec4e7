"""Compiles the kernels of a round for Hopper without a GPU: no spills, and shared memory for as many programs on a
multiprocessor as the tables count on."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.drafting import guides_triton  # noqa: E402
from aerie.kernels.experts.router_gemm_triton import router_tiles  # noqa: E402
from aerie.kernels.fp8 import gemm_ahead_triton as fp8_gemm_ahead  # noqa: E402
from aerie.kernels.fp8 import gemm_triton as fp8_gemm  # noqa: E402
from aerie.kernels.fp8 import product_triton as fp8_gemm_wide  # noqa: E402
from aerie.kernels.fp8 import rows_triton as fp8_norm  # noqa: E402
from aerie.kernels.fp8 import tiles as fp8_tiles  # noqa: E402
from aerie.kernels.gemm import ordered_triton as ordered_gemm  # noqa: E402
from aerie.kernels.gemm import skinny_triton as skinny_gemm  # noqa: E402
from aerie.kernels.gemm.tiles import OrderedTiles, _ordered_choices, sum_order  # noqa: E402
from aerie.kernels.kv import slot_mapping_triton  # noqa: E402
from aerie.kernels.latent import head_products_triton as head_products  # noqa: E402
from aerie.kernels.latent import head_products_triton as latent_values  # noqa: E402
from aerie.kernels.latent import latents_triton as latent  # noqa: E402
from aerie.kernels.norm import norm_triton
from aerie.kernels.slots import commit_triton as commit  # noqa: E402
from aerie.kernels.tree import acceptance_triton, best_first_triton, tree_growth_triton, tree_read_triton
from aerie.kernels.vocabulary import topk_log_softmax_triton as argmax  # noqa: E402
from aerie.kernels.vocabulary import topk_log_softmax_triton as topk  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
BF16 = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), "bf16")
LATENT = BF16 | {"weight_ptr": "bf16", "cos_ptr": "fp32", "sin_ptr": "fp32", "position_ptr": "i64"}
NORMED_LATENTS: tuple[dict[str, str], dict[str, Any]] = (
    LATENT
    | dict.fromkeys(("both_ptr", "q_ptr", "q_weight_ptr", "row_weight_ptr", "pool_ptr"), "bf16")
    | {"slot_ptr": "i64"},
    {
        "PARTS": 1,
        "Q": 1536,
        "Q_NORMED": True,
        "LATENT": 512,
        "ROTATED": 64,
        "BLOCK_Q": 2048,
        "BLOCK_LATENT": 512,
        "FENCE": True,
        "PDL": True,
    }
    | {"q_scales_ptr": None, "BY_GROUP": False, "INTERPRETED": False},
)
FIELDS = dict.fromkeys(("token_ptr", "parent_ptr", "depth_ptr", "mask_ptr"), "i64")
TOP = dict.fromkeys(("value_ptr", "top_ptr", "total_ptr", "log_probability_ptr", "norm_ptr"), "fp32")
TOP |= {"id_ptr": "i64"}
CUT = FIELDS | dict.fromkeys(("found_token_ptr", "found_parent_ptr", "slot_ptr", "bonus_ptr", "tree_depth_ptr"), "i64")
CUT |= {"found_score_ptr": "fp32"}


def head_constants(
    rows: int, in_features: int, out_features: int, rotated: int, for_fp8: bool = False
) -> dict[str, Any]:
    choose = head_products.rounded_blocks if for_fp8 else head_products.product_blocks
    of_rows = choose(rows, in_features, 2)
    blocks = {"BLOCK_M": of_rows.m, "BLOCK_N": of_rows.n, "BLOCK_K": of_rows.k, "AHEAD": of_rows.ahead}
    sizes = {"IN": in_features, "OUT": out_features, "ROTATED": rotated} | ({} if rotated else {"weight_in_stride": 1})
    return sizes | blocks | {"PDL": True, "UPCAST": False} | ({} if for_fp8 else {"scales_ptr": None})


PRODUCTS = [(1, 6144, 4096), (4, 64, 256), (17, 4096, 14336), (64, 8192, 14336), (128, 8192, 4096)]
GATED = [(16, 28672, 4096), (32, 28672, 8192), (64, 28672, 4096), (128, 28672, 4096), (128, 14336, 8192)]
OTHER_PRODUCTS = [(40, 4096, 4096), (64, 5120, 8192), (128, 4096, 14336), *GATED]


@pytest.mark.parametrize("num_rows,n,k", [(8, 128, 2880), (64, 256, 7168), *slow((1, 32, 2880))])
def test_product_of_a_router_fits_hopper(num_rows: int, n: int, k: int, tmp_path: Path) -> None:
    """gpt-oss, whose hidden_size is no multiple of 128, and DeepSeek-V3. The first of the parts has the bias."""
    tiles = router_tiles(num_rows, n, k)
    blocks = {"x_desc": (tiles.block_m, tiles.block_k), "w_desc": (tiles.block_n, tiles.block_k)}
    constants = {
        "N": n,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "SPLITS": tiles.splits,
        "APART": True,
        "SPAN": tiles.span(k),
        "AHEAD": tiles.columns_ahead,
        "LAST": 0,
        "K": 0,
        "x_ptr": None,
        "x_row_stride": 0,
        "GATED": False,
        "HAS_BIAS": True,
        "PDL": True,
        "UPCAST": False,
        **skinny_gemm.NO_ADAPTERS,
    }
    pointers = BF16 | dict.fromkeys(("part_ptr", "out_ptr"), "fp32")
    spills, shared, ptx = compiled(
        skinny_gemm._skinny_gemm, tmp_path, pointers, constants, tiles.warps, tiles.stages, descriptors=blocks
    )
    assert spills == 0 and shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(
    "kind,num_rows,n,k",
    [
        *(("", *case) for case in PRODUCTS),
        ("bias", 17, 4096, 14336),
        ("gated", 16, 28672, 4096),
        ("gated", 128, 14336, 8192),
        *slow(*(("", *case) for case in OTHER_PRODUCTS)),
        *slow(*(("bias", *case) for case in (*PRODUCTS, *OTHER_PRODUCTS) if case[0] != 17)),
        *slow(*(("gated", *case) for case in GATED[1:4])),
    ],
)
def test_product_of_few_rows_fits_hopper(kind: str, num_rows: int, n: int, k: int, tmp_path: Path) -> None:
    tiles = (skinny_gemm.gated_tiles if kind == "gated" else skinny_gemm.skinny_gemm_tiles)(num_rows, n, k)
    assert tiles is not None
    pointers = BF16 | {"part_ptr": "fp32"}
    blocks = {"x_desc": (tiles.block_m, tiles.block_k), "w_desc": (tiles.block_n, tiles.block_k)}
    constants = {
        "N": n,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "SPLITS": tiles.splits,
        "APART": False,
        "SPAN": tiles.span(k),
        "AHEAD": tiles.columns_ahead,
        "LAST": 0,
        "K": 0,
        "x_ptr": None,
        "x_row_stride": 0,
        "GATED": kind == "gated",
        "HAS_BIAS": kind == "bias",
        "PDL": True,
        "UPCAST": False,
        **skinny_gemm.NO_ADAPTERS,
    }
    spills, shared, ptx = compiled(
        skinny_gemm._skinny_gemm, tmp_path, pointers, constants, tiles.warps, tiles.stages, descriptors=blocks
    )
    assert spills == 0
    assert shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    # launched early, it may read W, which nobody writes, before it waits, and nothing else
    before_the_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert "griddepcontrol.launch_dependents" in before_the_wait
    assert ("cp.async.bulk.tensor" in before_the_wait) == tiles.ahead
    assert "ld.global" not in before_the_wait and "st.global" not in before_the_wait


ORDERED = [(tiles, *case) for case in ((4096, 4096), (6144, 4096)) for _, tiles in _ordered_choices(200, *case)]


@pytest.mark.parametrize("tiles,n,k", [*ORDERED[:3], *slow(*ORDERED[3:])])
def test_product_of_many_rows_in_order_fits_hopper(tiles: OrderedTiles, n: int, k: int, tmp_path: Path) -> None:
    order = sum_order(n, k)
    constants = {
        "N": n,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "SPLITS": order.splits,
        "SPAN": order.span,
        "LAST": order.last,
        "PARALLEL": tiles.parallel,
        "TOGETHER": 8,
        "HAS_BIAS": False,
        "PDL": True,
        "UPCAST": False,
    }
    blocks = {"x_desc": (tiles.block_m, tiles.block_k), "w_desc": (tiles.block_n, tiles.block_k)}
    spills, shared, ptx = compiled(
        ordered_gemm._ordered_gemm,
        tmp_path,
        BF16 | {"part_ptr": "fp32"},
        constants,
        tiles.warps,
        tiles.stages,
        descriptors=blocks,
    )
    assert spills == 0 and shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    before_the_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert "cp.async.bulk.tensor" not in before_the_wait and "ld.global" not in before_the_wait


FP8_POINTERS = dict.fromkeys(("x_scales_ptr", "w_scales_ptr", "out_scales_ptr", "scales_ptr", "part_ptr"), "fp32") | {
    "x_ptr": "bf16",
    "values_ptr": "fp8e4nv",
    "w_ptr": "fp8e4nv",
    "out_ptr": "bf16",
}
# kind, rows, n, k: "" for rows in FP8, "rounding" for such as are not yet, "gated" and "gated for fp8".
FP8_PRODUCTS = [
    ("", 4, 2112, 7168),
    ("", 128, 6144, 4096),
    ("rounding", 1, 4096, 4096),
    ("gated", 64, 28672, 4096),
    ("gated for fp8", 1, 28672, 4096),
    ("gated for fp8", 64, 28672, 4096),
]
OTHER_FP8_PRODUCTS = [
    ("", 1, 4096, 4096),
    ("", 1, 4096, 14336),
    ("", 17, 3072, 1536),
    ("", 16, 10240, 8192),
    ("rounding", 1, 7168, 2048),
    ("gated", 1, 28672, 4096),
    ("gated for fp8", 17, 28672, 4096),
]


@pytest.mark.parametrize(
    "kind,rows,n,k,by_group",
    [
        *((*case, True) for case in FP8_PRODUCTS),
        ("", 1, 4096, 4096, False),
        *slow(*((*case, True) for case in OTHER_FP8_PRODUCTS)),
        *slow(*((*case, False) for case in (*FP8_PRODUCTS, *OTHER_FP8_PRODUCTS[1:]))),
    ],
)
def test_product_of_few_fp8_rows_fits_hopper(
    kind: str, rows: int, n: int, k: int, by_group: bool, tmp_path: Path
) -> None:
    gated, for_fp8 = kind.startswith("gated"), kind == "gated for fp8"
    tiles = fp8_tiles.fp8_gated_tiles(rows, n, k, for_fp8) if gated else fp8_tiles.fp8_gemm_tiles(rows, n, k)
    assert tiles is not None and tiles.ahead == (0 if tiles.block_m > 16 else 256 // tiles.block_n // (1 + gated))
    weight = fp8_tiles.Fp8Matrix(torch.empty(n, k, device="meta"), torch.empty(-(-n // 64), k // 128, device="meta"))
    columns = fp8_tiles.rounding_columns(weight, tiles) if kind == "rounding" else 0
    constants = {
        "N": n // 2 if gated else n,
        "GROUPS": k // fp8_gemm.GROUP,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "SPLITS": tiles.splits,
        "SPAN": tiles.span(k),
        "AHEAD": tiles.ahead,
        "LAST": tiles.last,
        "COLUMNS": columns,
        "GATED": gated,
        "BY_GROUP": by_group,
        "HAS_BIAS": False,
        "RESULT": fp8_gemm.tl.bfloat16,
        "PDL": True,
        "INTERPRETED": False,
    } | ({} if for_fp8 else {"out_scales_ptr": None})
    blocks = {"x_desc": (tiles.block_m, 128), "w_desc": (tiles.block_n, 128)}
    pointers = {"out_ptr": "fp8e4nv"} if for_fp8 else {}
    ptx = check_fp8(fp8_gemm._fp8_gemm, tmp_path, constants, tiles.warps, tiles.stages, blocks, pointers)
    # launched early, it reads of W, which nobody writes, before it waits, and of nothing else
    before_the_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert ("ld.global" in before_the_wait) == (tiles.ahead > 0)
    assert ("fence.proxy.async;" in ptx) == (columns > 0)


@pytest.mark.parametrize(
    "rows,n,k,by_group",
    [
        (128, 2112, 7168, True),
        (256, 3072, 1536, False),
        (8192, 7168, 2304, True),
        *slow((128, 2112, 7168, False), (256, 2112, 7168, True), (256, 2112, 7168, False)),
        *slow((256, 3072, 1536, True), (8192, 7168, 2304, False)),
    ],
)
def test_product_of_many_fp8_rows_fits_hopper(rows: int, n: int, k: int, by_group: bool, tmp_path: Path) -> None:
    tiles = fp8_tiles.fp8_wide_tiles(rows, n, k)
    assert (tiles.splits > 1) == (n == 2112)
    constants = {
        "N": n,
        "GROUPS": k // 128,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "SPLITS": tiles.splits,
        "SLICES": tiles.slices,
        "LAST": tiles.last,
        "TOGETHER": 8,
        "BY_GROUP": by_group,
        "HAS_BIAS": False,
        "PDL": True,
    }
    blocks = {"x_desc": (tiles.block_m, 128), "w_desc": (tiles.block_n, 128)}
    ptx = check_fp8(fp8_gemm_wide._fp8_gemm_wide, tmp_path, constants, tiles.warps, tiles.stages, blocks, {})
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]


@pytest.mark.parametrize("rows,n,k", [(64, 2112, 7168), (1024, 2112, 7168), (8192, 7168, 2048), (8192, 6144, 4096)])
@pytest.mark.parametrize("by_group", [True, False])
def test_ordered_product_of_fp8_rows_fits_hopper(rows: int, n: int, k: int, by_group: bool, tmp_path: Path) -> None:
    """Groups that are multiplied last, and slices that a program sums one after another."""
    constants = {"N": n, "GROUPS": k // 128, "BY_GROUP": by_group, "HAS_BIAS": False, "PDL": True}
    if rows > 64:
        wide = fp8_tiles.fp8_ordered_wide_tiles(rows, n, k, by_group)
        constants |= {"BLOCK_M": wide.block_m, "BLOCK_N": wide.block_n, "SPLITS": wide.splits, "SLICES": wide.slices}
        constants |= {"LAST": wide.last, "TOGETHER": 8}
        blocks = {"x_desc": (wide.block_m, 128), "w_desc": (wide.block_n, 128)}
        check_fp8(fp8_gemm_wide._fp8_gemm_wide, tmp_path, constants, wide.warps, wide.stages, blocks, {})
        return
    tiles = fp8_tiles.fp8_ordered_tiles(rows, n, k, by_group)
    assert tiles is not None and tiles.last > 0
    constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "SPLITS": tiles.splits, "SPAN": tiles.span(k)}
    constants |= {"AHEAD": 0, "LAST": tiles.last, "COLUMNS": 0, "GATED": False, "RESULT": fp8_gemm.tl.bfloat16}
    constants |= {"INTERPRETED": False, "out_scales_ptr": None}
    blocks = {"x_desc": (tiles.block_m, 128), "w_desc": (tiles.block_n, 128)}
    check_fp8(fp8_gemm._fp8_gemm, tmp_path, constants, tiles.warps, tiles.stages, blocks, {})


@pytest.mark.parametrize(
    "rows,n,k",
    [
        (1, 2112, 7168),
        (4, 3072, 1536),
        (8, 7168, 2304),
        *slow(*((rows, 2112, 7168) for rows in (2, 4, 8)), *((rows, 3072, 1536) for rows in (1, 2, 8))),
        *slow(*((rows, 7168, 2048) for rows in (1, 2, 4, 8)), *((rows, 7168, 2304) for rows in (1, 2, 4))),
    ],
)
@pytest.mark.parametrize("in_order", [False, True])
def test_a_product_that_reads_its_weight_ahead_fits_hopper(
    rows: int, n: int, k: int, in_order: bool, tmp_path: Path
) -> None:
    """All of W is on its way before the wait, and goes from shared memory to the matrix unit."""
    tiles = fp8_tiles.fp8_ahead_tiles(rows, n, k)
    assert tiles is not None
    constants = {
        "N": n,
        "GROUPS": k // 128,
        "SIZE": 128,
        "ROWS": tiles.rows,
        "TOGETHER": tiles.together,
        "BLOCK_N": 64,
        "SPLITS": tiles.splits,
        "SPAN": tiles.span(k),
        "LAST": fp8_tiles.fp8_sum_order(n, k, True).last if in_order else 0,
        "IN_ORDER": in_order,
        "APART": tiles.splits > 1,
        "HAS_BIAS": False,
        "PDL": True,
    }
    pointers = FP8_POINTERS | {"x_ptr": "fp8e4nv"}
    blocks = {"w_desc": (64, tiles.together * 128)}
    spills, shared, ptx = compiled(
        fp8_gemm_ahead._fp8_gemm_ahead, tmp_path, pointers, constants, 4, 1, blocks, mapped="fp8e4nv"
    )
    assert spills == 0 and shared == tiles.shared_bytes(k) - 1024 and "f32.e4m3.e4m3" in ptx
    before, after = ptx.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor" in before and "cp.async.bulk.tensor" not in after
    assert not re.search(r"\b(ld|st|atom|red)\.global", before)


def test_a_weight_of_values_is_read_ahead(tmp_path: Path) -> None:
    constants = {"HEADS": 16, "LATENT": 512, "STEP": 256, "FIRST": 128, "BLOCK_M": 16}
    constants |= {"PDL": True, "INTERPRETED": False}
    pointers, blocks = {"x_ptr": "bf16"} | FP8_OUT, {"w_desc": (128, 512)}
    spills, shared, ptx = compiled(latent_values._latent_values, tmp_path, pointers, constants, 8, 1, blocks)
    assert spills == 0 and shared <= SHARED_PER_SM and "wgmma.mma_async" in ptx
    before, after = ptx.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor" in before and "cp.async.bulk.tensor" not in after
    assert not re.search(r"\b(ld|st|atom|red)\.global", before)


def check_fp8(
    kernel: Any,
    path: Path,
    constants: dict[str, Any],
    warps: int,
    stages: int,
    blocks: dict[str, tuple[int, int]],
    pointers: dict[str, str],
) -> str:
    spills, shared, ptx = compiled(
        kernel, path, FP8_POINTERS | pointers, constants, warps, stages, descriptors=blocks, mapped="fp8e4nv"
    )
    assert spills == 0 and shared <= SHARED_PER_SM
    assert "f32.e4m3.e4m3" in ptx and "cp.async.bulk.tensor" in ptx
    before_the_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert "cp.async.bulk.tensor" not in before_the_wait and "st.global" not in before_the_wait
    return ptx


FP8_OUT = {"out_ptr": "fp8e4nv", "scales_ptr": "fp32"}
HEADS_FP8 = LATENT | FP8_OUT
NORM_FP8 = {"SIZE": 7168, "BLOCK": 8192, "HAS_RESIDUAL": True, "PLAIN": True, "BY_GROUP": True} | {
    "PDL": True,
    "INTERPRETED": False,
}
LATENTS_FP8: tuple[dict[str, str], dict[str, Any]] = (
    NORMED_LATENTS[0] | {"q_ptr": "fp8e4nv", "q_scales_ptr": "fp32"},
    {name: value for name, value in NORMED_LATENTS[1].items() if name != "q_scales_ptr"} | {"BY_GROUP": True},
)


def test_latent_rows_are_expanded_by_the_matrix_unit(tmp_path: Path) -> None:
    """Two programs to a multiprocessor, with tiles on their way."""
    pointers = dict.fromkeys(("rows_ptr", "kv_ptr", "k_pe_ptr"), "bf16") | {"token_ptr": "i64"}
    constants = {"N": 4096, "LATENT": 512, "ROTATED": 64, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    constants |= {"UPCAST": False}
    kernel, blocks = latent._expand_latents, {"w_desc": (128, 64)}
    spills, shared, ptx = compiled(kernel, tmp_path, pointers, constants, 8, 3, descriptors=blocks)
    assert spills == 0 and 2 * shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "cp.async.cg" in ptx and "cp.async.bulk.tensor" in ptx


GUIDES = {"STATES": 64, "EDGES": 256}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "norm": (
        norm_triton._add_norm,
        BF16 | {"residual_ptr": "bf16", "weight_ptr": "bf16"},
        {"HAS_RESIDUAL": True, "BLOCK": 4096, "PDL": True},
        16,
    ),
    "norm for fp8": (
        fp8_norm._fp8_norm,
        BF16 | dict.fromkeys(("residual_ptr", "weight_ptr", "plain_ptr"), "bf16") | FP8_OUT,
        NORM_FP8,
        16,
    ),
    **{
        name: (norm_triton._gated_mul, BF16 | {"gate_up_ptr": "bf16"}, {"BLOCK": 1024, "PDL": True, "GELU": gelu}, 4)
        for name, gelu in (("swiglu", False), ("geglu", True))
    },
    "argmax": (argmax._partial_largest, BF16 | {"value_ptr": "fp32"}, {"BLOCK": argmax.BLOCK}, 8),
    "topk": (
        topk._partial,
        BF16 | dict.fromkeys(("value_ptr", "top_ptr", "total_ptr"), "fp32"),
        {"K": 10, "BLOCK": topk.BLOCK, "SORTED": False},
        8,
    ),
    "topk combined": (topk._combine, TOP, {"K": 10, "PARTS": 32, "COLUMNS": 512, "SORTED": False}, 2),
    "topk sorted": (
        topk._partial,
        BF16 | dict.fromkeys(("value_ptr", "top_ptr", "total_ptr"), "fp32"),
        {"K": 64, "BLOCK": topk.BLOCK, "SORTED": True},
        8,
    ),
    "topk sorted and combined": (topk._combine, TOP, {"K": 64, "PARTS": 64, "COLUMNS": 4096, "SORTED": True}, 8),
    "commit": (
        commit._commit_one,
        dict.fromkeys(
            ("slot_ptr", "token_ptr", "bonus_ptr", "max_len_ptr", "stop_ptr", "count_ptr", "finish_ptr"), "i64"
        )
        | {"finished_ptr": "i8", "shapes_ptr": "i8"},
        {"STOPS": 16, "STOP": 1, "LENGTH": 2, "NOT_FINITE": 3},
        1,
    ),
    "accept and commit": (
        acceptance_triton._accept_commit,
        FIELDS
        | dict.fromkeys(
            (
                "chosen_ptr",
                "slot_ptr",
                "bonus_ptr",
                "max_len_ptr",
                "stop_ptr",
                "seed_ptr",
                "path_ptr",
                "out_ptr",
                "accepted_ptr",
                "count_ptr",
                "finish_ptr",
                "row_ptr",
                "newest_ptr",
                "reported_ptr",
            ),
            "i64",
        )
        | {"finished_ptr": "i8", "shapes_ptr": "i8"},
        {"W": 60, "W_PADDED": 64, "COLUMNS": 9, "STOPS": 16, "STOP": 1, "LENGTH": 2, "NOT_FINITE": 3}
        | {"SYNTHETIC": False, "DOUBLINGS": 3, "SPANS": False},
        1,
    ),
    "trees read": (
        tree_read_triton._read_trees,
        FIELDS | dict.fromkeys(("slot_ptr", "tree_ptr", "id_ptr", "position_ptr"), "i64"),
        {
            "W": 60,
            "W_TABLE": 60,
            "W_PADDED": 64,
            "WORDS": 2,
            "MAX_DEPTH": 5,
            "AS_CHAIN": True,
            "SPANS": False,
            "BITS": True,
            "ALONE": 1 << 15,
            "EMPTY": -1,
        },
        1,
    ),
    "roots written": (
        tree_read_triton._write_roots,
        dict.fromkeys(("slot_ptr", "bonus_ptr", "token_ptr"), "i64"),
        {"EMPTY": -1, "W": 60, "NODES": 64},
        1,
    ),
    "tree grown": (
        tree_growth_triton._grow,
        dict.fromkeys(("score_ptr", "above_score_ptr", "found_score_ptr", "level_score_ptr"), "fp32")
        | dict.fromkeys(
            (
                "id_ptr",
                "map_ptr",
                "above_candidate_ptr",
                "above_mask_ptr",
                "found_token_ptr",
                "found_parent_ptr",
                "token_ptr",
                "candidate_ptr",
                "mask_ptr",
                "parent_ptr",
            ),
            "i64",
        ),
        {"HAS_MAP": True, "ROOT": False, "PARENTS": 10, "K": 10, "CHILDREN": 128},
        1,
    ),
    "tree cut": (
        tree_growth_triton._cut,
        CUT,
        {
            "W": 16,
            "W_TABLE": 20,
            "NODES": 16,
            "PART": 16,
            "CANDIDATES": 128,
            "MAX_DEPTH": 5,
            "DOUBLINGS": 3,
            "SPANS": False,
        },
        1,
    ),
    "tree of 63 nodes cut": (
        tree_growth_triton._cut,
        CUT,
        {
            "W": 63,
            "W_TABLE": 63,
            "NODES": 64,
            "PART": 64,
            "CANDIDATES": 1024,
            "MAX_DEPTH": 15,
            "DOUBLINGS": 4,
            "SPANS": False,
        },
        tree_growth_triton.cut_warps(1024),
    ),
    "tree of 128 nodes cut": (
        tree_growth_triton._cut,
        CUT,
        {
            "W": 128,
            "W_TABLE": 128,
            "NODES": 128,
            "PART": 64,
            "CANDIDATES": 128,
            "MAX_DEPTH": 15,
            "DOUBLINGS": 4,
            "SPANS": True,
        },
        tree_growth_triton.cut_warps(128, 128),
    ),
    "tree grown best first": (
        best_first_triton._grow_best,
        dict.fromkeys(("score_ptr", "pool_score_ptr", "above_score_ptr", "kept_score_ptr", "level_score_ptr"), "fp32")
        | dict.fromkeys(
            (
                "id_ptr",
                "map_ptr",
                "pool_token_ptr",
                "pool_parent_ptr",
                "pool_depth_ptr",
                "above_candidate_ptr",
                "token_ptr",
                "parent_ptr",
                "depth_ptr",
                "level_token_ptr",
                "level_candidate_ptr",
                "level_parent_ptr",
            ),
            "i64",
        ),
        {"ROOT": False, "SHARED": False, "CUT": True, "K": 7, "TOTAL": 1024, "ROWS": 128},
        best_first_triton.level_warps(1024),
    ),
    "tree of a block grown": (
        tree_growth_triton._grow_block,
        dict.fromkeys(("score_ptr", "clean_ptr", "kept_score_ptr"), "fp32")
        | dict.fromkeys(("id_ptr", "map_ptr", "token_ptr", "parent_ptr", "depth_ptr"), "i64"),
        {"STEPS": 15, "K": 7, "RANK_BITS": 3, "STEPS_PADDED": 16, "K_PADDED": 8, "PLACES": 256},
        1,
    ),
    "guides followed": (
        guides_triton._follow,
        dict.fromkeys(("slot_ptr", "parent_ptr", "token_ptr", "out_token_ptr"), "i64"),
        {"ROWS": 10, "BEGIN": False, "LEVEL": True, "FORCE": True} | GUIDES,
        2,
    ),
    "drafts masked": (
        guides_triton._mask,
        BF16 | {"slot_ptr": "i64", "id_ptr": "i64"},
        {"STATES": 64, "BLOCK": guides_triton.BLOCK},
        4,
    ),
    "children forced": (
        guides_triton._children,
        dict.fromkeys(("slot_ptr", "id_ptr", "map_ptr", "out_id_ptr"), "i64")
        | dict.fromkeys(("score_ptr", "out_score_ptr"), "fp32"),
        {"UNLIKELY": -1024.0, "HAS_MAP": True, "K": 10} | GUIDES,
        2,
    ),
    "head input": (
        norm_triton._head_input,
        dict.fromkeys(("table_ptr", "hidden_ptr", "table_weight_ptr", "hidden_weight_ptr", "out_ptr"), "bf16")
        | {"id_ptr": "i64"},
        {"BLOCK": 4096, "PDL": True},
        16,
    ),
    "path moved": (
        slot_mapping_triton._move_path,
        {"k_ptr": "bf16", "v_ptr": "bf16", "path_ptr": "i64"},
        {"PAGE": 16, "TOKEN": 1024, "ROWS": 6, "ROWS_PADDED": 8, "BLOCK": 1024, "TWO": True},
        4,
    ),
    "normed_latents": (latent._normed_latents, *NORMED_LATENTS, 8),
    "normed_latents of parts": (
        latent._normed_latents,
        LATENTS_FP8[0] | {"both_ptr": "fp32"},
        LATENTS_FP8[1] | {"PARTS": 7},
        8,
    ),
    "normed_latents for fp8": (latent._normed_latents, *LATENTS_FP8, 8),
    "absorbed keys of few rows": (head_products._head_products, LATENT, head_constants(8, 128, 512, 64), 4),
    "absorbed keys of batches": (head_products._head_products, LATENT, head_constants(256, 128, 512, 64), 8),
    "absorbed keys of many rows": (head_products._head_products, LATENT, head_constants(8192, 128, 512, 64), 8),
    "values of few rows": (head_products._head_products, LATENT, head_constants(64, 512, 128, 0), 4),
    "values of many rows": (head_products._head_products, LATENT, head_constants(8192, 512, 128, 0), 8),
    "all adapters' ranks of batches": (head_products._head_products, LATENT, head_constants(64, 512, 512, 0), 4),
    "values of few rows in fp8": (head_products._head_products, HEADS_FP8, head_constants(1, 512, 128, 0, True), 16),
    "values of batches in fp8": (head_products._head_products, HEADS_FP8, head_constants(256, 512, 128, 0, True), 4),
    "values of many rows in fp8": (head_products._head_products, HEADS_FP8, head_constants(8192, 512, 128, 0, True), 8),
}


TWINS = ("geglu", "absorbed keys of batches", "values of many rows", "values of batches in fp8")


@pytest.mark.parametrize("name", [*(name for name in KERNELS if name not in TWINS), *slow(*TWINS)])
def test_small_kernels_spill_nothing(name: str, tmp_path: Path) -> None:
    kernel, pointers, constants, warps = KERNELS[name]
    spills, shared, _ = compiled(kernel, tmp_path, pointers, constants, warps, 3)
    assert spills == 0 and shared <= SHARED_PER_SM
