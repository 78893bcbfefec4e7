"""Calls the Triton kernels for a layer's kind of view: K/V heads or latent rows. Plans do not depend on the kind. Used
by `aerie.attention.backends.triton_backend`."""

from dataclasses import dataclass

import triton
from torch import Tensor

from aerie.attention.limits import triton_head_dim_refusal, triton_latent_refusal
from aerie.kernels.attend.decode_plan_triton import (
    FIXED_LATENT_TILES,
    FIXED_LATENT_TILES_OF_FEW,
    DecodePlan,
    DecodeTiles,
    decode_tiles,
    latent_tiles,
)
from aerie.kernels.attend.decode_triton import attend_decode
from aerie.kernels.attend.fixed.fixed_prefill_triton import attend_fixed_prefill
from aerie.kernels.attend.latent_decode_triton import attend_latent
from aerie.kernels.attend.latent_prefill_triton import attend_latent_prefill, heads_of_tile, latent_prefill_tiles
from aerie.kernels.attend.prefill_triton import PrefillTiles, attend_prefill, prefill_tiles
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, PrefillBatch

# For backends with a span. Tiles of 16 rows and of 64 give a row the same bits: their instructions differ, the order of
# additions does not (H200).
# block_m, block_n, warps, stages, programs_per_sm, min_span
FIXED_TILES = DecodeTiles(64, 64, 4, 3, 2, 0)
FIXED_TILES_OF_FEW = DecodeTiles(16, 64, 4, 3, 2, 0)
WIDE_FIXED_TILES = DecodeTiles(64, 32, 8, 2, 1, 0)  # for heads of more than 256 dimensions


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer that determine its tiles.

    num_heads: query heads.
    num_kv_heads: K/V heads; 1 for latent rows, which all heads share.
    dim: output size of a head.
    rotated: size of a latent row's rotated part; None for K/V heads.
    itemsize: bytes per number of q.
    kv_itemsize: bytes per number of the cache.
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    rotated: int | None
    itemsize: int
    kv_itemsize: int

    @staticmethod
    def of(q: Tensor, kv: LayerKV | LatentKV) -> "LayerShape":
        """Return the sizes of a layer with queries like q (`Prepared.forward`). Raises ValueError if no tiles fit
        them."""
        if isinstance(kv, LatentKV):
            rotated = kv.rows.shape[2] - kv.latent
            shape = LayerShape(q.shape[1], 1, kv.latent, rotated, q.itemsize, kv.rows.itemsize)
            reason = triton_latent_refusal(kv.latent, rotated)
        else:
            shape = LayerShape(q.shape[1], kv.k.shape[2], kv.k.shape[3], None, q.itemsize, kv.k.itemsize)
            reason = triton_head_dim_refusal(shape.dim)
        if reason is not None:
            raise ValueError(f"attention backend 'triton': {reason}; choose another backend")
        return shape

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def decode_tiles(self, rows: int, density: float) -> DecodeTiles:
        """Return the tiles of a round. rows: rows per request. density: requests x KV heads / multiprocessors."""
        if self.rotated is None:
            return decode_tiles(rows * self.group, self.dim, self.itemsize, density, self.kv_itemsize)
        return latent_tiles(rows * self.group, self.itemsize, density, self.kv_itemsize)

    def fixed_tiles(self, rows: int) -> DecodeTiles:
        """Return the tiles of a round whose plan is fixed. rows: rows per request."""
        if self.rotated is not None:
            few = rows * self.group <= FIXED_LATENT_TILES_OF_FEW.block_m and self.kv_itemsize > 1 and not INTERPRETED
            return FIXED_LATENT_TILES_OF_FEW if few else FIXED_LATENT_TILES
        if self.dim > 256:
            return WIDE_FIXED_TILES
        return FIXED_TILES_OF_FEW if rows * self.group <= FIXED_TILES_OF_FEW.block_m else FIXED_TILES

    @property
    def fixed_prefill_tiles(self) -> PrefillTiles:
        """Tiles of prompt chunks with the columns of `fixed_tiles`."""
        if self.rotated is not None:
            tiles = FIXED_LATENT_TILES
            return PrefillTiles(tiles.block_m, tiles.block_n, tiles.warps, tiles.stages)
        block_n, group = self.fixed_tiles(1).block_n, self.group
        if INTERPRETED:
            return PrefillTiles(max(16, triton.next_power_of_2(group)), block_n, 1, 1)
        if self.dim <= 128:
            return PrefillTiles(max(128, triton.next_power_of_2(group)), block_n, 8, 3)
        return PrefillTiles(max(64, triton.next_power_of_2(group)), block_n, 8 if self.dim > 256 else 4, 2)

    @property
    def prefill_tiles(self) -> PrefillTiles:
        if self.rotated is None:
            return prefill_tiles(self.group, self.dim, self.itemsize, self.kv_itemsize)
        return latent_prefill_tiles(self.itemsize)

    def rows_of_prefill_tile(self, tiles: PrefillTiles) -> int:
        together = self.group if self.rotated is None else heads_of_tile(self.num_heads, tiles)
        return tiles.block_m // together

    def span(self, base: int | None) -> int | None:
        """Return the base size of spans in tokens. base: of K/V heads; None: without spans. Of latent rows there is one
        program for all heads, so shorter spans give more programs."""
        return base if base is None or self.rotated is None else base // 2

    def columns(self, rows: int, tiles: DecodeTiles) -> int:
        """Return the number of programs that compute one item: one for each KV head and block of query rows. rows: rows
        per request."""
        return self.num_kv_heads * -(-rows * self.group // tiles.block_m)


def attend_rows(
    q: Tensor,
    kv: LayerKV | LatentKV,
    batch: DecodeBatch,
    plan: DecodePlan,
    rule: ScoreRule,
    sinks: Tensor | None,
    early: bool,
) -> Tensor:
    """Run `attend_decode` or `attend_latent`. batch, plan: cut to the rule's window."""
    if isinstance(kv, LatentKV):
        assert rule.soft_cap is None and not rule.has_sinks, "refused by `aerie.attention.limits`"
        return attend_latent(q, kv, batch, plan, rule.scale, early)
    return attend_decode(q, kv, batch, plan, rule, sinks, early)


def attend_chunks(
    q: Tensor,
    kv: LayerKV | LatentKV,
    batch: PrefillBatch,
    tile_list: Tensor,
    tiles: PrefillTiles,
    rule: ScoreRule,
    sinks: Tensor | None,
    span: int | None = None,
) -> Tensor:
    """Run the kernel of prompt chunks for this kind of view; the one with spans if there is a `span`. batch: cut to the
    rule's window."""
    if isinstance(kv, LatentKV):
        assert rule.soft_cap is None and not rule.has_sinks, "refused by `aerie.attention.limits`"
        return attend_latent_prefill(q, kv, batch, tile_list, tiles, rule.scale, span)
    if span is not None:
        return attend_fixed_prefill(q, kv, batch, tile_list, tiles, span, rule, sinks)
    return attend_prefill(q, kv, batch, tile_list, tiles, rule, sinks)
