"""Layers whose weights stay in FP8, and what makes rows for them: to the bit what separate launches would give. On a
GPU, or interpreted."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.attention.backends.triton_backend import TritonBackend  # noqa: E402
from aerie.attention.kv_cache.layout import LatentLayout  # noqa: E402
from aerie.kernels.fp8.gemm_triton import fp8_gemm  # noqa: E402
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows, dequantized_rows
from aerie.kernels.fp8.rows_triton import fp8_rms_norm, quantize_rows  # noqa: E402
from aerie.kernels.fp8.tiles import (  # noqa: E402
    MAX_ROWS,
    Fp8Matrix,
    fp8_gated_tiles,
    fp8_gemm_tiles,
    fp8_workspace_size,
    rounding_columns,
)
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.kv.batches import LatentKV, Mode  # noqa: E402
from aerie.kernels.latent.latents_triton import normed_latents  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from aerie.kernels.norm.norm_triton import add_rms_norm, rms_norm  # noqa: E402
from aerie.kernels.rope.rope_store import Angles  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from aerie.workers.distributed.tp_group import SOLO  # noqa: E402
from aerie.workers.layers.forward_context import make_context  # noqa: E402
from aerie.workers.layers.latent_attention import LatentAttention  # noqa: E402
from aerie.workers.layers.linear import LinearBase  # noqa: E402
from aerie.workers.layers.linear_method import LinearShape, UnquantizedLinearMethod  # noqa: E402
from aerie.workers.layers.moe import GatedMLP  # noqa: E402
from aerie.workers.layers.norm import RMSNorm  # noqa: E402
from aerie.workers.quantization.floats import CHANNEL, FloatQuant, block_scheme  # noqa: E402
from aerie.workers.quantization.fp8_linear import Fp8Linear  # noqa: E402
from aerie.workers.quantization.quant_method import QuantMethod  # noqa: E402
from tests.support.kernels.attention_cases import uniform_pool  # noqa: E402
from tests.support.kernels.triton_cases import random_decode  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS, kernels_of_operations  # noqa: E402

pytestmark = MARKS
TYPE = torch.float32 if INTERPRETED else torch.bfloat16
METHODS: dict[str, QuantMethod] = {"block": FloatQuant(block_scheme((128, 128))), "channel": FloatQuant(CHANNEL)}


@pytest.fixture(autouse=True)
def model_type() -> object:
    torch.set_default_dtype(TYPE)
    yield
    torch.set_default_dtype(torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(DEVICE, TYPE)


def same(one: Fp8Rows, other: Fp8Rows) -> bool:
    return torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8)) and torch.equal(
        one.scales, other.scales
    )


def close(one: Tensor, other: Tensor) -> None:
    """The last bit of a gate may differ (torch's silu on a CPU), and with it which number of eight bits is nearest."""
    assert one.shape == other.shape and (one - other).norm() <= 2e-3 * other.norm()


def workspace_of(*shapes: tuple[int, int]) -> Workspace:
    return Workspace.allocate(*fp8_workspace_size(shapes), DEVICE)


def matrix(n: int, k: int, seed: int = 0) -> Fp8Matrix:
    values = random(n, k, seed=seed).mul(30).to(torch.float8_e4m3fn)
    return Fp8Matrix(values, random(-(-n // 64), k // 128, seed=seed + 1).float().abs() * 1e-2)


@pytest.mark.parametrize("by_group", [True, False], ids=["group", "row"])
@pytest.mark.parametrize("residual", [True, False], ids=["add", "alone"])
def test_a_norm_gives_the_rows_that_rounding_after_it_gives(residual: bool, by_group: bool) -> None:
    size, weight = 384, random(384, seed=1)
    for rows, wanted in ((3, Fp8Inputs(by_group, MAX_ROWS)), (5, Fp8Inputs(by_group, 4, plain=True))):
        x, stream = random(rows, size, seed=2), random(rows, size, seed=3)
        theirs = stream.clone()
        normed = add_rms_norm(x.clone(), theirs, weight, 1e-5) if residual else rms_norm(x, weight, 1e-5)
        out = fp8_rms_norm(x, stream if residual else None, weight, 1e-5, wanted.empty(x))
        assert same(out, quantize_rows(normed, by_group, rows_together=rows > wanted.many))
        assert torch.equal(stream, theirs) and (out.plain is None) == (not wanted.plain)
        assert out.plain is None or torch.equal(out.plain, normed)
        assert not by_group or out.scales.is_contiguous() == (rows <= wanted.many)


@pytest.mark.parametrize("by_group", [True, False], ids=["group", "row"])
def test_a_latent_of_q_comes_as_its_product_reads_it(by_group: bool) -> None:
    rows, q_size, latent, rotated = 3, 256, 32, 8
    both = random(rows, q_size + latent + rotated)
    positions = torch.arange(rows, device=DEVICE)
    table = torch.rand(8, rotated // 2, device=DEVICE, dtype=torch.float32)

    def result(wanted: Fp8Inputs | None) -> tuple[Tensor | Fp8Rows, Tensor]:
        kv = LatentKV(torch.zeros(2, 4, latent + rotated, device=DEVICE), latent)
        weights = random(q_size, seed=1), random(latent, seed=2)
        angles = Angles(table, table, positions)
        return normed_latents(both, *weights, 1e-6, angles, kv, positions + 1, wanted=wanted), kv.rows

    (plain, kept), (out, kept_too) = result(None), result(Fp8Inputs(by_group, MAX_ROWS))
    assert isinstance(plain, Tensor) and isinstance(out, Fp8Rows) and torch.equal(kept, kept_too)
    assert same(out, quantize_rows(plain, by_group))


@pytest.mark.parametrize("wanted", [None, Fp8Inputs(True, MAX_ROWS)], ids=["plain", "fp8"])
def test_norms_of_latents_add_up_parts_in_their_order(wanted: Fp8Inputs | None) -> None:
    rows, q_size, latent, rotated = 3, 256, 32, 8
    parts = torch.randn(5, rows, q_size + latent + rotated, device=DEVICE, dtype=torch.float32)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    positions = torch.arange(rows, device=DEVICE)
    table, weights = torch.rand(8, rotated // 2, device=DEVICE, dtype=torch.float32), (random(q_size), random(latent))
    results = []
    for both in (parts, total.to(TYPE)):
        kv = LatentKV(torch.zeros(2, 4, latent + rotated, device=DEVICE, dtype=TYPE), latent)
        angles = Angles(table, table, positions)
        results.append((normed_latents(both, *weights, 1e-6, angles, kv, positions + 1, wanted=wanted), kv.rows))
    (mine, kept), (theirs, kept_too) = results
    assert torch.equal(kept, kept_too)
    if isinstance(mine, Fp8Rows):
        assert isinstance(theirs, Fp8Rows) and same(mine, theirs)
    else:
        assert isinstance(theirs, Tensor) and torch.equal(mine, theirs)


def test_programs_that_round_their_columns_change_no_bit() -> None:
    for n, k in [(70, 256), (96, 1152)] if INTERPRETED else [(4096, 4096), (7168, 2048), (2112, 7168)]:
        weight, workspace, x = matrix(n, k), workspace_of((n, k)), random(1, k)
        tiles = fp8_gemm_tiles(1, n, k)
        assert tiles is not None
        assert rounding_columns(weight, tiles) >= 128
        outs = [torch.full((1, n), float("nan"), dtype=TYPE, device=DEVICE) for _ in range(2)]
        fp8_gemm(quantize_rows(x, True), weight, None, workspace, tiles, outs[0])
        fp8_gemm(x, weight, None, workspace, tiles, outs[1])
        assert torch.equal(*outs) and not workspace.tickets.any()


def test_long_rows_and_scales_of_rows_are_rounded_before() -> None:
    weight = matrix(128, 32768)
    tiles = fp8_gemm_tiles(1, 128, 32768)
    assert tiles is not None and rounding_columns(weight, tiles) > 0
    assert rounding_columns(weight, dataclasses.replace(tiles, splits=1)) == 0
    assert rounding_columns(Fp8Matrix(weight.values, random(128, 1).float()), tiles) == 0


@pytest.mark.parametrize("rows", [2] if INTERPRETED else [2, 33, 64])
def test_a_gated_product_gives_the_next_one_its_rows(rows: int) -> None:
    """The tiles differ, what is added in which order does not."""
    n, k = (25600, 128) if INTERPRETED else (28672, 4096)
    weight, workspace, x = matrix(n, k), workspace_of((n, k)), quantize_rows(random(rows, k) / 8, True)
    tiles, plain_tiles = fp8_gated_tiles(rows, n, k, for_fp8=True), fp8_gated_tiles(rows, n, k)
    assert tiles is not None and plain_tiles is not None and tiles.block_n == 128
    plain, out = torch.empty(rows, n // 2, device=DEVICE), Fp8Rows.empty(rows, n // 2, True, False, DEVICE)
    fp8_gemm(x, weight, None, workspace, dataclasses.replace(plain_tiles, ahead=tiles.ahead), plain, gated=True)
    fp8_gemm(x, weight, None, workspace, tiles, out, gated=True, result=TYPE)
    assert same(out, quantize_rows(plain, True))
    assert fp8_gated_tiles(1, 16384, k, for_fp8=True) is None and fp8_gated_tiles(1, 57344, k, for_fp8=True) is None


def kept(quant: QuantMethod, shape: LinearShape, deterministic: bool = False, seed: int = 0) -> Fp8Linear:
    """A layer's method, filled and finished as on a GPU that multiplies FP8."""
    method = quant.linear_method(["x"] * len(shape.parts), shape)
    assert isinstance(method, Fp8Linear)
    method.to(DEVICE)
    method.fill_dummy(torch.Generator(DEVICE).manual_seed(seed))
    for scale in method.scales:
        scale.data.mul_(torch.rand_like(scale.data) + 0.5)
    size = (shape.out_features, shape.in_features)
    method.finish(GEMMOptions(workspace_of(size), deterministic, fp8=True))
    return method


def meant(method: Fp8Linear, x: Tensor, by_group: bool) -> Tensor:
    rounded = dequantized_rows(quantize_rows(x, by_group))
    dense = method.dense_weight().double()
    return rounded.double() @ dense.T


SHAPE = LinearShape.stacked([("gate_proj", Span(0, 128, 256)), ("up_proj", Span(0, 128, 256))], Span.whole(256))


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("quant", METHODS)
def test_a_kept_layer_multiplies_by_what_its_weight_means(quant: str, deterministic: bool) -> None:
    method = kept(METHODS[quant], SHAPE, deterministic)
    by_group = quant == "block"
    assert method.weight is not None and method.weight.dtype == torch.float8_e4m3fn and method.dtype == TYPE
    assert method.fp8_inputs == Fp8Inputs(by_group, MAX_ROWS)
    bias, limit = random(256, seed=5), 1e-4 if INTERPRETED else 6e-3  # the weight is made anew in the model's type
    for rows in (0, 1, 9):
        x = random(rows, 256, seed=rows)
        expected, gates = meant(method, x, by_group), silu_mul.reference(meant(method, x, by_group))
        whole, wanted = quantize_rows(x, by_group), method.fp8_inputs
        for given, out in ((x, None), (whole, torch.empty(rows, 256, device=DEVICE))):
            y = method.multiply(given, bias, out)
            assert y.dtype == TYPE and (out is None or y is out)
            summed = expected + bias.double()
            assert (y.double() - summed).norm() <= limit * summed.norm()
        assert torch.equal(method.multiply(x, None), method.multiply(whole, None))
        gated, rounded = method.multiply_gated(x), method.multiply_gated(whole, wanted)
        assert isinstance(gated, Tensor) and isinstance(rounded, Fp8Rows)
        assert (gated.double() - gates).norm() <= 3 * limit * gates.norm()
        close(dequantized_rows(rounded), dequantized_rows(quantize_rows(gated, by_group)))
    if not deterministic:
        many = quantize_rows(random(MAX_ROWS + 2, 256), by_group, rows_together=True)
        expected = dequantized_rows(many).double() @ method.dense_weight().double().T
        assert (method.multiply(many, None).double() - expected).norm() <= limit * expected.norm()


@pytest.mark.skipif(INTERPRETED, reason="numpy adds in another order for other shapes on some CPUs")
def test_a_row_of_a_deterministic_layer_depends_on_nothing_else() -> None:
    method, x = kept(METHODS["block"], SHAPE, deterministic=True), random(70, 256)
    whole = method.multiply(x, None)
    for rows in (slice(3, 5), slice(69, 70)):
        assert torch.equal(method.multiply(x[rows], None), whole[rows])


def test_what_cannot_be_kept_is_dequantised(caplog: pytest.LogCaptureFixture) -> None:
    shape = LinearShape.stacked([("", Span.whole(64))], Span(0, 64, 128))
    method = METHODS["block"].linear_method(["x"], shape)
    assert isinstance(method, Fp8Linear)
    method.to(DEVICE).fill_dummy(torch.Generator(DEVICE).manual_seed(0))
    method.finish(GEMMOptions(workspace_of((64, 128)), fp8=True) if not INTERPRETED else GEMMOptions(None, fp8=True))
    assert method.weight is None and method.fp8_inputs is None
    assert "weights of FP8 [64, 64] are dequantised: 64 columns on a rank are no multiple of 128" in caplog.text


@pytest.mark.parametrize("quant", METHODS)
@kernels_of_operations()
def test_an_mlp_and_the_norm_before_it_are_those_of_separate_launches(quant: str) -> None:
    mlp, norm = GatedMLP(256, 128, SOLO), RMSNorm(256, 1e-5).to(DEVICE)
    for seed, layer in enumerate((mlp.gate_up, mlp.down_proj)):
        assert isinstance(layer, LinearBase) and isinstance(layer.method, UnquantizedLinearMethod)
        layer.method = kept(METHODS[quant], layer.shape, seed=seed)
    norm.weight = nn.Parameter(random(256, seed=7), requires_grad=False)
    for rows in (2, 11):
        added, stream = random(rows, 256, seed=1), random(rows, 256, seed=2)
        apart, sums = norm.add(added, stream.clone())
        normed, fused_sums = norm.add_for_product(added, stream.clone(), mlp.fp8_inputs)
        assert isinstance(normed, Fp8Rows) and torch.equal(sums, fused_sums)
        hidden = mlp.gate_up(apart)
        close(mlp.partial(normed), mlp.down_proj.partial(hidden))
        first = norm.for_product(stream, mlp.fp8_inputs)
        assert isinstance(first, Fp8Rows)
        by_group = mlp.fp8_inputs is not None and mlp.fp8_inputs.by_group
        assert same(first, quantize_rows(rms_norm(stream, norm.weight, norm.eps), by_group))
        assert torch.equal(norm.for_product(stream, None), norm(stream))


@pytest.mark.parametrize("quant", METHODS)
def test_latent_attention_hands_its_last_product_rows_that_are_rounded_once(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products that make values round them if scales are per group; else a launch of its own does."""
    sizes = {"hidden_size": 64, "num_heads": 2, "q_rank": 32, "latent": 32, "key_dim": 16, "rotated_dim": 16}
    layer = LatentAttention(0, SOLO, **sizes, value_dim=128, scale=0.2).to(DEVICE)
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = random(*parameter.shape, seed=i) * 0.3
    layer.o_proj.method = kept(METHODS[quant], layer.o_proj.shape)
    for module in layer.modules():
        if isinstance(module, LinearBase) and module is not layer.o_proj:
            module.finish(GEMMOptions())
    assert layer.o_proj.method.fp8_inputs is not None
    given: list[object] = []
    multiply = layer.o_proj.method.multiply

    def noted(x: "Tensor | Fp8Rows", *more: Tensor | None) -> Tensor:
        given.append(x)
        return multiply(x, *more)

    monkeypatch.setattr(layer.o_proj.method, "multiply", noted)
    batch = random_decode(Mode.VERIFY, 2, 2, [9, 0], 4, 12)
    x, history, results = random(4, 64, seed=50), random(13, 4, 48, seed=51), []
    table = torch.rand(64, 8, device=DEVICE, dtype=torch.float32)
    angles = Angles(table, table.flip(0), torch.tensor([9, 10, 0, 1], device=DEVICE))
    for kernels in (kernels_of_operations(), nullcontext()):
        pool = uniform_pool(1, 12, 4, LatentLayout(32, 16, TYPE), DEVICE)
        pool.tensors[0][0][0] = history
        context = make_context(pool, {Mode.VERIFY: TritonBackend()}, batch, None, None)
        with kernels:
            results.append(layer._partial(layer.qkv_a(x), angles, context))
    assert [isinstance(each, Fp8Rows) for each in given] == 2 * [quant == "block"]
    close(*results)
