"""The CUDA kernel of deterministic products of many rows: what NVRTC makes of it for Hopper, where it is chosen, and on
a Hopper GPU the same bits as Triton's kernels for few rows."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels import cuda_source  # noqa: E402
from aerie.kernels.gemm.choice import choose_gemm  # noqa: E402
from aerie.kernels.gemm.ordered_cuda import OrderedCudaGEMM, defines, ordered_cuda, source  # noqa: E402
from aerie.kernels.gemm.ordered_triton import OrderedGEMM, many_ordered_rows, ordered_rows  # noqa: E402
from aerie.kernels.gemm.tiles import (  # noqa: E402
    CUDA_ROWS,
    SHARED_BYTES,
    _ordered_choices,
    ordered_cuda_rows,
    ordered_workspace_size,
    sum_order,
)
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from tests.kernels.delta_rule.test_few_rows_cuda import HOPPER, nvrtc_here  # noqa: E402
from tests.kernels.gemm.hopper import HOPPER_HERE, served_by  # noqa: E402
from tests.support.kernels.cuobjdump import dumped  # noqa: E402

DEVICE = torch.device("cuda")
# [outputs, inputs] in Llama-3.1-8B, Llama-3.1-70B, Qwen3-8B and gpt-oss-20b; the last two do not fill their tiles
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1280, 8192), (4096, 12288), (5120, 2880)]
SHAPES += [(2880, 4096), (200, 384), (8464, 192)]


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", CUDA_ROWS)
def test_the_kernel_fits_hopper(rows: int, gated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No spills, and the tensor core has all products of a stage at once."""
    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sass = dumped(cuda_source.compiled(source(rows, rows == 192), defines(rows, gated, rows == 192), HOPPER), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert sass.count("HGMMA") == 4 and sass.count("WARPGROUP.ARRIVE") == 1


def test_stages_fit_shared_memory() -> None:
    for rows in CUDA_ROWS:
        macros = dict(defines(rows, False, False))
        assert macros["SHARED_BYTES"] <= SHARED_BYTES and macros["STAGES"] >= 4


def test_it_is_chosen_for_prompts() -> None:
    serves = served_by("OrderedCudaGEMM")
    assert serves(4096, 4096, deterministic=True) and not serves(4096, 4096)
    assert not serves(4096, 4096, torch.float32, deterministic=True)
    assert [ordered_cuda_rows(rows, 28672, 4096) for rows in (1, 64, 128, 512)] == [None] * 4
    assert ordered_cuda_rows(8192, 28672, 4096) == ordered_cuda_rows(8192, 4096, 14336) == 256


def order_options(n: int, k: int) -> GEMMOptions:
    space = Workspace.allocate(*ordered_workspace_size([(n, k)]), DEVICE)
    space.part.fill_(float("nan"))
    return GEMMOptions(space, deterministic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n,k", SHAPES)
class TestOnHopper:
    pytestmark = HOPPER_HERE

    def test_every_tile_gives_the_same_bits(self, n: int, k: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(DEVICE).manual_seed(n)
        weight = (torch.randn(n, k, generator=generator, device=DEVICE) / k**0.5).to(dtype)
        x = torch.randn(2048, 2 * k, generator=generator, device=DEVICE).to(dtype)[:, :k]
        bias = torch.randn(n, generator=generator, device=DEVICE).to(dtype)
        space = order_options(n, k).workspace
        assert space is not None
        expected = torch.cat([ordered_rows(x[first : first + 8], weight, bias, space) for first in range(0, 256, 8)])
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 64, 65, 127):
            assert torch.equal(ordered_rows(x[:rows], weight, bias, space), expected[:rows]), ("few", rows)
        for rows in (129, 250):
            for _, tiles in _ordered_choices(rows, n, k):
                found = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
                many_ordered_rows(x[:rows], weight, bias, space, tiles, found)
                assert torch.equal(found, expected[:rows]), (tiles, rows)
        for tile_rows in CUDA_ROWS:
            for rows in (1, 129, 250, 2048):
                memory = torch.full((rows + 1, n), 7.0, dtype=dtype, device=DEVICE)
                ordered_cuda(x[:rows], weight, bias, space, tile_rows, memory[:rows], gated=False)
                count = min(rows, 256)
                assert torch.equal(memory[:count], expected[:count]), (tile_rows, rows)
                assert bool((memory[rows] == 7.0).all()), "written past the last row"
        assert not bool(space.tickets.any())

    def test_gated_rows_have_the_same_bits(self, n: int, k: int, dtype: torch.dtype) -> None:
        weight = (torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype)
        options = order_options(n, k)
        gemm = choose_gemm(weight, options)
        assert isinstance(gemm, OrderedCudaGEMM) and options.workspace is not None
        plain = OrderedGEMM(weight, options.workspace)
        x = torch.randn(2048, k, device=DEVICE).to(dtype)
        expected = torch.cat([plain.multiply_gated(x[first : first + 16]) for first in range(0, 256, 16)])
        for rows in (1, 8, 31, 65, 127, 129, 256, 512, 2048):
            found, count = gemm.multiply_gated(x[:rows]), min(rows, 256)
            assert torch.equal(found[:count], expected[:count]), rows
        for tile_rows in CUDA_ROWS if n % 2 == 0 else ():
            out = torch.empty((256, n // 2), dtype=dtype, device=DEVICE)
            ordered_cuda(x[:256], weight, None, options.workspace, tile_rows, out, gated=True)
            assert torch.equal(out, expected), tile_rows

    def test_one_slice_of_memory_serves_all_launches(self, n: int, k: int, dtype: torch.dtype) -> None:
        """A graph of launches, each begun before the one before has ended, gives the bits of launches on their own."""
        weight = (torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype)
        space, x = order_options(n, k).workspace, torch.randn(300, k, device=DEVICE).to(dtype)
        assert space is not None and sum_order(n, k).splits >= 1
        outs = [torch.empty((300, n), dtype=dtype, device=DEVICE) for _ in range(6)]
        ordered_cuda(x, weight, None, space, 192, outs[0], gated=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for out in outs[1:]:
                ordered_cuda(x, weight, None, space, 192, out, gated=False)
        for _ in range(5):
            graph.replay()
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
