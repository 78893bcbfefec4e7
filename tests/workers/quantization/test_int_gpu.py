"""Layers of 4- and 8-bit integers on a GPU: packed there, multiplied as what they mean."""

import pytest
import torch

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearMethod, LinearShape
from aerie.workers.quantization.packed_linear import PackedLinear
from aerie.workers.quantization.table import read_quant_method
from tests.support.int_checkpoints import Recipe, awq, gptq, pack_quantized

pytestmark = pytest.mark.gpu
K, N = 2048, 1024
RECIPES: dict[str, Recipe] = {
    "awq": awq(128),
    "gptq desc_act": gptq(group=128, desc_act=True),
    "gptq 8 bits": gptq(bits=8, group=128),
    "pack-quantized channel": pack_quantized(group=None),
    "pack-quantized g_idx": pack_quantized(symmetric=False, ordered=True, group=64),
}


@pytest.fixture(autouse=True)
def in_bfloat16() -> object:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def on_gpu(recipe: Recipe, shape: LinearShape) -> tuple[LinearMethod, torch.Tensor]:
    """A finished layer, and its weight in float64."""
    quant = read_quant_method({"quantization_config": recipe.config}, "model x")
    method = quant.linear_method(["model.layers.0.mlp.up_proj"] * len(shape.parts), shape)
    assert isinstance(method, PackedLinear)
    method.to("cuda")
    dense = []
    for seed, part in enumerate(shape.parts):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(part.rows.total, part.columns.total, generator=generator, dtype=torch.float32)
        matrix = recipe.quantised(weight, 5)
        for kind, tensor in recipe.pack(matrix).items():
            method.load(kind, part, tensor)
        dense.append(part.cut(matrix.dense))
    cells, tickets = method.workspace_size()
    device = torch.device("cuda")
    sizes = [(shape.out_features, shape.in_features)]
    method.finish(GEMMOptions.of(sizes, [(cells, tickets)], torch.bfloat16, device, deterministic=False))
    return method, torch.cat(dense).double().cuda()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("columns", [Span.whole(K), Span(K // 2, K // 2 + K // 4, K)], ids=["whole", "a quarter"])
def test_products_are_those_of_the_dequantised_weight(name: str, columns: Span) -> None:
    """bfloat16 rounds inputs of none, and the result once: 2 ** -8; sums are float32."""
    spans = [("gate_proj", Span(0, N // 2, N)), ("up_proj", Span(0, N // 2, N))]
    method, dense = on_gpu(RECIPES[name], LinearShape.stacked(spans, columns))
    for rows in (1, 7, 16, 64, 200):
        x = torch.randn(rows, columns.size, device="cuda")
        expected = x.double() @ dense.T
        found = method.multiply(x, None)
        assert isinstance(found, torch.Tensor)
        # packed products may round a dequantised weight to bfloat16
        assert (found.double() - expected).norm() <= 2**-7 * expected.norm()
        gate, up = expected.chunk(2, 1)
        gated = method.multiply_gated(x)
        assert isinstance(gated, torch.Tensor)
        wanted = torch.nn.functional.silu(gate) * up
        assert (gated.double() - wanted).norm() <= 2**-5 * wanted.norm()
