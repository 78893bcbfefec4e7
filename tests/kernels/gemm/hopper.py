"""What tests of CUDA kernels for Hopper need: a mark, and the checks of both kernels of `wgmma_cuda`."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from aerie.kernels import cuda_source
from aerie.kernels.capability import Capability
from aerie.kernels.gemm import choice
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from tests.kernels.delta_rule.test_few_rows_cuda import HOPPER, nvrtc_here
from tests.support.kernels.cuobjdump import dumped

WITH_COMPILER = Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"}))
WITHOUT = Capability("cuda", HOPPER, frozenset({"triton"}))
HERE = Capability.of(torch.device("cuda")) if torch.cuda.is_available() else Capability("cpu")
HOPPER_HERE = [pytest.mark.gpu, pytest.mark.skipif(not HERE.compiles_cuda, reason="needs a Hopper GPU and NVRTC")]


def served_by(gemm: str) -> Callable[..., bool]:
    """Return whether this row of the table serves a weight [n, k]. The row needs a compiler."""
    row = next(each for each in choice.choose_gemm.implementations if each.target.endswith(f":{gemm}.of"))
    serves = row.serves
    assert serves is not None and row.needs(WITH_COMPILER) and not row.needs(WITHOUT)
    workspace = Workspace.allocate(1, 1, torch.device("cpu"))

    def serves_weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False) -> bool:
        options = GEMMOptions(workspace, deterministic=deterministic)
        return serves(torch.empty(n, k, dtype=dtype, device="meta"), options)

    return serves_weight


def check_machine_code(
    module: str, width: int, half: bool, products: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that nothing is spilled, and that the tensor core has all `products` of a stage at once: a wait for each
    is how the compiler serialises them."""
    pytest.importorskip("triton", reason="the module has Triton's kernel for other rows")
    kernel = import_module(f"aerie.kernels.gemm.{module}").KERNEL
    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    sass = dumped(cuda_source.compiled(kernel.source(width, half), kernel.defines(width, half), HOPPER), folder)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert sass.count("HGMMA") == products
    assert sass.count("WARPGROUP.DEPBAR") == 2 and sass.count("WARPGROUP.ARRIVE") == 1
