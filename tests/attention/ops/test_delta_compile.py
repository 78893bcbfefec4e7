"""The kernels of the gated delta rule compiled for Hopper, at the sizes of Qwen3.5-27B: no spills, and shared memory
that lets two programs onto a multiprocessor."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from attention.ops.delta_rule import (  # noqa: E402
    chunks_triton,
    commit_triton,
    few_rows_triton,
    rounds_triton,
    step_triton,
)
from attention.ops.delta_rule.tables import FEW_ROWS, DeltaHeads  # noqa: E402
from tests.attention.ops.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HEADS = DeltaHeads(16, 48, 128, 128)
REGISTERS_PER_SM = 1 << 16
ROWS = ("qkv_ptr", "z_ptr", "b_ptr", "a_ptr", "out_ptr", "weight_ptr", "norm_ptr", "conv_ptr", "pending_ptr")
BETWEEN = ("committed_ptr", "x_ptr", "w_ptr", "u_ptr", "begin_ptr")
POINTERS = (
    dict.fromkeys((*ROWS, *BETWEEN), "bf16")
    | dict.fromkeys(("a_log_ptr", "dt_bias_ptr", "decay_ptr", "state_ptr"), "fp32")
    | dict.fromkeys(("slots_ptr", "mask_ptr", "entry_ptr", "path_ptr"), "i64")
)


def round_constants(width: int, path: int, programs: int = 48) -> dict[str, Any]:
    tile = rounds_triton.round_rows(width, path)
    sizes = {"HK": HEADS.key_heads, "HV": HEADS.value_heads, "DK": HEADS.key_dim, "DV": HEADS.value_dim}
    sizes |= {"WIDTH": width, "ROWS": tile, "PENDING": width, "PATH": path, "R": HEADS.row_size}
    return sizes | {
        "PART": rounds_triton.round_tiles(tile, HEADS.value_dim, programs)[0],
        "SIGMOID": False,
        "PDL": True,
    }


DELTA_ROUND = (rounds_triton._delta_round, POINTERS, round_constants(4, 4))
_OF_TILES = ("WIDTH", "ROWS", "PART")
DELTA_STEP = (
    step_triton._delta_step,
    POINTERS,
    {name: value for name, value in round_constants(1, 4).items() if name not in _OF_TILES},
)


def few_row_constants(programs: int) -> dict[str, Any]:
    """For 4 rows after at most 4."""
    tiles = few_rows_triton.few_row_tiles(HEADS.value_dim, programs)
    return round_constants(4, 4) | {"ROWS": FEW_ROWS, "PART": tiles.part, "EARLY": tiles.early}


DELTA_FEW_ROWS = (few_rows_triton._delta_few_rows, POINTERS, few_row_constants(48))  # reads the most early


@pytest.mark.parametrize("programs", [48, 1536])
def test_few_rows_fit_hopper(programs: int, tmp_path: Path) -> None:
    """With many programs, three run on a multiprocessor at a time. They spill little, compared with their state."""
    tiles = few_rows_triton.few_row_tiles(HEADS.value_dim, programs)
    spills, shared, ptx = compiled(
        few_rows_triton._delta_few_rows, tmp_path, POINTERS, few_row_constants(programs), tiles.warps, 1,
        maxnreg=tiles.registers,
    )  # fmt: skip
    assert spills <= 256
    if programs > few_rows_triton.FEW_PROGRAMS:
        assert tiles.registers is not None and 3 * 32 * tiles.warps * tiles.registers <= REGISTERS_PER_SM
        assert 3 * shared <= SHARED_PER_SM
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # the state's


@pytest.mark.parametrize(
    "width,path,programs", [(4, 4, 48), (4, 4, 1536), pytest.param(8, 5, 48, marks=pytest.mark.slow)]
)
def test_rounds_fit_hopper(width: int, path: int, programs: int, tmp_path: Path) -> None:
    constants = round_constants(width, path, programs)
    _, warps = rounds_triton.round_tiles(constants["ROWS"], HEADS.value_dim, programs)
    spills, shared, ptx = compiled(rounds_triton._delta_round, tmp_path, POINTERS, constants, warps, 1)
    assert spills <= (8 if programs < 512 else 40)
    assert 2 * shared <= SHARED_PER_SM
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # the state's


def test_steps_fit_hopper(tmp_path: Path) -> None:
    spills, shared, ptx = compiled(step_triton._delta_step, tmp_path, POINTERS, DELTA_STEP[2], step_triton.WARPS, 1)
    assert spills == 0
    assert 2 * shared <= SHARED_PER_SM
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # the state's


def test_the_commit_fits_hopper(tmp_path: Path) -> None:
    constants = {"DEPTH": 5, "DEPTH_PADDED": 8, "PENDING": 8, "PATH": 5, "C": HEADS.channels, "R": HEADS.row_size}
    constants["BLOCK"] = commit_triton.BLOCK
    assert compiled(commit_triton._commit_rows, tmp_path, POINTERS, constants, 4, 1)[0] == 0
    assert compiled(commit_triton._set_counts, tmp_path, POINTERS, {"BLOCK": 128}, 4, 1)[0] == 0


def test_chunks_fit_hopper(tmp_path: Path) -> None:
    """The products of the solve and of the states are those of whole warp groups."""
    blocks = {"CHUNKS": 4, "CHUNKS_PADDED": 4, "BLOCK": chunks_triton.BLOCK}
    sizes = {"HK": HEADS.key_heads, "HV": HEADS.value_heads, "DK": HEADS.key_dim, "DV": HEADS.value_dim} | blocks
    tiles = chunks_triton.chunk_tiles(HEADS.value_dim)
    channels = {"C": HEADS.channels, "CHANNELS": chunks_triton.CHANNELS} | blocks
    spills, shared, _ = compiled(chunks_triton._convolve, tmp_path, POINTERS, channels, 4, 1)
    assert spills == 0
    for kernel, constants, warps, stages in (
        (chunks_triton._solve, sizes, tiles.solve, 1),
        (chunks_triton._advance, sizes | {"PART": tiles.part}, tiles.advance, 2),
        (chunks_triton._finish, sizes | {"SIGMOID": False}, tiles.finish, 1),
    ):
        spills, shared, ptx = compiled(kernel, tmp_path, POINTERS, constants, warps, stages)
        assert spills <= 40
        assert 2 * shared <= SHARED_PER_SM
        assert "wgmma.mma_async" in ptx
