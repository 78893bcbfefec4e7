"""The kernels of the gated delta rule compiled for Hopper, at the sizes of Qwen3.5-27B: no spills, and shared memory
that lets two programs onto a multiprocessor."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.capability import MULTIPROCESSORS  # noqa: E402
from aerie.kernels.delta_rule import (  # noqa: E402
    chunks_triton,
    few_rows_triton,
    recurrence_triton,
    rounds_triton,
    step_triton,
    wide_rounds_triton,
)
from aerie.kernels.delta_rule.tables import FEW_ROWS, MAX_ROWS, MAX_TILE_ROWS, DeltaHeads  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, built, compiled, shared_bytes  # noqa: E402
from tests.kernels.ops.delta_rule_cases import PATH, QWEN, SMALL  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HEADS = DeltaHeads(16, 48, 128, 128)
REGISTERS_PER_SM = 1 << 16
ROWS = ("qkv_ptr", "z_ptr", "b_ptr", "a_ptr", "out_ptr", "weight_ptr", "norm_ptr", "conv_ptr", "pending_ptr")
BETWEEN = ("committed_ptr", "x_ptr", "w_ptr", "u_ptr", "begin_ptr")
POINTERS = (
    dict.fromkeys((*ROWS, *BETWEEN), "bf16")
    | dict.fromkeys(("a_log_ptr", "dt_bias_ptr", "decay_ptr", "state_ptr"), "fp32")
    | dict.fromkeys(("slots_ptr", "mask_ptr", "snapshot_entry_ptr", "path_ptr"), "i64")
)


def round_constants(width: int, path: int, programs: int = 48, heads: DeltaHeads = HEADS) -> dict[str, Any]:
    tile = rounds_triton.round_rows(width, path)
    sizes = {"HK": heads.key_heads, "HV": heads.value_heads, "DK": heads.key_dim, "DV": heads.value_dim}
    sizes |= {"WIDTH": width, "ROWS": tile, "PENDING": width, "PATH": path, "R": heads.row_size}
    return sizes | {
        "PART": rounds_triton.round_tiles(tile, heads.value_dim, programs)[0],
        "SIGMOID": False,
        "PDL": True,
    }


DELTA_ROUND = (rounds_triton._delta_round, POINTERS, round_constants(4, 4))
_OF_TILES = ("WIDTH", "ROWS", "PART")


def wide_constants(width: int, path: int, programs: int = 48, heads: DeltaHeads = HEADS) -> dict[str, Any]:
    splits, part, _ = wide_rounds_triton.wide_tiles(width, heads.value_dim, programs)
    own = {"ROWS": rounds_triton.round_rows(width, 0), "SPLITS": splits, "PART": part}
    return round_constants(width, path, heads=heads) | own


DELTA_WIDE = (
    wide_rounds_triton._delta_wide,
    POINTERS | {"o_ptr": "fp32", "addresses_ptr": "i64"},
    wide_constants(32, 8),
)
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
    if programs > MULTIPROCESSORS:
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


@pytest.mark.parametrize("programs", [48, pytest.param(768, marks=pytest.mark.slow)])
def test_wide_rounds_fit_hopper(programs: int, tmp_path: Path) -> None:
    kernel, pointers, _ = DELTA_WIDE
    _, _, warps = wide_rounds_triton.wide_tiles(32, HEADS.value_dim, programs)
    spills, shared, ptx = compiled(kernel, tmp_path, pointers, wide_constants(32, 8, programs), warps, 1)
    assert spills <= (64 if programs == 48 else 256)
    assert 2 * shared <= SHARED_PER_SM
    assert "ld.global.v4.b32" in ptx  # the state's


def test_the_replay_fits_hopper(tmp_path: Path) -> None:
    """Three programs on a multiprocessor, so that enough loads are under way."""
    kernel, warps = wide_rounds_triton._replay, wide_rounds_triton.REPLAY_WARPS
    own = {"PART": wide_rounds_triton.REPLAY_PART, "weight_ptr": None, "a_log_ptr": None, "dt_bias_ptr": None}
    constants = {name: value for name, value in round_constants(32, 8).items() if name in kernel.arg_names} | own
    registers = REGISTERS_PER_SM // (3 * 32 * warps) // 8 * 8
    spills, shared, ptx = compiled(kernel, tmp_path, DELTA_WIDE[1], constants, warps, 1, maxnreg=registers)
    assert spills == 0
    assert 3 * shared <= SHARED_PER_SM
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # the state's


def widest(path: int) -> dict[tuple[int, bool], int]:
    """The tiles of rounds of 2 to MAX_ROWS rows, and whether the round is wide, and the widest round of each. Equal
    tiles differ in numbers alone, not in shapes."""
    found = {}
    for width in range(2, MAX_ROWS + 1):
        is_wide = width + min(path, width) > MAX_TILE_ROWS
        found[rounds_triton.round_rows(width, 0 if is_wide else min(path, width)), is_wide] = width
    return found


def shared_of(rows: int, is_wide: bool, width: int, path: int, heads: DeltaHeads, itemsize: int) -> int:
    path, programs = min(path, width), heads.value_heads
    if is_wide:
        kernel, of_tile = wide_rounds_triton._delta_wide, wide_constants(width, path, programs, heads)
        warps = wide_rounds_triton.wide_tiles(width, heads.value_dim, programs)[2]
    else:
        kernel = rounds_triton._delta_round
        part, warps = rounds_triton.round_tiles(rows, heads.value_dim, programs)
        of_tile = round_constants(width, path, heads=heads) | {"PART": part}
    pointers = DELTA_WIDE[1]
    if itemsize == 4:
        pointers = {name: "fp32" if of == "bf16" else of for name, of in pointers.items()}
    return shared_bytes(kernel, pointers, of_tile, warps, 1)


def test_the_widest_round_has_its_shared_memory() -> None:
    """A tile of its 126 rows takes 288 KB."""
    assert shared_of(64, True, MAX_ROWS, MAX_ROWS, QWEN, 2) <= SHARED_PER_SM


@pytest.mark.slow
@pytest.mark.parametrize("itemsize", [2, 4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [QWEN, SMALL], ids=["128x128", "16x16"])
@pytest.mark.parametrize("path", [PATH, MAX_ROWS])
def test_rounds_of_every_width_have_their_shared_memory(path: int, heads: DeltaHeads, itemsize: int) -> None:
    for (rows, is_wide), width in widest(path).items():
        assert shared_of(rows, is_wide, width, path, heads, itemsize) <= SHARED_PER_SM, (rows, is_wide, width)


@pytest.mark.slow
def test_shared_memory_is_what_the_compiler_says() -> None:
    constants = round_constants(4, 4)
    arguments = rounds_triton._delta_round, POINTERS, constants, 8, 1
    assert shared_bytes(*arguments) == built(*arguments).metadata.shared


def test_steps_fit_hopper(tmp_path: Path) -> None:
    spills, shared, ptx = compiled(step_triton._delta_step, tmp_path, POINTERS, DELTA_STEP[2], step_triton.WARPS, 1)
    assert spills == 0
    assert 2 * shared <= SHARED_PER_SM
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # the state's


def test_the_commit_fits_hopper(tmp_path: Path) -> None:
    constants = {"DEPTH": 5, "DEPTH_PADDED": 8, "PENDING": 8, "PATH": 5, "C": HEADS.channels, "R": HEADS.row_size}
    constants["BLOCK"] = rounds_triton.BLOCK
    assert compiled(rounds_triton._commit_rows, tmp_path, POINTERS, constants, 4, 1)[0] == 0
    assert compiled(rounds_triton._set_counts, tmp_path, POINTERS, {"BLOCK": 128}, 4, 1)[0] == 0


def test_chunks_fit_hopper(tmp_path: Path) -> None:
    """The products of the solve and of the states are those of whole warp groups."""
    blocks = {"CHUNKS_PADDED": chunks_triton.padded_chunks(1), "BLOCK": chunks_triton.BLOCK}
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


@pytest.mark.parametrize("heads", [HEADS, DeltaHeads(2, 6, 64, 128)], ids=["equal", "keys of other dimensions"])
@pytest.mark.parametrize("kernel", ["_prepare", "_walk", "_finish"])
def test_the_recurrence_fits_hopper(kernel: str, heads: DeltaHeads, tmp_path: Path) -> None:
    """`_walk`: 16 programs of one warp on a multiprocessor, whose sums over keys stay within the warp."""
    function = getattr(recurrence_triton, kernel)
    pointers = POINTERS | dict.fromkeys(("q_ptr", "k_ptr", "gates_ptr", "o_ptr"), "fp32") | {"v_ptr": "bf16"}
    sizes = {"HK": heads.key_heads, "HV": heads.value_heads, "DK": heads.key_dim, "DV": heads.value_dim}
    sizes |= {"R": heads.row_size, "PART": recurrence_triton.PART}
    sizes |= {"ROWS": recurrence_triton.ROWS, "SIGMOID": False}
    constants = {name: value for name, value in sizes.items() if name in function.arg_names}
    spills, shared, _ = compiled(function, tmp_path, pointers, constants, 4 if kernel == "_finish" else 1, 1)
    assert spills == 0 and shared <= 1024
