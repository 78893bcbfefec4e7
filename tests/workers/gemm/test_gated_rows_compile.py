"""Where the CUDA kernel of gated products is chosen, and what NVRTC makes of it for Hopper. Needs no GPU."""

import re
from pathlib import Path

import pytest
import torch

from attention.capability import MULTIPROCESSORS, Capability
from attention.ops import cuda_source
from tests.attention.ops.test_few_rows_cuda import HOPPER, nvrtc_here
from tests.support.kernels.cuobjdump import dumped
from workers.ops.blocks import cdiv
from workers.ops.gemm import choice
from workers.ops.gemm.tiles import (
    MAX_GATED_ROWS,
    MAX_GATED_WIDTH,
    SHARED_BYTES,
    fewest_gated_rows,
    gated_stages,
    gated_width,
)
from workers.ops.gemm.workspace import GEMMOptions, Workspace

WITH_COMPILER = Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"}))
WITHOUT = Capability("cuda", HOPPER, frozenset({"triton"}))


def test_tiles_fill_the_waves_of_models() -> None:
    """Qwen3-8B: one wave for two. Llama-3.1-8B: two of smaller tiles. Others: Qwen3-32B's half, 4B and 1.7B."""
    assert [gated_width(n) for n in (12288, 14336, 17408, 9728, 6144)] == [192, 112, 144, 160, 96]
    assert [fewest_gated_rows(gated_width(n) or 0) for n in (12288, 14336, 6144)] == [129, 193, 193]
    assert gated_width(12288 + 4) is None, "outputs not a multiple of 8"
    assert gated_width(132 * 64) is None, "one full wave of Triton's tiles"


@pytest.mark.parametrize("n", range(4224, 30000, 488))
def test_a_width_is_chosen_only_if_it_takes_less_time(n: int) -> None:
    width = gated_width(n)
    if width is None:
        return
    assert width % 16 == 0 and width <= MAX_GATED_WIDTH
    waves, of_triton = cdiv(cdiv(2 * n, width), MULTIPROCESSORS), cdiv(cdiv(n, 64), MULTIPROCESSORS)
    assert waves * width < of_triton * 128
    assert gated_stages(width) * ((MAX_GATED_ROWS + width) * 128 + 16) <= SHARED_BYTES and gated_stages(width) >= 4


def test_weights_are_served_where_waves_get_smaller() -> None:
    row = next(each for each in choice.GEMMS if each.target.endswith(":GatedRowsGEMM"))
    assert row.serves is not None and row.needs(WITH_COMPILER) and not row.needs(WITHOUT)
    workspace = Workspace.of_size(1, 1, torch.device("cpu"))

    def serves(n: int, k: int, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False) -> bool:
        assert row.serves is not None
        options = GEMMOptions(workspace, deterministic=deterministic)
        return row.serves(torch.empty(n, k, dtype=dtype, device="meta"), options)

    assert serves(2 * 12288, 4096) and serves(2 * 12288, 4096, torch.float16)
    assert not serves(2 * 12288, 4096, torch.float32) and not serves(2 * 12288, 4096, deterministic=True)
    assert not serves(2 * 12288, 4096 + 32) and not serves(2 * 132 * 64, 4096) and not serves(2 * 12288 + 1, 4096)


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [96, 112, 192])
def test_the_kernel_fits_hopper(width: int, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled, and the tensor core has all products of a stage at once: a wait for each is how the compiler
    serialises them."""
    pytest.importorskip("triton", reason="the module has Triton's kernel for other rows")
    from workers.ops.gemm import gated_rows_cuda

    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source, macros = gated_rows_cuda.source(width, half), gated_rows_cuda.defines(width, half)
    sass = dumped(cuda_source.compiled(source, macros, HOPPER), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert sass.count("HGMMA") == 8 and sass.count("WARPGROUP.DEPBAR") == 2 and sass.count("WARPGROUP.ARRIVE") == 1
