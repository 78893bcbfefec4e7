"""Compiles the kernels for Hopper without a GPU and looks at what the assembler says: no spills, and shared memory that
lets as many programs onto a multiprocessor as the tables count on."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.attention.backends.triton_kernels import LayerShape  # noqa: E402
from aerie.kernels.attend import (  # noqa: E402
    decode_plan_triton,
    decode_triton,
    expanded_prefill_triton,
    latent_decode_triton,
    latent_prefill_triton,
    merge_states_triton,
    prefill_plan_triton,
    prefill_triton,
    split_kv_triton,
)
from aerie.kernels.attend.fixed import fixed_prefill_triton, path_triton  # noqa: E402
from aerie.kernels.kv import slot_mapping_triton  # noqa: E402
from aerie.kernels.kv.stored_values import WEIGHT_UNIT  # noqa: E402
from aerie.kernels.rope import rope_store_normed_triton, rope_store_triton, rotate_heads_triton  # noqa: E402
from tests.support.kernels.cuobjdump import dumped  # noqa: E402
from tests.support.slow import covering, slow  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
SHARED_PER_SM = 227 * 1024
DTYPES = {"bf16": 2, "fp32": 4}

ROPE = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_pool_ptr", "v_pool_ptr"), "bf16")
ROPE |= {"cos_ptr": "fp32", "sin_ptr": "fp32", "slot_ptr": "i64", "position_ptr": "i64"}


def _source(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    descriptors: dict[str, tuple[int, int]] | None = None,
    mapped: str = "bf16",
) -> Any:
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif descriptors is not None and name in descriptors:
            signature[name] = f"tensordesc<{mapped}{list(descriptors[name])}>"
        elif name.endswith("_ptr"):
            signature[name] = "*" + pointers.get(name, "i32")
        else:
            signature[name] = pointers.get(name) or ("fp32" if "scale" in name or name == "eps" else "i32")
        if name.endswith(("_ptr", "_stride")) and name not in constants and name not in (descriptors or ()):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, constexprs, attributes)


def built(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    descriptors: dict[str, tuple[int, int]] | None = None,
    mapped: str = "bf16",
    **options: Any,
) -> Any:
    """What the compiler makes. descriptors: blocks of tensor maps, over `mapped`. options: of the compiler, beside
    warps and stages. Pointers not named are to int32; other arguments are int32 that 16 divides, or float32 for a
    scale or an eps."""
    from triton.backends.compiler import GPUTarget

    source = _source(kernel, pointers, constants, descriptors, mapped)
    options |= {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def shared_bytes(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> int:
    """Shared memory of a program, as `built(...).metadata.shared`, in a tenth of the time: no LLVM, no assembler."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptx_version_from_options
    from triton.compiler import make_backend

    source, target = _source(kernel, pointers, constants), GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": warps, "num_stages": stages, **source.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    makes: dict[str, Any] = {}
    backend.add_stages(makes, options, source.language)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *functions, context)
    for stage in ("ttir", "ttgir"):
        module = makes[stage](module, {})
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, get_ptx_version_from_options(options, 90))
    manager.run(module, "shared_bytes")
    return int(module.get_int_attr("ttg.shared"))


def compiled(kernel: Any, tmp_path: Path, *arguments: Any, **options: Any) -> tuple[int, int, str]:
    """Bytes of spills and of shared memory, and the PTX; arguments and options as of `built`."""
    made = built(kernel, *arguments, **options)
    usage = dumped(made.asm["cubin"], tmp_path, "--dump-resource-usage")
    stack, local = (re.search(rf"{what}:(\d+)", usage) for what in ("STACK", "LOCAL"))
    assert stack is not None and local is not None
    return int(stack[1]) + int(local[1]), made.metadata.shared, made.asm["ptx"]


def rope_constants(group: int, head_dim: int, rotated: int) -> dict[str, Any]:
    """Return the constants of a kernel that norms q, k and v and stores k and v. It has 8 KV heads, each with `group`
    query heads."""
    return {
        "ROWS": 4,
        "GROUP": group,
        "HEADS": rope_store_normed_triton.query_heads(group, head_dim),
        "KV_HEADS": 8,
        "D": head_dim,
        "BLOCK": triton.next_power_of_2(head_dim),
        "ROTATED": rotated,
        "HALF": triton.next_power_of_2(rotated // 2),
        "STORES": True,
        "V_NORMED": True,
        "PDL": True,
        "INTERPRETED": False,
    }


def decode_constants(
    rows: int, group: int, head_dim: int, page_size: int, tiles: decode_plan_triton.DecodeTiles
) -> dict[str, Any]:
    columns = 8 * -(-rows * group // tiles.block_m)
    return {
        "ROWS": rows,
        "GROUP": group,
        "KV_HEADS": 8,
        "D": head_dim,
        "PAGE": page_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "COLUMNS": columns,
        "SLICE": tiles.merge_slice(head_dim),
        "FAN": decode_plan_triton.FAN,
        "APART": False,
        "PATHS": False,
        "FIXED": False,
        "LEADS": False,
        "SPANS": rows > 63,
        "PART_M": tiles.block_m,
        "WINDOW": 0,
        "SOFT_CAP": None,
        "sinks_ptr": None,
        "PDL": True,
        "UPCAST": False,
        "UNIT": 1.0,
        "PAIRS": False,
    }


@pytest.mark.parametrize(
    "rows,group,head_dim,page_size,dtype,density",
    [
        (1, 4, 128, 16, "bf16", 0.5),
        (16, 4, 128, 16, "bf16", 2),
        (63, 4, 128, 16, "bf16", 0.24),
        (4, 4, 128, 16, "fp32", 1),
        (1, 6, 256, 16, "bf16", 0.5),
        (8, 8, 256, 16, "bf16", 2),
        (1, 8, 512, 16, "bf16", 0.5),
        *slow(
            (256, 4, 128, 16, "bf16", 0.06),
            (4, 4, 128, 1, "bf16", 8),
            (1, 8, 512, 16, "bf16", 8),
            (8, 8, 512, 16, "bf16", 2),
            (4, 4, 128, 16, "bf16", 8),
            (8, 4, 128, 16, "bf16", 0.5),
            (8, 8, 128, 64, "bf16", 0.5),
            (4, 7, 64, 16, "bf16", 0.5),
            (4, 4, 128, 16, "bf16", 2),
            (1, 4, 64, 1, "bf16", 1.5),
            (4, 4, 256, 16, "bf16", 8),
        ),
    ],
)
def test_decode_attention_fits_hopper(
    rows: int, group: int, head_dim: int, page_size: int, dtype: str, density: float, tmp_path: Path
) -> None:
    tiles = decode_plan_triton.decode_tiles(rows * group, head_dim, DTYPES[dtype], density)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), dtype)
    pointers |= {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32"}
    is_merged_apart = density <= 1 and not tiles.rarely_splits
    constants = decode_constants(rows, group, head_dim, page_size, tiles) | {"APART": is_merged_apart}
    spills, shared, ptx = compiled(
        decode_triton._attend_decode, tmp_path, pointers, constants, tiles.warps, tiles.stages
    )
    assert spills == 0
    assert shared * tiles.programs_per_sm <= SHARED_PER_SM
    assert "cp.async.cg" in ptx  # K and V are loaded ahead


@pytest.mark.parametrize(
    "rows,head_dim,density", [(1, 128, 0.5), (16, 256, 2), (8, 512, 2), *slow((4, 64, 8), (8, 128, 8))]
)
def test_decode_attention_over_fp8_fits_hopper(rows: int, head_dim: int, density: float, tmp_path: Path) -> None:
    """Pages are loaded as pairs of numbers and become float16, two numbers at a time."""
    tiles = decode_plan_triton.decode_tiles(rows * 4, head_dim, 2, density, 1)
    pointers = {"q_ptr": "bf16", "k_ptr": "i16", "v_ptr": "i16", "out_ptr": "bf16"}
    pointers |= {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32"}
    constants = decode_constants(rows, 4, head_dim, 16, tiles) | {
        "APART": density <= 1,
        "UNIT": WEIGHT_UNIT,
        "PAIRS": True,
    }
    spills, shared, ptx = compiled(
        decode_triton._attend_decode, tmp_path, pointers, constants, tiles.warps, tiles.stages
    )
    assert spills == 0
    assert shared * tiles.programs_per_sm <= SHARED_PER_SM
    assert "cp.async.cg" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx and "ld.shared.u8" not in ptx


def latent_maps(page_size: int, block_n: int) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Constants and blocks of tensor maps: one or the other."""
    if page_size % block_n:
        return {"latent_desc": None, "rotated_desc": None}, {}
    return {}, {"latent_desc": (block_n, 512), "rotated_desc": (block_n, 64)}


def latent_constants(rows: int, heads: int, page_size: int, tiles: decode_plan_triton.DecodeTiles) -> dict[str, Any]:
    return {
        **latent_maps(page_size, tiles.block_n)[0],
        "ROWS": rows,
        "HEADS": heads,
        "D": 512,
        "ROTATED": 64,
        "PAGE": page_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "TOKENS": decode_plan_triton.token_axis(tiles),
        "COLUMNS": -(-rows * heads // tiles.block_m),
        "SLICE": tiles.merge_slice(512),
        "FAN": decode_plan_triton.FAN,
        "APART": False,
        "PATHS": False,
        "FIXED": False,
        "PART_M": tiles.block_m,
        "WINDOW": 0,
        "PDL": True,
        "UPCAST": False,
        "UNIT": 1.0,
        "PAIRS": False,
    }


# gpt-oss: 8 query heads of 64 values for a KV head, windows and sinks; Gemma 2 27b: soft caps, 2 of 128.
RULES = {
    "window": (4, 128, {"WINDOW": 2048}),
    "gpt-oss": (8, 64, {"WINDOW": 128, "sinks_ptr": ...}),
    "gpt-oss, full layers": (8, 64, {"sinks_ptr": ...}),
    "gemma-2": (2, 128, {"WINDOW": 4096, "SOFT_CAP": 50.0}),
    "all": (2, 256, {"WINDOW": 4096, "SOFT_CAP": 50.0, "sinks_ptr": ...}),
}


BY_RULE = [
    pytest.param(group, head_dim, rule, id=name, marks=() if name in ("gpt-oss", "all") else pytest.mark.slow)
    for name, (group, head_dim, rule) in RULES.items()
]


@pytest.mark.parametrize("group,head_dim,rule", BY_RULE)
def test_decode_attention_by_a_rule_fits_hopper(
    group: int, head_dim: int, rule: dict[str, Any], tmp_path: Path
) -> None:
    """As without: no state of it spills, and as many programs run."""
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "bf16")
    pointers |= {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32", "sinks_ptr": "fp32"}
    for rows, page_size, density in ((1, 16, 0.5), (4, 16, 8)):
        tiles = decode_plan_triton.decode_tiles(rows * group, head_dim, 2, density)
        constants = decode_constants(rows, group, head_dim, page_size, tiles) | {"APART": density <= 1} | rule
        constants = {name: value for name, value in constants.items() if value is not ...}
        spills, shared, ptx = compiled(
            decode_triton._attend_decode, tmp_path, pointers, constants, tiles.warps, tiles.stages
        )
        assert spills == 0
        assert shared * tiles.programs_per_sm <= SHARED_PER_SM
        assert "cp.async.cg" in ptx


LATENT_POINTERS = dict.fromkeys(("q_ptr", "rows_ptr", "out_ptr"), "bf16")
LATENT_POINTERS |= {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32"}


@pytest.mark.parametrize(
    "rows,heads,page_size,density,window",
    [
        (1, 16, 64, 8, 0),
        (2, 16, 1, 0.5, 0),
        (8, 16, 64, 1, 0),
        (4, 16, 16, 0.1, 2048),
        *slow((1, 16, 16, 0.1, 0), (4, 16, 16, 0.1, 0), (4, 16, 1, 8, 0), (1, 128, 64, 1, 0)),
    ],
)
def test_latent_attention_fits_hopper(
    rows: int, heads: int, page_size: int, density: float, window: int, tmp_path: Path
) -> None:
    tiles = decode_plan_triton.latent_tiles(rows * heads, 2, density)
    constants = latent_constants(rows, heads, page_size, tiles) | {"APART": density <= 1, "WINDOW": window}
    pointers = LATENT_POINTERS | {"part_ptr": "fp16" if density <= 1 else "fp32"}
    maps = latent_maps(page_size, tiles.block_n)[1]
    spills, shared, ptx = compiled(
        latent_decode_triton._attend_latent, tmp_path, pointers, constants, tiles.warps, tiles.stages, maps
    )
    assert spills <= 64  # of what is set aside before the loop
    assert shared * tiles.programs_per_sm <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx
    assert ("cp.async.bulk.tensor" if maps else "cp.async.cg") in ptx  # latent rows are loaded ahead


@pytest.mark.parametrize(
    "heads,page_size,window,fixed",
    [
        (128, 64, 0, False),
        (16, 16, 2048, False),
        (16, 64, 0, True),
        *slow((16, 16, 0, False), (16, 64, 0, False), (128, 16, 0, True)),
    ],
)
def test_latent_chunk_attention_fits_hopper(
    heads: int, page_size: int, window: int, fixed: bool, tmp_path: Path
) -> None:
    tiles = latent_prefill_triton.latent_prefill_tiles(2)
    together = latent_prefill_triton.heads_of_tile(heads, tiles)
    constants = {"HEADS": heads, "HEADS_OF_TILE": together, "D": 512, "ROTATED": 64, "UPCAST": False}
    constants |= {"PAGE": page_size, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "WINDOW": window}
    constants |= {"UNIT": 1.0, "FIXED": fixed}
    absent, maps = latent_maps(page_size, tiles.block_n)
    spills, shared, ptx = compiled(
        latent_prefill_triton._attend_latent_prefill,
        tmp_path,
        LATENT_POINTERS,
        constants | absent,
        tiles.warps,
        tiles.stages,
        maps,
        enable_fp_fusion=not fixed,
    )
    assert spills <= (800 if fixed else 64)  # set aside before the loop; with spans, the sums of earlier ones, too
    assert not fixed or "fma.rn.f32" not in ptx
    assert shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and ("cp.async.bulk.tensor" if maps else "cp.async.cg") in ptx


def test_expanded_chunk_attention_fits_hopper(tmp_path: Path) -> None:
    tiles = expanded_prefill_triton.expanded_tiles(2)
    pointers = dict.fromkeys(("q_ptr", "kv_ptr", "k_pe_ptr", "out_ptr"), "bf16")
    pointers |= {"cos_ptr": "fp32", "sin_ptr": "fp32", "angle_ptr": "i64"}
    constants = {"KEY": 128, "ROTATED": 64, "VALUE": 128, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    spills, shared, ptx = compiled(
        expanded_prefill_triton._attend_expanded,
        tmp_path,
        pointers,
        constants | {"UPCAST": False},
        tiles.warps,
        tiles.stages,
    )
    assert spills == 0 and shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "cp.async.cg" in ptx


@pytest.mark.parametrize(
    "rows,group,head_dim,paths",
    [
        (1, 4, 128, False),
        (9, 4, 128, True),
        *slow((1, 4, 128, True), (16, 4, 128, False), (16, 8, 64, False), (16, 8, 64, True), (4, 8, 256, True)),
    ],
)
def test_decode_attention_in_fixed_spans_fits_hopper(
    rows: int, group: int, head_dim: int, paths: bool, tmp_path: Path
) -> None:
    tiles = LayerShape(8 * group, 8, head_dim, None, 2, 2).fixed_tiles(rows)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "bf16")
    pointers |= {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32", "sums_ptr": "fp32"}
    constants = decode_constants(rows, group, head_dim, 16, tiles)
    constants |= {"APART": True, "PATHS": paths, "FIXED": True, "LEADS": head_dim <= 128}
    constants["PART_M"] = decode_plan_triton.partial_rows(tiles, rows * group)
    spills, shared, ptx = compiled(
        decode_triton._attend_decode, tmp_path, pointers, constants, tiles.warps, tiles.stages, enable_fp_fusion=False
    )
    assert spills <= 256  # outside the loop over tiles
    assert "fma.rn.f32" not in ptx  # else a variant might round as another does not
    assert "cp.async.cg" in ptx  # K and V are loaded ahead
    # a tile of 64 rows of 256 dimensions has a multiprocessor to itself
    assert shared * (tiles.programs_per_sm if head_dim <= 128 else 1) <= SHARED_PER_SM


def path_constants(rows: int, group: int, head_dim: int, tiles: decode_plan_triton.DecodeTiles) -> dict[str, Any]:
    constants = decode_constants(rows, group, head_dim, 16, tiles)
    constants |= {
        "BLOCK_M": max(16, triton.next_power_of_2(group)),
        "ITEM_M": tiles.block_m,
        "PART_M": decode_plan_triton.partial_rows(tiles, rows * group),
        "AT_ONCE": path_triton.AT_ONCE,
        "LEADS": int(head_dim <= 128),
        "PATH_COLUMNS": path_triton.PATH_COLUMNS,
    }
    return {name: value for name, value in constants.items() if name in path_triton._finish_paths.arg_names}


@pytest.mark.parametrize(
    "group,head_dim,kv,rule",
    [
        (4, 128, "bf16", {}),
        *slow(
            (8, 64, "bf16", {"WINDOW": 128, "sinks_ptr": ...}),
            (4, 128, "i16", {"PAIRS": True, "UNIT": WEIGHT_UNIT}),
            (2, 256, "bf16", {"SOFT_CAP": 50.0}),
        ),
    ],
)
def test_paths_in_fixed_spans_fit_hopper(
    group: int, head_dim: int, kv: str, rule: dict[str, Any], tmp_path: Path
) -> None:
    tiles = LayerShape(8 * group, 8, head_dim, None, 2, 1 if kv == "i16" else 2).fixed_tiles(9)
    pointers = {"q_ptr": "bf16", "k_ptr": kv, "v_ptr": kv, "out_ptr": "bf16", "sinks_ptr": "fp32", "mask_ptr": "i64"}
    pointers |= {"part_ptr": "fp32", "lse_ptr": "fp32", "sums_ptr": "fp32"}
    constants = path_constants(9, group, head_dim, tiles) | rule
    constants = {name: value for name, value in constants.items() if value is not ...}
    spills, shared, ptx = compiled(
        path_triton._finish_paths,
        tmp_path,
        pointers,
        constants,
        path_triton.num_warps(head_dim),
        1,
        enable_fp_fusion=False,
    )
    assert spills <= (256 if head_dim <= 128 else 320) and "fma.rn.f32" not in ptx
    assert shared * (4 if head_dim <= 128 else 3) <= SHARED_PER_SM


@pytest.mark.parametrize(
    "group,head_dim,kv,rule",
    [
        (4, 128, "bf16", {}),
        (8, 64, "bf16", {"WINDOW": 128, "sinks_ptr": ...}),
        (4, 128, "i16", {"PAIRS": True, "UNIT": WEIGHT_UNIT}),
        *slow((2, 256, "bf16", {"SOFT_CAP": 50.0}), (16, 512, "bf16", {})),
    ],
)
def test_chunk_attention_in_fixed_spans_fits_hopper(
    group: int, head_dim: int, kv: str, rule: dict[str, Any], tmp_path: Path
) -> None:
    shape = LayerShape(8 * group, 8, head_dim, None, 2, 1 if kv == "i16" else 2)
    tiles = shape.fixed_prefill_tiles
    assert tiles.block_n == shape.fixed_tiles(1).block_n, "the columns of a tile enter a row's result"
    pointers = {"q_ptr": "bf16", "k_ptr": kv, "v_ptr": kv, "out_ptr": "bf16", "sinks_ptr": "fp32"}
    constants = {
        "GROUP": group,
        "KV_HEADS": 8,
        "D": head_dim,
        "PAGE": 16,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "WINDOW": 0,
        "SOFT_CAP": None,
        "sinks_ptr": None,
        "UPCAST": False,
        "UNIT": 1.0,
        "PAIRS": False,
        **rule,
    }
    constants = {name: value for name, value in constants.items() if value is not ...}
    spills, shared, ptx = compiled(
        fixed_prefill_triton._attend_fixed_prefill,
        tmp_path,
        pointers,
        constants,
        tiles.warps,
        tiles.stages,
        enable_fp_fusion=False,
    )
    assert spills <= (1280 if head_dim > 128 else 160)  # the sums of earlier spans, outside of the loop over tiles
    assert shared <= SHARED_PER_SM and "wgmma.mma_async" in ptx and "fma.rn.f32" not in ptx


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_latent_attention_in_fixed_spans_adds_no_floats_in_an_order_of_the_compilers(rows: int, paths: bool) -> None:
    """Which may be another one in each loop: two groups of warps share the tokens of one, and have all of the next."""
    tiles = LayerShape(16, 1, 512, 64, 2, 2).fixed_tiles(rows)
    assert tiles.block_m == 16 * rows
    constants = latent_constants(rows, 16, 16, tiles) | {"APART": True, "PATHS": paths, "FIXED": True}
    made = built(
        latent_decode_triton._attend_latent,
        LATENT_POINTERS,
        constants,
        tiles.warps,
        tiles.stages,
        enable_fp_fusion=False,
    )
    reductions = re.findall(r'"tt\.reduce".*?\n\s*\}\)', made.asm["ttgir"], flags=re.DOTALL)
    assert len(reductions) >= 2 and not any("arith.addf" in reduction for reduction in reductions)
    assert "fma.rn.f32" not in made.asm["ptx"]


@pytest.mark.parametrize(
    "group,head_dim,dtype,rule",
    [
        (4, 128, "bf16", {}),
        (6, 256, "bf16", {}),
        (8, 512, "bf16", {}),
        (4, 128, "fp32", {}),
        (2, 256, "bf16", {"WINDOW": 1024, "reach_ptr": ...}),
        *((*RULES[name][:2], "bf16", RULES[name][2]) for name in ("gpt-oss", "all")),
        *slow((1, 128, "bf16", {}), (7, 64, "bf16", {})),
        *slow(*((*RULES[name][:2], "bf16", RULES[name][2]) for name in RULES if name not in ("gpt-oss", "all"))),
    ],
)
def test_chunk_attention_fits_hopper(
    group: int, head_dim: int, dtype: str, rule: dict[str, Any], tmp_path: Path
) -> None:
    tiles = prefill_triton.prefill_tiles(group, head_dim, DTYPES[dtype])
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), dtype) | {"sinks_ptr": "fp32", "reach_ptr": "i32"}
    constants = {
        "GROUP": group,
        "KV_HEADS": 8,
        "D": head_dim,
        "PAGE": 16,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "WINDOW": 0,
        "SOFT_CAP": None,
        "sinks_ptr": None,
        "reach_ptr": None,
        "UPCAST": False,
        "UNIT": 1.0,
        **rule,
    }
    constants = {name: value for name, value in constants.items() if value is not ...}
    spills, shared, ptx = compiled(
        prefill_triton._attend_prefill, tmp_path, pointers, constants, tiles.warps, tiles.stages
    )
    assert spills <= (16 if head_dim > 128 else 0)  # a few numbers of a tile of 128 x 256
    assert shared <= SHARED_PER_SM
    if dtype == "bf16":
        assert "wgmma.mma_async" in ptx


def test_the_small_kernels_fit_hopper(tmp_path: Path) -> None:
    constants: dict[str, Any] = {"MAX_SPLITS": 64, "REQUESTS": 512}
    for window in (0, 2048):
        assert (
            compiled(
                split_kv_triton._plan_items,
                tmp_path,
                {},
                constants | {"WINDOW": window},
                split_kv_triton.plan_warps(512),
                1,
            )[0]
            == 0
        )
    constants = {"BLOCK": prefill_plan_triton.BLOCK, "CHUNKS": prefill_plan_triton.CHUNKS}
    assert compiled(prefill_plan_triton._plan_tiles, tmp_path, {}, constants, 4, 1)[0] == 0
    pointers = {"position_ptr": "i64", "slot_ptr": "i64"}
    for kept in (False, True):
        constants = {"BLOCK": slot_mapping_triton.BLOCK, "CHUNKS": slot_mapping_triton.CHUNKS, "HAS_STORE_FROM": kept}
        assert compiled(slot_mapping_triton._map_prefill_rows, tmp_path, pointers, constants, 4, 1)[0] == 0
    constants = {
        "ROWS": 4,
        "GROUP": 4,
        "KV_HEADS": 8,
        "D": 128,
        "BLOCK_M": 16,
        "COLUMNS": 8,
        "AT_ONCE": 8,
        "MAX_SPLITS": 64,
        "PDL": True,
    }
    pointers = {"part_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": "bf16"}
    assert compiled(merge_states_triton.merge_rows, tmp_path, pointers, constants, 4, 1)[0] == 0
    constants = {"GROUP": 4, "GROUP_PADDED": 4, "KV_HEADS": 8, "D": 128, "ROTATED": 128, "STORES": True, "PDL": True}
    queries = {"GROUP": 1, "GROUP_PADDED": 1, "D": 512, "ROTATED": 512, "STORES": False}
    for partly in ({}, {"GROUP": 6, "GROUP_PADDED": 8, "D": 256, "ROTATED": 64}, queries):
        assert compiled(rope_store_triton._rope_store, tmp_path, ROPE, constants | partly, 1, 1)[0] == 0
    for half in (36, 40):  # of vision towers
        constants = {"HALF": half, "HALF_PADDED": 64, "ROWS": 16, "HEADS": 8}
        pointers = {"x_ptr": "bf16", "cos_ptr": "fp32", "sin_ptr": "fp32"}
        assert compiled(rotate_heads_triton._rotate_heads, tmp_path, pointers, constants, 4, 1)[0] == 0


@pytest.mark.parametrize(
    "sizes,weight,pool",
    covering(
        [(4, 128, 128), (6, 256, 64), (8, 512, 512), (3, 96, 96), (0, 128, 128)], ["bf16", "fp32"], ["bf16", "fp8e4nv"]
    ),
)
def test_norms_rope_and_the_store_fit_hopper(
    sizes: tuple[int, int, int], weight: str, pool: str, tmp_path: Path
) -> None:
    """sizes: query heads per KV head, head_dim, rotated. weight: dtype of the norms' weights."""
    kernel, constants = rope_store_normed_triton._normed_rope_store, rope_constants(*sizes)
    pointers = ROPE | dict.fromkeys(("q_weight_ptr", "k_weight_ptr"), weight)
    pointers |= dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), pool)
    assert compiled(kernel, tmp_path, pointers, constants, 4, 1)[0] == 0
    alone = constants | {"STORES": False, "V_NORMED": False}
    assert compiled(kernel, tmp_path, pointers, alone, 4, 1)[0] == 0
