"""The triton backend over latent rows, and the kernels around it, against float64 and torch: on a GPU, or small cases
under Triton's interpreter, which `test_triton_interpreter` starts. Tolerances: `tests.support.kernels.triton_cases`."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed here")

from aerie.attention.backends.torch_backend import TorchBackend  # noqa: E402
from aerie.attention.backends.triton_backend import TritonBackend, TritonExpandedChunks  # noqa: E402
from aerie.attention.config import LATENT_PAGE_SIZE  # noqa: E402
from aerie.attention.expansion import ExpandedChunks  # noqa: E402
from aerie.attention.kv_cache.layout import LatentLayout  # noqa: E402
from aerie.kernels.attend import decode_plan_triton, expanded_prefill_triton, references  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.fp8.rows import Fp8Rows  # noqa: E402
from aerie.kernels.fp8.rows_triton import quantize_rows  # noqa: E402
from aerie.kernels.kv.batches import (  # noqa: E402
    DecodeBatch,
    ExpandedKV,  # noqa: E402
    LatentKV,  # noqa: E402
    Mode,
    PrefillBatch,
    causal_mask,
)
from aerie.kernels.latent import head_products_triton as head_kernels  # noqa: E402
from aerie.kernels.latent import latents_triton as layer_kernels  # noqa: E402
from aerie.kernels.latent.head_products import latent_values  # noqa: E402
from aerie.kernels.latent.latents import normed_latents  # noqa: E402
from aerie.kernels.latent.latents_triton import expand_latents  # noqa: E402
from aerie.kernels.rope.rope_store import Angles, rotate_pairs  # noqa: E402
from aerie.workers.distributed.tp_group import SOLO  # noqa: E402
from aerie.workers.layers.forward_context import ForwardContext, make_context  # noqa: E402
from aerie.workers.layers.latent_attention import LatentAttention  # noqa: E402
from aerie.workers.layers.linear import finish_weights  # noqa: E402
from tests.bench.kernels.gpu_time import captured  # noqa: E402
from tests.support.kernels.attention_cases import Work, in_float64, mask_of, uniform_pool  # noqa: E402
from tests.support.kernels.triton_cases import assert_close, random_decode, random_rows, random_table  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS, kernels_of_operations  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = MARKS
production = pytest.mark.gpu  # sizes that the interpreter would take minutes for
SCALE = 192**-0.5


def random_layer(num_pages: int, page_size: int, latent: int, rotated: int, dtype: torch.dtype) -> LatentKV:
    """All pages filled, those of nobody and page 0 too."""
    pool = uniform_pool(1, num_pages, page_size, LatentLayout(latent, rotated, dtype), DEVICE)
    pool.tensors[0][0].normal_()
    layer = pool.layer(0)
    assert isinstance(layer, LatentKV)
    return layer


def check(
    mode: Mode,
    rows: int,
    suffix_len: int,
    prefixes: list[int],
    heads: int,
    page_size: int,
    dtype: torch.dtype,
    latent: int = 32,
    rotated: int = 16,
    span: int | None = None,
    window: int | None = None,
) -> None:
    torch.manual_seed(rows * 100 + suffix_len)
    num_pages = sum(-(-(n + suffix_len) // page_size) for n in prefixes) + 3
    kv = random_layer(num_pages, page_size, latent, rotated, dtype)
    batch = random_decode(mode, rows, suffix_len, prefixes, page_size, num_pages, window)
    q = random_rows(batch.num_rows, heads, latent + rotated, dtype)
    prepared = TritonBackend(span).prepare(batch)
    expected = references.latent_decode(q, kv, batch, ScoreRule(SCALE))
    for _ in range(2):  # the second call finds what the first left in the workspace
        out = prepared.forward(q, kv, ScoreRule(SCALE))
        assert out.dtype == q.dtype and out.is_contiguous()
        assert_close(out, expected, dtype)


@pytest.mark.parametrize(
    "page_size,heads,rows,suffix_len",
    [(8, 16, 2, 2), *slow((64, 7, 5, 63), (1, 4, 1, 1), (2, 5, 3, 3), (4, 8, 4, 9))],
)
def test_small_ragged_batches(page_size: int, heads: int, rows: int, suffix_len: int) -> None:
    check(Mode.VERIFY, rows, suffix_len, [0, 1, 77, 130], heads, page_size, torch.float32)


@pytest.mark.parametrize("page_size,heads,rows,suffix_len", [(16, 8, 4, 9), *slow((1, 4, 1, 1))])
def test_small_batches_in_a_window(page_size: int, heads: int, rows: int, suffix_len: int) -> None:
    check(Mode.VERIFY, rows, suffix_len, [0, 63, 64, 230], heads, page_size, torch.float32, window=70)


@pytest.mark.parametrize("rows,heads", [(4, 20), *slow((1, 16), (3, 8))])
def test_tiles_of_half_types_in_a_window(rows: int, heads: int) -> None:
    check(Mode.DRAFT_EXTEND, rows, rows, [130, 0, 300], heads, 16, torch.bfloat16, window=100)


@pytest.mark.parametrize(
    "mode,rows,suffix_len,heads",
    [(Mode.DRAFT_DECODE, 4, 12, 20), *slow((Mode.DECODE, 1, 1, 16), (Mode.DRAFT_EXTEND, 3, 3, 8))],
)
def test_tiles_of_half_types(mode: Mode, rows: int, suffix_len: int, heads: int) -> None:
    """Tiles of 16 and 32 rows, with weights as first operand, and tiles of 64, run twice."""
    check(mode, rows, suffix_len, [130, 0, 300], heads, 16, torch.bfloat16)


def test_a_tile_of_half_types_is_a_page_of_the_size_that_is_told_of() -> None:
    for packed_rows in (16, 32, 64, 128):
        assert {decode_plan_triton.latent_tiles(packed_rows, 2, density).block_n for density in (0.01, 0.5, 4.0)} == {
            LATENT_PAGE_SIZE
        }


def test_partial_results_beyond_float16_stay_finite() -> None:
    """Those of bfloat16 rows are kept in float16 where another kernel merges them."""
    kv = random_layer(40, 16, 32, 16, torch.bfloat16)
    kv.rows.fill_(1e6)
    batch = random_decode(Mode.DECODE, 1, 1, [300], 16, 40)
    q = torch.zeros(1, 16, 48, dtype=torch.bfloat16, device=DEVICE)
    prepared = TritonBackend().prepare(batch)
    assert ((prepared.forward(q, kv, ScoreRule(SCALE)).float() - 65504.0).abs() < 256.0).all()
    if not INTERPRETED:  # NumPy's maximum of nothing else is an error
        kv.rows.fill_(float("nan"))
        assert prepared.forward(q, kv, ScoreRule(SCALE)).isnan().all()


def test_a_fixed_plan_in_float64s_neighbourhood() -> None:
    check(Mode.VERIFY, 3, 3, [5, 300], 5, 16, torch.bfloat16, span=128)


def test_in_a_fixed_plan_a_row_is_the_same_in_a_tree_and_alone() -> None:
    """Node 3 of a tree 0 - 1, 0 - 2 - 3, and the end of the chain that it is the end of, in a batch of others."""
    torch.manual_seed(1)
    kv = random_layer(60, 16, 32, 16, torch.bfloat16)
    backend, prefix = TritonBackend(128), 70
    table = random_table([prefix + 4], 16, 40)
    q = random_rows(4, 6, 48, torch.bfloat16)
    tokens = [int(table[0, (prefix + i) // 16]) * 16 + (prefix + i) % 16 for i in range(4)]

    def attended(mode: Mode, masks: list[int], queries: Tensor, beside: int) -> Tensor:
        rows = len(masks)
        lengths = torch.tensor([prefix] + [30] * beside, dtype=torch.int32, device=DEVICE)
        mask = torch.tensor([masks] * (beside + 1), dtype=torch.int64, device=DEVICE)
        batch = DecodeBatch(mode, rows, rows, lengths, mask, table.expand(beside + 1, -1), 80)
        return backend.prepare(batch).forward(queries.repeat(beside + 1, 1, 1), kv, ScoreRule(SCALE))[:rows]

    tree = attended(Mode.VERIFY, [0b1, 0b11, 0b101, 0b1101], q, 0)
    flat = kv.rows.view(-1, 48)
    flat[tokens[1]], flat[tokens[2]] = flat[tokens[2]].clone(), flat[tokens[3]].clone()  # the path, without a gap
    chain = attended(Mode.DRAFT_EXTEND, [0b1, 0b11, 0b111], q[[0, 2, 3]], 2)
    assert torch.equal(tree[[0, 2, 3]], chain)


@production
@pytest.mark.parametrize("heads,latent", [(4, 128), *slow((16, 512))])
def test_in_a_fixed_plan_a_token_is_the_same_verified_and_decoded(heads: int, latent: int) -> None:
    """For every place in its tile, and every first position of its round."""
    torch.manual_seed(0)
    longest, rotated = 170, 64
    kv = random_layer(40, 16, latent, rotated, torch.bfloat16)
    backend, table = TritonBackend(256), random_table([longest], 16, 40)
    q = random_rows(longest, heads, latent + rotated, torch.bfloat16)

    def attended(mode: Mode, first: int, rows: int) -> Tensor:
        length = torch.tensor([first], dtype=torch.int32, device=DEVICE)
        batch = DecodeBatch(mode, rows, rows, length, causal_mask(1, rows, DEVICE), table, 192, chain=rows > 1)
        return backend.prepare(batch).forward(q[first : first + rows], kv, ScoreRule(SCALE))

    alone = torch.cat([attended(Mode.DECODE, place, 1) for place in range(longest)])
    for mode, rows in ((Mode.VERIFY, 1), (Mode.VERIFY, 4), (Mode.VERIFY, 8), (Mode.DRAFT_EXTEND, 4)):
        for first in range(longest - rows):
            assert torch.equal(attended(mode, first, rows), alone[first : first + rows]), (mode, rows, first)


def prefill(
    heads: int,
    page_size: int,
    dtype: torch.dtype,
    latent: int,
    rotated: int,
    longest: int,
    most: int,
    window: int | None = None,
) -> None:
    torch.manual_seed(heads)
    starts, counts = (0, 33, 5, longest), (7, 1, 0, most)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    num_pages = sum(-(-n // page_size) for n in lengths) + 1
    kv = random_layer(num_pages, page_size, latent, rotated, dtype)
    batch = PrefillBatch.from_lists(starts, counts, random_table(lengths, page_size, num_pages), sum(counts) + 3)
    batch = dataclasses.replace(batch, window=window)
    on_device = dataclasses.replace(batch, lists=None)
    q = random_rows(batch.num_rows, heads, latent + rotated, dtype)
    expected = references.latent_prefill(q, kv, batch, ScoreRule(SCALE))
    for each in (batch, on_device):
        out = TritonBackend().prepare(each).forward(q, kv, ScoreRule(SCALE))
        assert not out[sum(counts) :].any()
        assert_close(out[: sum(counts)], expected[: sum(counts)], dtype)


@pytest.mark.parametrize("heads,page_size", [(20, 1), *slow((5, 16))])
def test_prompt_chunks(heads: int, page_size: int) -> None:
    prefill(heads, page_size, torch.float32 if INTERPRETED else torch.bfloat16, 32, 16, 18, 9)


def test_prompt_chunks_in_a_window() -> None:
    prefill(5, 16, torch.float32 if INTERPRETED else torch.bfloat16, 32, 16, 100, 40, window=64)


def test_sizes_without_tiles_are_refused() -> None:
    kv = random_layer(2, 4, 24, 8, torch.float32)
    prepared = TritonBackend().prepare(random_decode(Mode.DECODE, 1, 1, [3], 4, 2))
    with pytest.raises(ValueError, match="kv_lora_rank=24: must be a power of two"):
        prepared.forward(random_rows(1, 2, 32, torch.float32), kv, ScoreRule(1.0))


def test_attention_reads_the_masks_where_the_tree_builder_wrote_them() -> None:
    """No copy stands between: other bits in the same memory are another result of the same prepared pass."""
    torch.manual_seed(3)
    kv = random_layer(20, 16, 32, 16, torch.float32)
    batch = random_decode(Mode.VERIFY, 4, 4, [40, 17], 16, 20)
    assert TritonBackend().tree_mask_buffer(2, 4, DEVICE) is None
    q = random_rows(8, 4, 48, torch.float32)
    prepared = TritonBackend().prepare(batch)
    prepared.plan(q, kv, ScoreRule(SCALE))
    for masks in (causal_mask(2, 4, DEVICE), torch.tensor([[1, 3, 5, 13]] * 2, device=DEVICE)):
        batch.mask.copy_(masks)
        assert_close(
            prepared.forward(q, kv, ScoreRule(SCALE)),
            references.latent_decode(q, kv, batch, ScoreRule(SCALE)),
            torch.float32,
        )


def random_angles(rows: int, rotated: int) -> Angles:
    turns = torch.rand((40, rotated // 2), device=DEVICE) * 6
    return Angles(turns.cos(), turns.sin(), torch.randint(0, 40, (rows,), device=DEVICE))


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Sums of few terms, in another order, rounded twice to the type."""
    torch.testing.assert_close(ours.float(), theirs.float(), atol=16 * torch.finfo(dtype).eps, rtol=16e-3)


@pytest.mark.parametrize(
    "q_size,has_norm", [(32, False), *slow((24, True))]
)  # with one: `tests.kernels.ops.latent_cases`
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if not INTERPRETED else [torch.float32])
def test_norms_rotation_and_write_equal_their_reference(q_size: int, has_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    both = torch.randn((6, q_size + 48 + 8), device=DEVICE).to(dtype)[:, : q_size + 48]
    q_weight, row_weight = torch.rand(q_size, device=DEVICE).to(dtype), torch.rand(32, device=DEVICE).to(dtype)
    angles, slots = random_angles(6, 16), torch.tensor([3, 60, 17, 0, 0, 21], device=DEVICE)
    results = []
    for function in (layer_kernels.normed_latents, normed_latents.reference):
        rows = torch.zeros((5, 16, 48), dtype=dtype, device=DEVICE)
        weight = q_weight if has_norm else None
        q = function(both, weight, row_weight, 1e-6, angles, LatentKV(rows, 32), slots)
        rows.view(-1, 48)[0] = 0  # padding shares it
        results.append((q, rows))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, dtype)


@pytest.mark.parametrize("rows", [70, *slow(1, 21)])
def test_values_in_fp8_are_those_that_rounding_after_them_gives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same tiles, to the bit; scales of a group side by side too, as many rows have them."""
    torch.manual_seed(7)
    latent = 160 if INTERPRETED else 512
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    weight = torch.randn((3, 128, latent), device=DEVICE).to(dtype).transpose(1, 2)
    x, plain = (torch.randn((rows, 3, size), device=DEVICE).to(dtype) for size in (latent, 128))
    outs = [Fp8Rows.empty(rows, 3 * 128, True, together, DEVICE) for together in (False, True)]
    for out in outs:
        head_kernels.head_products(x, weight, out)
    monkeypatch.setattr(head_kernels, "product_blocks", head_kernels.rounded_blocks)
    head_kernels.head_products(x, weight, plain)
    expected = quantize_rows(plain.flatten(1), True)
    for out in outs:
        assert torch.equal(out.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(out.scales, expected.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["keys", *slow("values", "FP8 values")])
def test_products_in_fixed_tiles_depend_on_their_row_alone(kind: str) -> None:
    """With DeepSeek-V3's sizes, and the tiles of few, some and many rows."""
    both = torch.randn((16, 256, 512), device=DEVICE).to(torch.bfloat16)
    keys, count = kind == "keys", 1100
    weight = both[:, :128] if keys else both[:, 128:].transpose(1, 2)
    x = torch.randn((count, 16, weight.shape[1] + 64 * keys), device=DEVICE).to(torch.bfloat16)
    angles = random_angles(count, 64) if keys else None

    def products(first: int, rows: int) -> Tensor:
        mine = None if angles is None else dataclasses.replace(angles, index=angles.index[first : first + rows])
        if kind == "FP8 values":
            rounded = Fp8Rows.empty(rows, 16 * 128, True, False, DEVICE)
            head_kernels.head_products(x[first : first + rows], weight, rounded, fixed=True)
            values = rounded.values.view(torch.uint8).view(rows, 16, 128)
            return torch.cat([values, rounded.scales.view(torch.uint8).view(rows, 16, 4)], 2)
        out = torch.zeros((rows, 16, weight.shape[2] + 64 * keys), dtype=x.dtype, device=DEVICE)
        head_kernels.head_products(x[first : first + rows], weight, out, mine, fixed=True)
        return out

    whole = products(0, count)
    for first, rows in ((7, 1), (3, 16), (20, 40), (100, 130), (300, 600)):
        assert torch.equal(products(first, rows), whole[first : first + rows])


@pytest.mark.gpu
def test_fixed_values_of_few_rows_have_the_bits_of_many() -> None:
    """The kernel that reads a head's matrix ahead, and the others."""
    weight = torch.randn((16 * 256, 512), device=DEVICE).to(torch.bfloat16)
    x = torch.randn((600, 16, 512), device=DEVICE).to(torch.bfloat16)
    whole = latent_values(x, weight, 128, False, True)
    for first, rows in ((7, 1), (3, 4), (40, 16), (100, 17), (200, 300)):
        found = latent_values(x[first : first + rows], weight, 128, False, True)
        assert torch.equal(found.values.view(torch.uint8), whole.values[first : first + rows].view(torch.uint8))
        assert torch.equal(found.scales, whole.scales[first : first + rows])


def random_attention(q_rank: int | None) -> LatentAttention:
    sizes = {"hidden_size": 32, "num_heads": 3, "q_rank": q_rank, "latent": 32, "key_dim": 16, "rotated_dim": 16}
    layer = LatentAttention(0, SOLO, **sizes, value_dim=16, scale=SCALE).to(DEVICE)  # type: ignore[arg-type]
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3)
    finish_weights(layer)
    return layer


def with_kernels(layer: LatentAttention, both: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
    with kernels_of_operations():
        return layer._partial(both, angles, context)


@pytest.mark.parametrize("q_rank", [24, *slow(None)])
def test_a_layer_in_few_launches_is_the_layer(q_rank: int | None) -> None:
    torch.manual_seed(7)
    layer = random_attention(q_rank)
    batch = random_decode(Mode.VERIFY, 3, 3, [9, 0], 4, 12)
    x, angles = torch.randn((6, 32), device=DEVICE), random_angles(6, 16)
    history, results = torch.randn((13, 4, 48), device=DEVICE), []
    for partial in (with_kernels, LatentAttention._partial):
        pool = uniform_pool(1, 12, 4, LatentLayout(32, 16, torch.float32), DEVICE)
        pool.tensors[0][0][0] = history
        context = make_context(pool, {Mode.VERIFY: TritonBackend()}, batch, None, None)
        results.append((partial(layer, layer.qkv_a(x), angles, context), pool.tensors[0][0]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_layer_takes_the_parts_of_its_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As products of few FP8 rows leave them."""
    torch.manual_seed(9)
    layer = random_attention(24)
    batch = random_decode(Mode.VERIFY, 3, 3, [9, 0], 4, 12)
    x, angles = torch.randn((6, 32), device=DEVICE), random_angles(6, 16)
    history, results = torch.randn((13, 4, 48), device=DEVICE), []

    def parts(rows: Tensor) -> Tensor:
        whole = layer.qkv_a(rows)
        rest = torch.randn_like(whole)
        return torch.stack((rest, whole - rest))

    for apart in (True, False):
        if apart:
            monkeypatch.setattr(layer.qkv_a.method, "multiply_apart", parts)
        pool = uniform_pool(1, 12, 4, LatentLayout(32, 16, torch.float32), DEVICE)
        pool.tensors[0][0][0] = history
        context = make_context(pool, {Mode.VERIFY: TritonBackend()}, batch, None, None)
        if apart:
            with kernels_of_operations():
                given = layer.partial(x, angles, context)
        else:
            given = layer._partial(layer.qkv_a(x), angles, context)
        results.append((given, pool.tensors[0][0]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_rounds", slow(True, False))  # expanded chunks by themselves: below
def test_a_layer_that_expands_chunks_is_the_layer(with_rounds: bool) -> None:
    """Prompts that begin, one that goes on after others' tokens, padding chunks and rows; beside rounds and alone."""
    torch.manual_seed(8)
    layer = random_attention(24)
    starts, counts, padding = (0, 9, 0), (37, 30, 1), 4
    table = random_table([37, 39, 1, 1], 4, 40)
    chunks = PrefillBatch.from_lists(starts, counts, table, sum(counts) + padding)
    decode = random_decode(Mode.VERIFY, 3, 3, [9, 0], 4, 40) if with_rounds else None
    num_rounds = 0 if decode is None else 6
    x, angles = torch.randn((num_rounds + chunks.num_rows, 32), device=DEVICE), random_angles(76 + num_rounds, 16)
    angles = dataclasses.replace(angles, index=angles.index[: x.shape[0]].contiguous())
    history, results = torch.randn((41, 4, 48), device=DEVICE), []
    backend = TritonBackend()
    for expands in (True, False):
        pool = uniform_pool(1, 40, 4, LatentLayout(32, 16, torch.float32), DEVICE)
        pool.tensors[0][0][0] = history
        context = make_context(pool, {Mode.VERIFY: backend, Mode.PREFILL: backend}, decode, None, chunks)
        expanded = TritonExpandedChunks(chunks, 4) if expands else None
        context = dataclasses.replace(context, expanded=expanded)
        out = with_kernels(layer, layer.qkv_a(x), angles, context)
        results.append((out[: num_rounds + sum(counts)], pool.tensors[0][0][0, 1:]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("starts,limit", slow(((0, 9, 3), 80), ((0, 0, 0), 80), ((0, 9, 3), 96)))
def test_a_captured_layer_expands_chunks(starts: tuple[int, int, int], limit: int) -> None:
    """Only the device knows what they are, the host how many tokens they look at, at most; padding chunks and rows are
    among them."""
    torch.manual_seed(10)
    layer, backend = random_attention(24), TritonBackend()
    counts, num_rows = (37, 30, 1), 72
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    known = PrefillBatch.from_lists(starts, counts, random_table([*lengths, 1], 4, 40), num_rows)
    chunks = dataclasses.replace(known, lists=None, seen_limit=limit)
    x, angles = torch.randn((num_rows, 32), device=DEVICE), random_angles(num_rows, 16)
    history, results = torch.randn((41, 4, 48), device=DEVICE), []
    for batch in (chunks, dataclasses.replace(chunks, seen_limit=None)):
        pool = uniform_pool(1, 40, 4, LatentLayout(32, 16, torch.float32), DEVICE)
        pool.tensors[0][0][0] = history
        context = make_context(pool, {Mode.PREFILL: backend}, None, None, batch)
        assert (context.expanded is not None) == (batch.seen_limit is not None)
        out = with_kernels(layer, layer.qkv_a(x), angles, context)
        results.append((out[: sum(counts)], pool.tensors[0][0][0, 1:]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("latent,rotated", [(48, 32), *slow((32, 16))] if INTERPRETED else [(512, 64), (48, 32)])
def test_latent_rows_become_keys_and_values(latent: int, rotated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tokens that the device counts are expanded, from any pages; nothing is written after them."""
    generator = torch.Generator().manual_seed(latent)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    kv = random_layer(30, 16, latent, rotated, dtype)
    weight = torch.randn(5 * 16, latent, generator=generator).to(DEVICE, dtype) / latent**0.5
    tokens = torch.randint(0, 480, (300,), generator=generator).to(DEVICE)
    ends = torch.tensor([0, 50, 50, 170], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, 7.0, **options))
    found, k_pe = expand_latents(kv.rows, tokens, ends, weight)
    rows = kv.rows.view(-1, latent + rotated)[tokens[:170]]
    close(found[:170], torch.nn.functional.linear(rows[:, :latent], weight), dtype)
    assert torch.equal(k_pe[:170], rows[:, latent:]) and (found[170:] == 7.0).all() and (k_pe[170:] == 7.0).all()


def check_expanded(
    heads: int, sizes: tuple[int, int, int], starts: list[int], counts: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    key, rotated, value = sizes
    lengths = [start + count if count else 0 for start, count in zip(starts, counts, strict=True)]
    batch = PrefillBatch.from_lists(
        starts, counts, random_table([max(1, n) for n in lengths], 16, 600), sum(counts) + 2
    )
    chunks = TritonExpandedChunks(batch, 16)
    kv = random_rows(sum(lengths), heads, key + value, dtype).contiguous()
    made = ExpandedKV(kv, random_rows(sum(lengths), 1, rotated, dtype).squeeze(1), chunks.first, key)
    q, angles = random_rows(batch.num_rows, heads, key + rotated, dtype), random_angles(batch.num_rows, rotated)
    cos, sin = angles.by_row()
    q_rotated = torch.cat((q[..., :key], rotate_pairs(q[..., key:], cos, sin)), dim=-1)
    out = torch.full((batch.num_rows, heads, value), float("nan"), dtype=dtype, device=DEVICE)
    chunks.attend(q, made, angles, SCALE, out)
    rows = sum(counts)
    assert_close(out[:rows], expanded_prefill_triton.reference(q_rotated, made, batch, SCALE)[:rows], dtype)
    assert not out[rows:].any()


def test_expanded_chunks() -> None:
    check_expanded(3, (16, 16, 32), [0, 20, 0, 5], [33, 1, 0, 40], torch.float32)


@production
@pytest.mark.parametrize("heads", [16, 128])
def test_expanded_chunks_of_production(heads: int) -> None:
    check_expanded(heads, (128, 64, 128), [0, 900, 0, 130], [513, 300, 0, 127], torch.bfloat16)


def test_chunks_are_expanded_where_tokens_are_looked_at_often() -> None:
    table = torch.zeros((2, 4000), dtype=torch.int32)
    backend = TritonBackend()

    def expanded(starts: list[int], counts: list[int]) -> ExpandedChunks | None:
        return backend.expand(PrefillBatch.from_lists(starts, counts, table), 16)

    assert expanded([0, 0], [512, 3000]) is not None
    assert expanded([14000], [2000]) is not None
    assert expanded([14001], [2000]) is None, "more memory than eight times the rows'"
    assert expanded([90], [30]) is None, "few rows look at many tokens"
    assert expanded([0, 0], [0, 0]) is None
    chunks = PrefillBatch.from_lists([0], [512], table)
    assert backend.expand(dataclasses.replace(chunks, lists=None), 16) is None
    assert backend.expand(dataclasses.replace(chunks, lists=None, seen_limit=512), 16) is not None
    assert backend.expand(dataclasses.replace(chunks, window=64), 16) is None
    assert TritonBackend(128).expand(chunks, 16) is None, "a row must be computed as in a round"


@production
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_trees_over_long_contexts_as_torch_computes_them(heads: int, rows: int, page_size: int) -> None:
    """Replayed from a graph over other lengths, up to 32k, among them padding."""
    torch.manual_seed(heads + rows)
    work = Work("verify", Mode.VERIFY, rows, rows, tree=rows > 1)
    sets = ([1, 511, 4096, 32000, 0], [32640, 64, 63, 7, 1000])
    num_pages = max(sum(-(-(n + rows) // page_size) for n in lengths) for lengths in sets) + 1
    kv = random_layer(num_pages, page_size, 512, 64, torch.bfloat16)
    table = torch.zeros((5, 32768 // page_size), dtype=torch.int32, device=DEVICE)
    lengths_now = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(Mode.VERIFY, rows, rows, lengths_now, mask_of(work, 5).to(DEVICE), table, 32768)
    q = random_rows(5 * rows, heads, 576, torch.bfloat16)
    backend, outputs = TritonBackend(), []
    graph = captured(lambda: outputs.append(backend.prepare(batch).forward(q, kv, ScoreRule(SCALE))))
    for lengths in sets:
        batch.prefix_len.copy_(torch.tensor(lengths, dtype=torch.int32))
        batch.mask.copy_(mask_of(work, 5))
        table.zero_()
        own = random_table([n + rows for n in lengths], page_size, num_pages)
        table[:, : own.shape[1]] = own[:, : table.shape[1]]
        graph.replay()
        for b, length in enumerate(lengths):  # one by one: scores in float64 of all at once need much memory
            mine = slice(b * rows, (b + 1) * rows)
            fields = (x[b : b + 1] for x in (batch.prefix_len, batch.mask, table))
            one = DecodeBatch(Mode.VERIFY, rows, rows, *fields, length + rows)
            expected = TorchBackend().prepare(one).forward(q[mine].double(), in_float64(kv), ScoreRule(SCALE))
            assert_close(outputs[-1][mine], expected, torch.bfloat16)


@production
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompt_chunks_of_production(heads: int, page_size: int) -> None:
    prefill(heads, page_size, torch.bfloat16, 512, 64, 4000, 200)
