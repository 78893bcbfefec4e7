"""Where the kernel of a gated MLP is chosen, and what NVRTC makes of it for Hopper. Needs no GPU."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aerie.kernels import cuda_source
from aerie.kernels.capability import Capability
from aerie.kernels.gemm.tiles import SHARED_BYTES
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.packed import product
from aerie.kernels.packed.cuda.gated_mlp_tiles import MAX_ROWS, gated_mlp_tiles, gated_mlp_words
from aerie.kernels.packed.product import PackedProduct, gated_mlp
from aerie.kernels.packed.weight import empty
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.quantization.packed_linear import PackedLinear
from aerie.workers.quantization.table import read_quant_method
from tests.kernels.delta_rule.test_few_rows_cuda import HOPPER, nvrtc_here
from tests.support.kernels.cuobjdump import dumped

BLOCKS = 132
CPU = torch.device("cpu")
WITH_COMPILER = Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"}))
WITHOUT = Capability("cuda", HOPPER, frozenset({"triton"}))


@pytest.mark.parametrize("blocks", [114, 132])
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_llama_fits_the_shared_memory_of_hopper(blocks: int, rows: int) -> None:
    tiles = gated_mlp_tiles(4096, 14336, rows, blocks)
    assert tiles is not None and tiles.shared_bytes <= SHARED_BYTES and tiles.rows >= rows
    assert tiles.columns * tiles.ranges <= blocks and tiles.words <= gated_mlp_words(4096, 14336)


@pytest.mark.parametrize(
    "size,width,rows", [(4096, 14336, MAX_ROWS + 1), (4096, 1408, 1), (8192, 3584, 1), (1024, 512, 1)]
)
def test_other_shapes_have_no_tiles(size: int, width: int, rows: int) -> None:
    """More rows, a width that is no multiple of 256, rows that the warps do not share, and too few warps."""
    assert gated_mlp_tiles(size, width, rows, BLOCKS) is None


def products(group: int = 128, zeros: bool = False) -> tuple[PackedProduct, PackedProduct]:
    return (
        PackedProduct(empty(1024, 2048, group, "int4", CPU, torch.bfloat16, zeros, False)),
        PackedProduct(empty(2048, 512, group, "int4", CPU, torch.bfloat16, zeros, False)),
    )


def test_the_table_has_cuda_where_it_compiles_and_serves_what_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "num_multiprocessors", lambda device: BLOCKS)
    assert [[each.name for each in gated_mlp.serving(here)] for here in (WITH_COMPILER, WITHOUT)] == [["cuda"], []]
    (row,) = gated_mlp.implementations
    assert row.serves is not None
    tiles = gated_mlp_tiles(2048, 512, 1, BLOCKS)
    assert tiles is not None
    x, options = torch.zeros(1, 2048, dtype=torch.bfloat16), GEMMOptions(Workspace.allocate(1, tiles.words, CPU))
    assert row.serves(x, *products(), options)
    assert not row.serves(x, *products(), GEMMOptions(Workspace.allocate(1, tiles.words - 1, CPU)))
    assert not row.serves(x, *products(), replace(options, deterministic=True))
    assert not row.serves(x.half(), *products(), options)
    assert not row.serves(x, *products(256), options) and not row.serves(x, *products(zeros=True), options)
    large = GEMMOptions(Workspace.allocate(1, gated_mlp_words(2048, 512), CPU))
    assert row.serves(x.expand(MAX_ROWS, -1), *products(), large)
    assert not row.serves(x.expand(MAX_ROWS + 1, -1), *products(), large)


def layer(parts: int, inputs: int, outputs: int) -> PackedLinear:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }
    quant = read_quant_method({"quantization_config": config}, "model x")
    names = ("gate_proj", "up_proj") if parts == 2 else ("",)
    shape = LinearShape.stacked([(name, Span.whole(outputs)) for name in names], Span.whole(inputs))
    made = quant.linear_method(["model.layers.0.mlp.up_proj"] * parts, shape)
    assert isinstance(made, PackedLinear)
    made.fill_dummy(torch.Generator().manual_seed(parts))
    made.finish(GEMMOptions(packed=True))
    return made


def test_a_layer_with_few_bits_calls_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = layer(2, 256, 128), layer(1, 128, 256)
    assert gate_up.workspace_size()[1] >= gated_mlp_words(256, 128)
    x, out, calls = torch.randn(2, 256), torch.empty(2, 256), []
    two = down.multiply(gate_up.multiply_gated(x), None)

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return gated_mlp(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("aerie.workers.quantization.packed_linear.gated_mlp", counted)
    assert gate_up.multiply_mlp(x, down, out) is out and torch.equal(out, two) and len(calls) == 1


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_the_kernel_fits_hopper(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled. Before the wait codes and scales are copied to shared memory; nothing else is read, nothing
    written."""
    pytest.importorskip("triton", reason="triton's package has the disassembler")
    from aerie.kernels.packed.cuda import gated_mlp_cuda

    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiles = gated_mlp_tiles(4096, 14336, rows, BLOCKS)
    assert tiles is not None
    sass = dumped(cuda_source.compiled(gated_mlp_cuda.gated_mlp_source(), tiles.defines(), HOPPER), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    before, _, after = sass.partition("ACQBULK")
    assert after and not re.search(r"\bSTG\b|\bRED|\bATOM|\bLDG\b", before) and "LDGSTS" in before
