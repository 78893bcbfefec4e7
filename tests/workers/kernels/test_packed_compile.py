"""Compiles products with weights of few bits for Hopper without a GPU: no spills, and no load of codes, rows or scales
narrower than 16 bytes."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

import triton.language as tl  # noqa: E402

from tests.attention.ops.test_triton_compile import compiled  # noqa: E402
from workers.ops.packed.stream_triton import _packed_stream  # noqa: E402
from workers.ops.packed.tiles import StreamTiles, gated_tiles, stream_tiles  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

_POINTERS = {"scales_ptr": "bf16", "part_ptr": "fp32"} | dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "bf16")


def stream(
    tiles: StreamTiles | None, n: int, k: int, code: str = "int4", group: int = 128, gated: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    """Pointers and constants of a product without bias."""
    assert tiles is not None
    constants = {"N": n // (1 + gated), "K": k, "CODE": code, "GROUP": group, "GATED": gated, "STEPS": tiles.steps(k)}
    constants |= {"ROW_TILES": tiles.row_tiles, "WARPS_N": tiles.warps_n, "WARPS_K": tiles.warps_k}
    constants |= {"COUNT": tiles.chunks, "SPLITS": tiles.splits, "TYPE": tl.bfloat16, "SCALE_TYPE": tl.bfloat16}
    constants |= dict.fromkeys(("zeros_ptr", "row_scale_ptr", "bias_ptr"))
    return _POINTERS, constants | {"PDL": True, "INTERPRETED": False}


PACKED_STREAM = stream(StreamTiles(1, 1, 4, 2), 4096, 4096)


@pytest.mark.parametrize(
    "rows,n,k,code,group,gated",
    [
        (1, 6144, 4096, "int4", 128, False),
        (16, 4096, 14336, "int4", 32, False),
        (8, 28672, 4096, "int4", 128, True),
        (32, 28672, 4096, "int4", 128, True),
        (4, 4096, 4096, "int8", 4096, False),
        (4, 5120, 2880, "e2m1", 32, False),
        (4, 4096, 4096, "e2m1", 16, False),
    ],
)
def test_a_product_of_few_bits_does_not_spill_and_loads_16_bytes_at_a_time(
    rows: int, n: int, k: int, code: str, group: int, gated: bool, tmp_path: Path
) -> None:
    tiles = (gated_tiles if gated else stream_tiles)(rows, n, k)
    assert tiles is not None
    warps = tiles.warps_n * tiles.warps_k
    spills, _, ptx = compiled(_packed_stream, tmp_path, *stream(tiles, n, k, code, group, gated), warps, 3)
    assert spills == 0
    loads = re.findall(r"ld\.global\S*", ptx)
    assert loads and all(".v4.b32" in load for load in loads), set(loads)
