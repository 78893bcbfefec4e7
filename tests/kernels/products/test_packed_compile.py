"""Compiles products with weights of few bits for Hopper without a GPU: no spills, and no load of codes, rows or scales
narrower than 16 bytes."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

import triton.language as tl  # noqa: E402

from aerie.kernels.packed.blocks_triton import _packed_blocks  # noqa: E402
from aerie.kernels.packed.stream_triton import _packed_stream  # noqa: E402
from aerie.kernels.packed.tiles import (  # noqa: E402
    FIXED_ROWS,
    BlockPlan,
    BlockTiles,
    StreamTiles,
    block_tiles,
    fixed_tiles,
    gated_block_tiles,
    gated_tiles,
    stream_tiles,
)
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, built, compiled  # noqa: E402
from tests.support.kernels.cuobjdump import dumped  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

_POINTERS = {"scales_ptr": "bf16", "part_ptr": "fp32"} | dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "bf16")


def stream(
    tiles: StreamTiles | None, n: int, k: int, code: str = "int4", group: int = 128, gated: bool = False, rows: int = 1
) -> tuple[dict[str, str], dict[str, Any]]:
    """Pointers and constants of a product without bias."""
    assert tiles is not None
    constants = {"N": n // (1 + gated), "K": k, "CODE": code, "GROUP": group, "GATED": gated, "STEPS": tiles.steps(k)}
    constants |= {"ROW_TILES": tiles.row_tiles, "WARPS_N": tiles.warps_n, "WARPS_K": tiles.warps_k}
    constants |= {"COUNT": tiles.chunks, "SPLITS": tiles.splits, "IN_BLOCKS": rows > FIXED_ROWS}
    constants |= {"TYPE": tl.bfloat16, "SCALE_TYPE": tl.bfloat16}
    constants |= dict.fromkeys(("zeros_ptr", "row_scale_ptr", "bias_ptr"))
    return _POINTERS, constants | {"PDL": True, "INTERPRETED": False}


def blocks(tiles: BlockTiles, n: int, k: int, gated: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Pointers and constants of a product in blocks, without bias."""
    constants = {"N": n // (1 + gated), "K": k, "CODE": "int4", "GROUP": 128, "GATED": gated, "SPAN": tiles.span(k)}
    constants |= {
        "COUNT": tiles.chunks,
        "DIRECT": tiles.direct,
        "SUMS": tiles.scales_sums(k, 128),
    }
    constants |= {"BLOCK_M": tiles.block_m, "PAIRED": tiles.paired, "STAGES": tiles.stages, "SPLITS": tiles.splits}
    constants |= {"TYPE": tl.bfloat16, "SCALE_TYPE": tl.bfloat16}
    constants |= dict.fromkeys(("zeros_ptr", "row_scale_ptr", "bias_ptr"))
    return _POINTERS, constants | {"PDL": True, "INTERPRETED": False}


PACKED_STREAM = stream(StreamTiles(1, 1, 4, 2, 2), 4096, 4096)


@pytest.mark.parametrize(
    "rows,n,k,code,group,gated",
    [
        (1, 6144, 4096, "int4", 128, False),
        (32, 28672, 4096, "int4", 128, True),
        (512, 6144, 4096, "int4", 128, False),
        (4, 4096, 4096, "int8", 4096, False),
        (4, 4096, 4096, "e2m1", 16, False),
        *slow((16, 4096, 14336, "int4", 32, False), (8, 28672, 4096, "int4", 128, True)),
        *slow((4, 5120, 2880, "e2m1", 32, False)),
    ],
)
def test_a_product_of_few_bits_hardly_spills_and_loads_16_bytes_at_a_time(
    rows: int, n: int, k: int, code: str, group: int, gated: bool, tmp_path: Path
) -> None:
    tiles = fixed_tiles(rows, n, k) if rows > FIXED_ROWS else (gated_tiles if gated else stream_tiles)(rows, n, k)
    assert tiles is not None
    warps = tiles.warps_n * tiles.warps_k
    spills, _, ptx = compiled(_packed_stream, tmp_path, *stream(tiles, n, k, code, group, gated, rows), warps, 3)
    # 32 rows: two chunks at once spill a little, and are faster than one
    assert spills <= (0 if rows < 32 else 64 if rows == 32 else 160)
    loads = re.findall(r"ld\.global\S*", ptx)
    assert loads and all(".v4.b32" in load for load in loads), set(loads)


def product_loops(sass: str) -> list[int]:
    """Return the instructions of each loop with products of warp groups and without stores: pipelines' bodies."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    code = [(int(address, 16), text) for address, text in lines]
    found = []
    for end, text in code:
        jump = re.search(r"\bBRA\S*\s+(?:!?U?P\w+,\s*)?(0x[0-9a-f]+)", text)
        body = [t for at, t in code if jump is not None and int(jump[1], 16) <= at <= end]
        if any("HGMMA" in t for t in body) and not any("STG" in t for t in body):
            found.append(len(body))
    return found


@pytest.mark.parametrize(
    "rows,paired,most", [(16, True, 350), *slow((16, False, 440), (32, True, 400), (64, True, 400))]
)
def test_a_step_of_128_inputs_takes_few_instructions(rows: int, paired: bool, most: int, tmp_path: Path) -> None:
    """most: instructions of four warps for 2 KB of codes, of which decoding takes 160. Issuing them limits the
    product: steps of 64 inputs take 680, 2.8 TB/s at an instruction per scheduler and cycle of an H200."""
    tiles = BlockPlan(paired, 240).tiles(rows, 4096, 14336, False)
    assert tiles is not None and tiles.scales_sums(14336, 128)
    descriptors = None if tiles.direct else {"x_ptr": (tiles.block_m, 128)}
    made = built(_packed_blocks, *blocks(tiles, 4096, 14336, False), 4, 3, descriptors)
    assert "STACK:0" in (usage := dumped(made.asm["cubin"], tmp_path, "--dump-resource-usage")) and "LOCAL:0" in usage
    assert made.metadata.shared < SHARED_PER_SM // 2
    products = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\}, ?(.)", made.asm["ptx"])
    assert len(products) == 8 * (1 + paired) and set(products) == {"{"}, "operands from shared memory"
    (instructions,) = product_loops(dumped(made.asm["cubin"], tmp_path, "-sass"))
    assert 4 * instructions / (tiles.chunks * (1 + paired)) <= most


@pytest.mark.parametrize(
    "rows,n,k,gated", [(128, 28672, 4096, True), (128, 4096, 14336, False), *slow((64, 28672, 4096, True))]
)
def test_blocks_of_outputs_multiply_codes_from_registers(
    rows: int, n: int, k: int, gated: bool, tmp_path: Path
) -> None:
    tiles = (gated_block_tiles if gated else block_tiles)(rows, n, k)
    assert tiles is not None
    descriptors = {"x_ptr": (tiles.block_m, 64)}
    spills, shared, ptx = compiled(_packed_blocks, tmp_path, *blocks(tiles, n, k, gated), 4, 3, descriptors=descriptors)
    assert spills == 0 and 2 * shared < SHARED_PER_SM
    products = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\}, ?(.)", ptx)
    assert len(products) == 4 * (1 + tiles.paired) and set(products) == {"{"}, "operands from shared memory"
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert not re.search(r"\b(st|atom|ld)\.global|cp\.async", before)
