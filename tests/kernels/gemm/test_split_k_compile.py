"""Where the CUDA kernel that shares tiles by inputs is chosen, and what NVRTC makes of it for Hopper. Needs no GPU."""

from pathlib import Path

import pytest
import torch

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.tiles import MAX_SPLIT_WIDTH, SHARED_BYTES, split_width, wgmma_stages, workspace_size
from tests.kernels.delta_rule.test_few_rows_cuda import nvrtc_here
from tests.kernels.gemm.hopper import check_machine_code, served_by


def test_weights_of_many_inputs_are_served() -> None:
    """The down projections of Qwen3-8B, Llama-3.1-8B and Qwen3-32B; not Qwen3-8B's o_proj, qkv and vocabulary head."""
    assert [split_width(*shape) for shape in ((4096, 12288), (4096, 14336), (5120, 25600))] == [128, 128, 160]
    assert [split_width(*shape) for shape in ((4096, 4096), (6144, 4096), (151936, 8192), (2048, 8192))] == [None] * 4
    assert split_width(4096 + 4, 8192) is None and split_width(4096, 8192 + 32) is None


@pytest.mark.parametrize("n", range(3000, 8500, 104))
def test_tiles_fill_one_wave_and_shared_memory(n: int) -> None:
    width = split_width(n, 8192)
    if width is None:
        assert n < 96 * (MULTIPROCESSORS // 4) or n > MAX_SPLIT_WIDTH * (MULTIPROCESSORS // 4)
        return
    tiles = cdiv(n, width)
    assert width % 16 == 0 and 4 * tiles <= MULTIPROCESSORS < 4 * cdiv(n, width - 16)
    assert wgmma_stages(128, width) * ((128 + width) * 128 + 16) <= SHARED_BYTES and wgmma_stages(128, width) >= 4
    cells, flags = workspace_size([(n, 8192)])
    assert cells >= tiles * width * 256 and flags >= tiles * 16


def test_the_choice_needs_a_compiler_and_sixteen_bits() -> None:
    serves = served_by("SplitKGEMM")
    assert serves(4096, 12288) and serves(4096, 12288, torch.float16)
    assert not serves(4096, 12288, torch.float32) and not serves(4096, 12288, deterministic=True)
    assert not serves(4096, 4096)


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [96, 128, 256])
def test_the_kernel_fits_hopper(width: int, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine_code("split_k_cuda", width, half, 4, tmp_path, monkeypatch)
