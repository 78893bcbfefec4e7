"""The seam of `KVLayout`: a new layout of this file, beside the existing ones, works with pool, forward context and
path moves unchanged."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.layout import HeadsLayout, KVLayout, LatentLayout, LayerGroup, PerToken
from aerie.attention.kv_cache.pool import KVPool, bytes_per_page
from aerie.attention.registry import BACKENDS, limit
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, LayerKV, Mode, PrefillBatch
from aerie.kernels.kv.slot_mapping import map_decode_rows
from aerie.kernels.kv.stored_values import FP8, KVScales
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles, rotate
from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.engine_layout import EngineLayout, pages_asked
from aerie.workers.layers.forward_context import ForwardContext, make_context
from tests.support.kernels.attention_cases import WORKS, Shape, use_of

CPU = torch.device("cpu")
PAGE = 4
HEADS = HeadsLayout(2, 8, torch.float32)
LATENT = LatentLayout(24, 8, torch.float32)


@dataclass(frozen=True)
class ScaledView:
    kv: LayerKV
    scales: LayerKV


@dataclass(frozen=True)
class ScaledLayout(KVLayout[ScaledView]):
    """K/V heads of eight bits, with a scale for each token and head."""

    num_kv_heads: int
    head_dim: int

    kind: ClassVar[str] = "scaled heads"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        values = PerToken((self.num_kv_heads, self.head_dim), FP8)
        scales = PerToken((self.num_kv_heads,), torch.float32)
        return (values, values, scales, scales)

    def view(self, tensors: tuple[Tensor, ...], scales: KVScales) -> ScaledView:
        k, v, k_scale, v_scale = tensors
        return ScaledView(LayerKV(k, v), LayerKV(k_scale, v_scale))

    def store(
        self,
        view: ScaledView,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        cos, sin = angles.by_row()
        k, v = rows
        for pages, scales, x in (
            (view.kv.k, view.scales.k, rotate(k, cos, sin)),
            (view.kv.v, view.scales.v, v),
        ):
            scale = x.abs().amax(-1) / torch.finfo(FP8).max
            scales.view(-1, self.num_kv_heads)[slot_mapping] = scale
            pages.view(torch.uint8).view(-1, *x.shape[1:])[slot_mapping] = (
                (x / scale[..., None]).to(FP8).view(torch.uint8)
            )
        return rotate(q, cos, sin)


def angles(positions: Tensor, dims: int) -> Angles:
    table = torch.arange(64.0).unsqueeze(1) * torch.tensor([0.3**i for i in range(dims // 2)])
    return Angles(table.cos(), table.sin(), positions)


def test_a_pool_takes_what_its_layouts_say() -> None:
    scaled = ScaledLayout(2, 8)
    assert HEADS.bytes_per_token == 2 * 2 * 8 * 4
    assert LATENT.bytes_per_token == 32 * 4
    assert scaled.bytes_per_token == 2 * 2 * (8 + 4)
    groups = [LayerGroup((0, 2, 5), HEADS), LayerGroup((1,), LATENT), LayerGroup((3, 4), scaled)]
    pool = KVPool(groups, 6, PAGE, CPU)
    each = PAGE * (3 * 128 + 128 + 2 * 48)
    assert bytes_per_page(groups, PAGE) == each
    assert sum(tensor.nbytes for tensors in pool.tensors for tensor in tensors) == (6 + 1) * each
    layout = EngineLayout(RoundShapes(), SchedulerConfig(1), CacheConfig(PAGE, None, 10.5 * each / 1e9), 9, 9, 0, each)
    assert pages_asked(layout, 0) == (9, 0)  # and page 0
    assert isinstance(pool.layer(5), LayerKV) and isinstance(pool.layer(4), ScaledView)
    assert pool.layer(1).rows.shape == (7, PAGE, 32)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [rows, ..., 32] with neighbours of its last 8 dimensions turned, as complex numbers."""
    at = angles(positions, 8)
    turns = torch.complex(at.cos[positions], at.sin[positions])
    turns = turns.view(-1, *[1] * (x.dim() - 2), 4)
    pairs = torch.view_as_complex(x[..., 24:].unflatten(-1, (-1, 2)).contiguous()) * turns
    return torch.cat((x[..., :24], torch.view_as_real(pairs).flatten(-2)), -1)


def test_latent_rows_are_stored_attended_to_and_moved() -> None:
    """Beside a layer of heads: the rows of a tree, of which 0, 2, 3 are accepted and come to the front."""
    torch.manual_seed(0)
    pool = KVPool([LayerGroup((0,), HEADS), LayerGroup((1,), LATENT)], 6, PAGE, CPU)
    table, length = torch.tensor([[5, 2, 6]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    history = torch.randn(3, 32)
    pool.layer(1).rows[5, :3] = history
    parents = [None, 0, 0, 2, 1]
    sees = torch.eye(5, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent is not None:
            sees[row] |= sees[parent]
    mask = (sees.long() << torch.arange(5)).sum(1).unsqueeze(0)
    batch = DecodeBatch(Mode.VERIFY, 5, 5, length, mask, table, 8)
    depths = torch.tensor([3, 4, 4, 5, 5])
    slots = map_decode_rows(batch, PAGE)[1]
    context = ForwardContext(pool, depths, slots, 5, TorchBackend().prepare(batch), None)
    q, row = torch.randn(5, 3, 32), torch.randn(5, 32)
    out = context.attend(1, q, (row,), angles(depths, 8), ScoreRule(0.2))

    text = torch.cat((history, turned(row, depths)))
    for r in range(5):
        seen = text[[0, 1, 2, *(3 + sees[r].nonzero().flatten()).tolist()]]
        weights = torch.softmax(turned(q, depths)[r] @ seen.T * 0.2, -1)
        torch.testing.assert_close(out[r], weights @ seen[:, :24])

    k = torch.randn(5, 2, 8)
    pool.store(0, torch.randn(5, 4, 8), (k, -k), angles(depths, 8), slots)
    kept = [pool.layer(0).v.view(-1, 2, 8)[slots].clone(), pool.layer(1).rows.view(-1, 32)[slots].clone()]
    pool.move_path(table, length, torch.tensor([[0, 2, 3, 0]]))
    for now, before in zip((pool.layer(0).v.view(-1, 2, 8), pool.layer(1).rows.view(-1, 32)), kept, strict=True):
        assert torch.equal(now[slots[:3]], before[[0, 2, 3]])


def test_prompt_chunks_attend_to_latent_rows() -> None:
    """Two requests, one with a cached prefix; the two padding rows get zeros."""
    torch.manual_seed(2)
    pool = KVPool([LayerGroup((0,), LATENT)], 6, PAGE, CPU)
    history = torch.randn(6, 32)
    table = torch.tensor([[3, 1, 4], [2, 6, 0]], dtype=torch.int32)
    pool.layer(0).rows[[3] * 4 + [1] * 2, [0, 1, 2, 3, 0, 1]] = history
    batch = PrefillBatch.from_lists((6, 0), (3, 5), table, 10)
    context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, batch)
    q, row = torch.randn(10, 3, 32), torch.randn(10, 32)
    out = context.attend(0, q, (row,), angles(context.positions, 8), ScoreRule(0.2))
    assert out.shape == (10, 3, 24) and not out[8:].any()
    q, row = turned(q, context.positions), turned(row, context.positions)
    for r in range(8):
        seen = torch.cat((history, row[: r + 1])) if r < 3 else row[3 : r + 1]
        torch.testing.assert_close(out[r], torch.softmax(q[r] @ seen.T * 0.2, -1) @ seen[:, :24])


def test_scaled_heads_keep_their_scales_where_they_move() -> None:
    torch.manual_seed(1)
    pool = KVPool([LayerGroup((0,), ScaledLayout(2, 8))], 3, PAGE, CPU)
    k, positions = torch.randn(4, 2, 8) * torch.tensor([1.0, 9, 0.1, 3]).view(4, 1, 1), torch.arange(4)
    pool.store(0, torch.randn(4, 2, 8), (k, k), angles(positions, 8), PAGE + positions)
    table, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    pool.move_path(table, length, torch.tensor([[0, 2, 3]]))
    view = pool.layer(0)
    values = view.kv.v[1, :3].float() * view.scales.v[1, :3, :, None]
    torch.testing.assert_close(values, k[[0, 2, 3]], rtol=2.0**-4, atol=1e-4)  # three bits of mantissa


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layout_that_a_backend_does_not_read_is_refused(name: str) -> None:
    use = use_of(WORKS[1], Shape())
    assert limit(BACKENDS[name], use) is None
    reason = limit(BACKENDS[name], replace(use, layout=ScaledLayout.kind))
    assert reason == f"it reads KV kept as {', '.join(sorted(BACKENDS[name].layouts))}, not as scaled heads"
