"""The seam of `KVLayout`, by layouts that do not exist yet beside the one that does: what a layout must say, and that
pool, context and path moves need to know no more."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from attention.backend import Prepared
from attention.config import CacheConfig
from attention.kv_cache.heads import HeadsLayout
from attention.kv_cache.layout import KVLayout, LayerGroup, PerToken
from attention.kv_cache.pool import KVPool, bytes_per_page
from attention.metadata import DecodeBatch, Mode, causal_mask, decode_places
from attention.registry import BACKENDS, limit
from attention.rotation import rotate
from attention.views import LayerKV
from tests.support.attention_cases import WORKS, Shape, use_of
from workers.layers.forward_context import ForwardContext
from workers.layers.rotary import Angles
from workers.runner.layout import pages_asked

CPU = torch.device("cpu")
PAGE = 4
HEADS = HeadsLayout(2, 8, torch.float32)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentLayout(KVLayout[Tensor]):
    """One row for all heads, as multi-head latent attention has it: `latent` values, then `rotated` ones."""

    latent: int
    rotated: int

    kind: ClassVar[str] = "latent rows"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        return (PerToken((self.latent + self.rotated,), torch.float32),)

    def view(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return tensors[0]

    def store(
        self,
        view: Tensor,
        q: Tensor,
        rows: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        (row,) = rows
        view.view(-1, row.shape[1]).index_copy_(
            0, slot_mapping, self._turned(row[:, None], cos[index], sin[index])[:, 0]
        )
        return self._turned(q, cos[index], sin[index])

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        latent, rotated = x.split([self.latent, self.rotated], dim=-1)
        return torch.cat((latent, rotate(rotated, cos, sin)), dim=-1)


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

    def view(self, tensors: tuple[Tensor, ...]) -> ScaledView:
        k, v, k_scale, v_scale = tensors
        return ScaledView(LayerKV(k, v), LayerKV(k_scale, v_scale))

    def store(
        self,
        view: ScaledView,
        q: Tensor,
        rows: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        cos, sin = cos[index], sin[index]
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


class LatentAttention(Prepared):
    """Of the rows of one request, causal, with weights over latent rows."""

    def __init__(self, batch: DecodeBatch, latent: int) -> None:
        self.batch, self.latent = batch, latent

    def forward(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        start, rows = int(self.batch.prefix_len), self.batch.rows
        text = kv[self.batch.page_table[0].long()].flatten(0, 1)[: start + rows]
        hidden = torch.ones(rows, start + rows, dtype=torch.bool).triu(start + 1)
        scores = torch.einsum("rhd,nd->hrn", q, text) * scale
        return torch.einsum(
            "hrn,nd->rhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), text[:, : self.latent]
        )


def angles(positions: Tensor, dims: int) -> Angles:
    table = torch.arange(64.0).unsqueeze(1) * torch.tensor([0.3**i for i in range(dims // 2)])
    return Angles(table.cos(), table.sin(), positions)


def test_a_pool_takes_what_its_layouts_say() -> None:
    latent, scaled = LatentLayout(24, 8), ScaledLayout(2, 8)
    assert HEADS.bytes_per_token == 2 * 2 * 8 * 4
    assert latent.bytes_per_token == 32 * 4
    assert scaled.bytes_per_token == 2 * 2 * (8 + 4)
    groups = [LayerGroup((0, 2, 5), HEADS), LayerGroup((1,), latent), LayerGroup((3, 4), scaled)]
    pool = KVPool(groups, 6, PAGE, CPU)
    each = PAGE * (3 * 128 + 128 + 2 * 48)
    assert bytes_per_page(groups, PAGE) == each
    assert sum(tensor.nbytes for tensors in pool.tensors for tensor in tensors) == (6 + 1) * each
    assert pages_asked(CacheConfig(PAGE, None, 10.5 * each / 1e9), each, 0) == 9  # and page 0
    assert isinstance(pool.layer(5), LayerKV) and isinstance(pool.layer(4), ScaledView)
    assert pool.layer(1).shape == (7, PAGE, 32)


def test_latent_rows_are_stored_attended_to_and_moved() -> None:
    """Beside a layer of heads: the rows of a tree, of which 0, 2, 3 are accepted and come to the front."""
    torch.manual_seed(0)
    latent = LatentLayout(24, 8)
    pool = KVPool([LayerGroup((0,), HEADS), LayerGroup((1,), latent)], 6, PAGE, CPU)
    table, length = torch.tensor([[5, 2, 6]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    history = torch.randn(3, 32)
    pool.layer(1)[5, :3] = history
    batch = DecodeBatch(Mode.VERIFY, 5, 5, length, causal_mask(1, 5, CPU), table, 8)
    positions = batch.kv_positions().flatten()
    slots = decode_places(batch, PAGE)[1]
    context = ForwardContext(pool, positions, slots, 5, LatentAttention(batch, 24), None)
    q, row = torch.randn(5, 3, 32), torch.randn(5, 32)
    out = context.attend(1, q, (row,), angles(positions, 8), 0.2)

    def turned(x: Tensor) -> Tensor:
        at = angles(positions, 8)
        return torch.cat((x[..., :24], rotate(x[..., 24:], at.cos[positions], at.sin[positions])), -1)

    text = torch.cat((history, turned(row[:, None])[:, 0]))
    for r in range(5):
        weights = torch.softmax(turned(q)[r] @ text[: 4 + r].T * 0.2, -1)
        torch.testing.assert_close(out[r], weights @ text[: 4 + r, :24])

    k = torch.randn(5, 2, 8)
    pool.store(0, torch.randn(5, 4, 8), (k, -k), *vars(angles(positions, 8)).values(), slots)
    kept = [pool.layer(0).v.view(-1, 2, 8)[slots].clone(), pool.layer(1).view(-1, 32)[slots].clone()]
    pool.move_path(table, length, torch.tensor([[0, 2, 3, 0]]))
    for now, before in zip((pool.layer(0).v.view(-1, 2, 8), pool.layer(1).view(-1, 32)), kept, strict=True):
        assert torch.equal(now[slots[:3]], before[[0, 2, 3]])


def test_scaled_heads_keep_their_scales_where_they_move() -> None:
    torch.manual_seed(1)
    pool = KVPool([LayerGroup((0,), ScaledLayout(2, 8))], 3, PAGE, CPU)
    k, positions = torch.randn(4, 2, 8) * torch.tensor([1.0, 9, 0.1, 3]).view(4, 1, 1), torch.arange(4)
    at = angles(positions, 8)
    pool.store(0, torch.randn(4, 2, 8), (k, k), at.cos, at.sin, at.index, PAGE + positions)
    pool.move_path(torch.tensor([[1]], dtype=torch.int32), torch.tensor([0]), torch.tensor([[0, 2, 3]]))
    view = pool.layer(0)
    values = view.kv.v[1, :3].float() * view.scales.v[1, :3, :, None]
    torch.testing.assert_close(values, k[[0, 2, 3]], rtol=2.0**-4, atol=1e-4)  # three bits of mantissa


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layout_that_a_backend_does_not_read_is_refused(name: str) -> None:
    use = use_of(WORKS[1], Shape())
    assert limit(BACKENDS[name], use) is None
    reason = limit(BACKENDS[name], replace(use, layout=LatentLayout.kind))
    assert reason == "it reads KV kept as heads, not as latent rows"
