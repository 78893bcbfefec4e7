"""Where the CUDA kernel that shares tiles by inputs is chosen, and what NVRTC makes of it for Hopper. Needs no GPU."""

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
from workers.ops.gemm.tiles import SHARED_BYTES, split_stages, split_width, workspace_size
from workers.ops.gemm.workspace import GEMMOptions, Workspace

WITH_COMPILER = Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"}))
WITHOUT = Capability("cuda", HOPPER, frozenset({"triton"}))


def test_weights_of_many_inputs_are_served() -> None:
    """The down projections of Qwen3-8B, Llama-3.1-8B and Qwen3-32B; not Qwen3-8B's o_proj, qkv and vocabulary head."""
    assert [split_width(*shape) for shape in ((4096, 12288), (4096, 14336), (5120, 25600))] == [128, 128, 160]
    assert [split_width(*shape) for shape in ((4096, 4096), (6144, 4096), (151936, 8192), (2048, 8192))] == [None] * 4
    assert split_width(4096 + 4, 8192) is None and split_width(4096, 8192 + 32) is None


@pytest.mark.parametrize("n", range(3000, 8500, 104))
def test_tiles_fill_one_wave_and_shared_memory(n: int) -> None:
    width = split_width(n, 8192)
    if width is None:
        assert n < 96 * (MULTIPROCESSORS // 4) or n > 256 * (MULTIPROCESSORS // 4)
        return
    tiles = cdiv(n, width)
    assert width % 16 == 0 and 4 * tiles <= MULTIPROCESSORS < 4 * cdiv(n, width - 16)
    assert split_stages(width) * ((128 + width) * 128 + 16) <= SHARED_BYTES and split_stages(width) >= 4
    cells, flags = workspace_size([(n, 8192)])
    assert cells >= tiles * width * 256 and flags >= tiles * 16


def test_the_choice_needs_a_compiler_and_sixteen_bits() -> None:
    row = next(each for each in choice.GEMMS if each.target.endswith(":SplitRowsGEMM"))
    assert row.serves is not None and row.needs(WITH_COMPILER) and not row.needs(WITHOUT)
    workspace = Workspace.of_size(1, 1, torch.device("cpu"))

    def serves(n: int, k: int, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False) -> bool:
        assert row.serves is not None
        options = GEMMOptions(workspace, deterministic=deterministic)
        return row.serves(torch.empty(n, k, dtype=dtype, device="meta"), options)

    assert serves(4096, 12288) and serves(4096, 12288, torch.float16)
    assert not serves(4096, 12288, torch.float32) and not serves(4096, 12288, deterministic=True)
    assert not serves(4096, 4096)


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [96, 128, 256])
def test_the_kernel_fits_hopper(width: int, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled, and the tensor core has all products of a stage at once."""
    pytest.importorskip("triton", reason="the module has Triton's kernel for other rows")
    from workers.ops.gemm import split_rows_cuda

    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source, macros = split_rows_cuda.source(width, half), split_rows_cuda.defines(width, half)
    sass = dumped(cuda_source.compiled(source, macros, HOPPER), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert sass.count("HGMMA") == 4 and sass.count("WARPGROUP.DEPBAR") == 2 and sass.count("WARPGROUP.ARRIVE") == 1
