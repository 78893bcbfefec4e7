"""Where the CUDA kernel of gated products is chosen, and what NVRTC makes of it for Hopper. Needs no GPU."""

from pathlib import Path

import pytest
import torch

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.tiles import (
    MAX_GATED_WIDTH,
    MAX_WGMMA_ROWS,
    SHARED_BYTES,
    gated_width,
    wgmma_stages,
)
from tests.kernels.delta_rule.test_few_rows_cuda import nvrtc_here
from tests.kernels.gemm.hopper import check_machine_code, served_by


def test_tiles_fill_the_waves_of_models() -> None:
    """Qwen3-8B: one wave for two. Llama-3.1-8B: two of smaller tiles. Others: Qwen3 4B and 1.7B."""
    assert [gated_width(n) for n in (12288, 14336, 9728, 6144)] == [192, 112, 160, 96]
    assert gated_width(17408) is None, "cuBLAS is faster"
    assert gated_width(12288 + 4) is None, "outputs not a multiple of 8"
    assert gated_width(132 * 64) is None, "one full wave of tiles of 128"


@pytest.mark.parametrize("n", range(4224, 30000, 488))
def test_a_width_is_chosen_only_if_it_takes_less_time(n: int) -> None:
    width = gated_width(n)
    if width is None:
        return
    assert width % 16 == 0 and width <= MAX_GATED_WIDTH
    waves, waves_of_128 = cdiv(cdiv(2 * n, width), MULTIPROCESSORS), cdiv(cdiv(n, 64), MULTIPROCESSORS)
    assert waves * width < waves_of_128 * 128
    stages = wgmma_stages(MAX_WGMMA_ROWS, width)
    assert stages * ((MAX_WGMMA_ROWS + width) * 128 + 16) <= SHARED_BYTES and stages >= 4


def test_weights_are_served_where_waves_get_smaller() -> None:
    serves = served_by("GatedRowsGEMM")
    assert serves(2 * 12288, 4096) and serves(2 * 12288, 4096, torch.float16)
    assert not serves(2 * 12288, 4096, torch.float32) and not serves(2 * 12288, 4096, deterministic=True)
    assert not serves(2 * 12288, 4096 + 32) and not serves(2 * 132 * 64, 4096) and not serves(2 * 12288 + 1, 4096)


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [96, 112, 192])
def test_the_kernel_fits_hopper(width: int, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine_code("gated_rows_cuda", width, half, 8, tmp_path, monkeypatch)
