"""Products of few rows that add their adapters' part, compiled for Hopper without a GPU: no spills, and the shared
memory of the product alone."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.gemm import skinny_triton  # noqa: E402
from aerie.kernels.gemm.tiles import gated_tiles, skinny_gemm_tiles, summing_programs, up_columns  # noqa: E402
from aerie.workers.layers.forward_context import ForwardContext  # noqa: E402
from aerie.workers.lora.layers import AdapterRows  # noqa: E402
from tests.kernels.attend.test_triton_compile import SHARED_PER_SM, compiled  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
POINTERS = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr", "down_ptr", "up_ptr"), "bf16")
POINTERS |= {"part_ptr": "fp32", "inner_ptr": "fp32"}
QKV, GATE_UP, DOWN = (4096, (0, 4096, 5120, 6144)), (4096, (0, 14336, 28672)), (14336, (0, 4096))
HEAD = (4096, (0, 128_256))


def variant(rows: int, rank: int, inputs: int, parts: tuple[int, ...]) -> tuple[Any, ...]:
    """Return what `compiled` takes. rank 0: the product alone."""
    gated = len(parts) == 3
    tiles = (gated_tiles if gated else skinny_gemm_tiles)(rows, parts[-1], inputs)
    assert tiles is not None
    n = parts[-1] // 2 if gated else parts[-1]
    constants = {"N": n, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    constants |= {"SPLITS": tiles.splits, "APART": False, "SPAN": tiles.span(inputs), "AHEAD": tiles.columns_ahead}
    constants |= {"LAST": 0, "K": 0, "GATED": gated, "HAS_BIAS": False, "PDL": True, "UPCAST": False}
    if rank:
        programs = -(-n // tiles.block_n) * tiles.splits
        constants |= {"IN": inputs, "RANK": rank, "PARTS": parts, "CHUNK": up_columns(tiles, rank, 4)}
        constants |= {"SUMMING": summing_programs(programs, 4), "RANKS": rank & -rank if rank < 64 else 64}
    else:
        constants |= {**skinny_triton.NO_ADAPTERS, "x_ptr": None, "x_row_stride": 0}
    blocks = {"x_desc": (tiles.block_m, tiles.block_k), "w_desc": (tiles.block_n, tiles.block_k)}
    return POINTERS, constants, tiles.warps, tiles.stages, blocks


@pytest.mark.parametrize(
    ("rows", "rank", "inputs", "parts"),
    [
        (1, 16, *QKV),
        (8, 16, *GATE_UP),
        (64, 64, *DOWN),
        (8, 16, *HEAD),
        *slow(
            (32, 16, *GATE_UP), (1, 64, *DOWN), (64, 16, *GATE_UP), (32, 256, *QKV), (1, 16, *DOWN), (64, 256, *HEAD)
        ),
    ],
)
def test_a_product_with_adapters_fits_hopper(
    rows: int, rank: int, inputs: int, parts: tuple[int, ...], tmp_path: Path
) -> None:
    kernel = skinny_triton._skinny_gemm
    spilled, bytes_shared, ptx = compiled(kernel, tmp_path, *variant(rows, rank, inputs, parts))
    assert spilled <= (32 if rows > 32 else 0), "after the loop over W"
    assert bytes_shared <= SHARED_PER_SM
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 2
    before, *after = ptx.split("griddepcontrol.wait")
    assert not re.search(r"\b(st|atom|red)\.global", before) and any("atom" in each for each in after)


@pytest.mark.parametrize(("rows", "rank"), [(8, 16)])
def test_adapters_take_no_shared_memory(rows: int, rank: int, tmp_path: Path) -> None:
    kernel = skinny_triton._skinny_gemm
    both, alone = (compiled(kernel, tmp_path, *variant(rows, each, *QKV))[1] for each in (rank, 0))
    assert both == alone


class Launches(TorchDispatchMode):
    """Notes each operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_places_of_rows_are_written_before_the_fence() -> None:
    """Products read them before their wait, also the first of a pass, such as a draft's, which embeds in a kernel that
    is launched early. The reset of counters is launched normally."""
    slots = torch.tensor([0, 1], dtype=torch.int32)
    context = cast(
        ForwardContext, SimpleNamespace(row_slots=slots, last=None, expanded=None, attending_rows=lambda rows: rows)
    )
    index = AdapterRows(torch.tensor([0, -1]))
    with Launches() as launches:
        index.enter(context, True)
    assert launches.names[-1] == "zero_.default" and "index.Tensor" in launches.names
