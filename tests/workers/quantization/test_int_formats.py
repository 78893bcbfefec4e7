"""Layers of 4- and 8-bit integers hold what the formats mean, whatever share of a matrix a rank has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.layers.weighted import WrongTensorError
from aerie.workers.quantization.integers.packing import input_order
from aerie.workers.quantization.packed_linear import PackedLinear
from aerie.workers.quantization.table import read_quant_method
from tests.support.int_checkpoints import Quantised, Recipe, awq, gptq, int_quantized, pack_quantized


def method_of(recipe: Recipe, shape: LinearShape) -> PackedLinear:
    quant = read_quant_method({"quantization_config": recipe.config}, "model x")
    method = quant.linear_method(["model.layers.0.mlp.down_proj"] * len(shape.parts), shape)
    assert isinstance(method, PackedLinear)
    return method


def load(method: PackedLinear, matrices: list[Quantised], recipe: Recipe) -> None:
    for part, matrix in zip(method.shape.parts, matrices, strict=True):
        for kind, tensor in recipe.pack(matrix).items():
            method.load(kind, part, tensor)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import compressed-tensors before Hypothesis draws: its imports use `random`, which Hypothesis refuses."""
    int_quantized()


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    layout = draw(st.sampled_from(["awq", "gptq", "pack-quantized", "int-quantized"]))
    if layout == "int-quantized":
        return int_quantized()
    group, symmetric = draw(st.sampled_from([32, 64, 16])), draw(st.booleans())
    if layout == "awq":
        return awq(group, symmetric)
    bits, whole, ordered = draw(st.sampled_from([4, 8])), draw(st.booleans()), draw(st.booleans())
    if layout == "gptq":
        return gptq(bits, None if whole else group, symmetric, ordered and not whole, draw(st.booleans()))
    scale_dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    return pack_quantized(bits, None if whole else group, symmetric, ordered and not whole, scale_dtype)


@st.composite
def shares(draw: st.DrawFn, total: int, step: int) -> Span:
    first = draw(st.integers(0, total // step - 1))
    return Span(first * step, draw(st.integers(first + 1, total // step)) * step, total)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), recipe=recipes(), n=st.sampled_from([8, 24, 72]), k=st.sampled_from([64, 192]))
def test_a_share_is_that_of_the_dense_matrix(data: st.DataObject, recipe: Recipe, n: int, k: int) -> None:
    """To the bit, dequantised at once or from the packed form; the packed product is exact up to float32 sums."""
    rows, columns = data.draw(shares(n, 1)), data.draw(shares(k, 4))
    num_parts = data.draw(st.integers(1, 2))
    weights = [torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) for seed in range(num_parts)]
    # with one seed, fused matrices have one order of inputs, as GPTQ gives them; else each has its own
    seeds = data.draw(st.sampled_from([(3, 3), (3, 4)]))
    matrices = [recipe.quantised(weight, seed) for weight, seed in zip(weights, seeds, strict=False)]
    expected = torch.cat(
        [each.dense[rows.first : rows.end, columns.first : columns.end] for each in matrices],
    )
    shape = LinearShape.stacked([(f"part{i}", rows) for i in range(num_parts)], columns)
    x = torch.randn(3, columns.size, generator=torch.Generator().manual_seed(9))
    bias = torch.randn(shape.out_features)
    for packed in (False, True):
        method = method_of(recipe, shape)
        load(method, matrices, recipe)
        method.finish(GEMMOptions(packed=packed))
        assert torch.equal(method.dense_weight(), expected)
        y = method.multiply(x, bias, torch.empty(3, shape.out_features))
        torch.testing.assert_close(y, x @ expected.T + bias, rtol=1e-4, atol=1e-4)
        if num_parts == 2:
            gate, up = (x @ expected.T).chunk(2, 1)
            gated = method.multiply_gated(x)
            torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_each_block_has_one_group_and_each_input_one_place(groups: list[int]) -> None:
    given_groups = torch.tensor(groups)
    order = input_order(given_groups)
    places = order.group_of_block.repeat_interleave(order.block)
    if order.gather is None:
        assert torch.equal(places, given_groups)
        return
    is_padding = torch.zeros(len(order.gather), dtype=torch.bool) if order.is_padding is None else order.is_padding
    real = order.gather[~is_padding]
    assert torch.equal(real.sort().values, torch.arange(len(groups)))
    assert torch.equal(given_groups[real], places[~is_padding])
    assert order.block % 32 == 0 and is_padding.sum() < 32 * len(set(groups))


def test_products_refuse_what_their_kernels_refuse() -> None:
    recipe, shape = gptq(), LinearShape.stacked([("", Span.whole(16))], Span.whole(64))
    method = method_of(recipe, shape)
    load(method, [recipe.quantised(torch.randn(16, 64), 0)], recipe)
    method.finish(GEMMOptions(packed=True))
    x = torch.ones(3, 64)
    assert method.multiply(x, torch.zeros(16), torch.empty(3, 16)).shape == (3, 16)
    unaligned = torch.zeros(3 * 64 + 4)[1:-3].view(3, 64)
    for wrong in (torch.ones(3, 128)[:, ::2], torch.ones(3, 32), x.half(), unaligned):
        for multiply in (lambda x: method.multiply(x, None), method.multiply_gated):
            with pytest.raises(AssertionError):
                multiply(wrong)
    for bias, out in ((torch.zeros(17), None), (None, torch.empty(3, 16).half()), (None, torch.empty(4, 16))):
        with pytest.raises(AssertionError):
            method.multiply(x, bias, out)


def test_a_head_has_rows_of_zeros_after_its_vocabulary() -> None:
    recipe = gptq().with_config(lm_head=True)
    matrix = recipe.quantised(torch.randn(21, 64), 0)
    quant = read_quant_method({"quantization_config": recipe.config}, "model x")
    for rows, padding in ((Span(11, 21, 21), 1), (Span(21, 21, 21), 11)):
        shape = LinearShape.stacked([("", rows)], Span.whole(64), padding)
        method = quant.linear_method(["lm_head"], shape)
        assert isinstance(method, PackedLinear)
        load(method, [matrix], recipe)
        method.finish(GEMMOptions(packed=True))
        dense = method.dense_weight()
        assert torch.equal(dense[: rows.size], matrix.dense[rows.first :]) and not dense[rows.size :].any()


def test_scales_keep_the_type_of_the_checkpoint() -> None:
    """A model in bfloat16 with scales in float16, which bfloat16 would round."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        recipe = awq()
        matrix = recipe.quantised(torch.randn(16, 64, dtype=torch.float32), 0)
        method = method_of(recipe, LinearShape.stacked([("", Span.whole(16))], Span.whole(64)))
        load(method, [matrix], recipe)
        method.finish(GEMMOptions(packed=True))
        assert method.dtype == torch.bfloat16
        assert torch.equal(method.dense_weight(), matrix.dense.to(torch.bfloat16))
        (only,) = method._packed
        assert only.part.weight.scales.dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


def wrong(kind: str, tensor: Tensor, recipe: Recipe) -> str:
    method = method_of(recipe, LinearShape.stacked([("", Span.whole(16))], Span.whole(64)))
    with pytest.raises(WrongTensorError) as caught:
        method.load(kind, method.shape.parts[0], tensor)
    return str(caught.value)


def test_tensors_that_do_not_fit_are_refused() -> None:
    assert "has shape (64, 3), config.json implies (64, 2)" in wrong("qweight", torch.zeros(64, 3).int(), awq())
    assert "is torch.float32, not torch.int32" in wrong("qweight", torch.zeros(64, 2), awq())
    assert "is torch.int32, which" in wrong("scales", torch.zeros(2, 16).int(), awq())
    backwards = torch.arange(64).int().flip(0) // 32
    assert "out of order, which quantization_config's desc_act=false denies" in wrong("g_idx", backwards, gptq())
    assert "beyond 0 to 1" in wrong("g_idx", torch.arange(64).int() // 16, gptq(desc_act=True))
    shape = torch.tensor([16, 32])
    assert "is [16, 32], config.json implies [16, 64]" in wrong("weight_shape", shape, pack_quantized())
