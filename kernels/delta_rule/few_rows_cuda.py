"""Launches the CUDA C++ kernel of `delta_rule_rounds` for a few rows per request, few_rows.cu.

The kernel keeps the state in registers. Triton (3.6) would move it through shared memory for each product, or spill it.
Rows are bfloat16; keys and values have 128 numbers.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS, Capability
from aerie.kernels.cuda_source import load
from aerie.kernels.delta_rule import formulas
from aerie.kernels.delta_rule.tables import DeltaRows, DeltaWeights, LayerState, RoundTables

_LOAD = 8  # bfloat16 numbers in a load of 16 bytes


@dataclass(frozen=True)
class Tiles:
    """Tiles of the kernel.

    warps: per program.
    programs: programs that must fit on a multiprocessor; limits registers.
    """

    warps: int
    programs: int


def tiles_of(programs: int) -> Tiles:
    """Return the tiles for a number of programs: eight warps for up to one program per multiprocessor; else four warps,
    and three programs share one. H200, rounds of 4 rows of one layer of Qwen3.5-27B, batch 1, 8 and 32: eight warps
    take 6.9, 32 and 132 us, four take 8.5, 22 and 88."""
    return Tiles(8, 1) if programs <= MULTIPROCESSORS else Tiles(4, 3)


@cache
def source() -> str:
    """Return the kernel's source."""
    return Path(__file__).with_name("few_rows.cu").read_text()


def alignment(rows: DeltaRows) -> int:
    """Return the alignment of the rows' addresses, in numbers: a power of two, at most 8."""
    places = (place for each in (rows.qkv, rows.z) for place in (each.data_ptr() // 2, each.stride(0)))
    return gcd(_LOAD, *places)


def constants_of(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, width: int, tiles: Tiles, early: bool
) -> tuple[tuple[str, int | float], ...]:
    """Return the kernel's macros."""
    heads = layer.heads
    return (
        ("WIDTH", width),
        ("PATH", layer.committed.shape[1]),
        ("PENDING", layer.pending.shape[1]),
        ("HK", heads.key_heads),
        ("HV", heads.value_heads),
        ("ROW_SIZE", heads.row_size),
        ("SIGMOID", int(weights.sigmoid)),
        ("WARPS", tiles.warps),
        ("PROGRAMS", tiles.programs),
        ("PDL", int(early)),
        ("ALIGNED", alignment(rows)),
        ("SAVED_BF16", int(layer.saved_state.dtype is torch.bfloat16)),
        ("L2_EPS", formulas.NORM_EPS),
        ("NORM_F32", int(weights.norm.dtype is torch.float32)),
    )


def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.delta_rule_rounds` for a few rows per request: write the gated outputs
    of new rows to `out`, and advance the states by the committed rows only."""
    batch, width = tables.mask.shape
    early = Capability.of(out.device).supports_pdl
    tiles = tiles_of(layer.heads.value_heads * batch)
    defines = constants_of(rows, weights, layer, width, tiles, early)
    kernel = load(out.get_device(), source(), "delta_few_rows", defines, threads=32 * tiles.warps, shared_bytes=0)
    kernel.launch(
        (layer.heads.value_heads, batch), (1, 1),
        rows.qkv, rows.z, rows.b, rows.a, out, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        layer.state, layer.conv, layer.pending, layer.committed, layer.saved_state, layer.saved_conv, layer.count,
        tables.slots, tables.prefix_len, tables.mask, tables.snapshot_at, tables.snapshot_entry,
        tables.mask.stride(0), rows.qkv.stride(0), rows.z.stride(0), rows.b.stride(0), rows.a.stride(0),
        out.stride(0), float(weights.eps),
    )  # fmt: skip
