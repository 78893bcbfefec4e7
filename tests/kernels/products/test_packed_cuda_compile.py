"""What NVRTC makes of the CUDA products with int4 weights for Hopper. Needs no GPU."""

import re
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from aerie.kernels import cuda_source
from aerie.kernels.capability import Capability
from aerie.kernels.packed.cuda.kernels_cuda import compile_products, source_of
from aerie.kernels.packed.cuda.tiles import ManyRowsTiles, WideTiles, cuda_tiles
from aerie.kernels.packed.weight import empty
from tests.kernels.delta_rule.test_few_rows_cuda import HOPPER, nvrtc_here
from tests.support.kernels.cuobjdump import dumped

pytestmark = pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "tiles",
    [WideTiles(1), ManyRowsTiles(96, 6), ManyRowsTiles(256, 3)],
    ids=str,
)
def test_weights_are_decoded_while_tensor_cores_multiply(
    tiles: WideTiles | ManyRowsTiles, gated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the compiler finds an operand written too late, it waits for each product: tiles of 128 rows took 870
    us for 758, a layer of Llama-3.1-8B at 1,024 rows."""
    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sass = dumped(cuda_source.compiled(source_of(tiles, False), tiles.defines(gated, False, False), HOPPER), tmp_path)
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", sass)
    assert (waits.count("1"), waits.count("0")) == (8, 1), "of 8 products of 16 inputs in a stage"


def test_kernels_for_every_number_of_rows_are_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step would compile is compiled already, in threads, once."""
    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    futures: dict[str, Future[bytes]] = {}
    monkeypatch.setattr(cuda_source, "_futures", futures)
    monkeypatch.setattr(Capability, "of", lambda device: Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"})))
    weight = empty(256, 1024, 128, "int4", torch.device("cpu"), torch.bfloat16, False, False)
    compile_products(weight)
    codes = [future.result() for future in futures.values()]
    assert codes and all(code.startswith(b"\x7fELF") for code in codes)
    for rows in (1, 16, 17, 100, 300, 2000, 4096):
        tiles = cuda_tiles(rows, 256, 1024, False)
        if tiles is not None:
            cuda_source.compiled(source_of(tiles, False), tiles.defines(False, False, False), HOPPER)
    assert len(futures) == len(codes)
