"""Attention by our Triton kernels: every mode, every length read on the device, safe to capture in a CUDA graph; also
of prompt chunks over keys and values computed from latent rows (`TritonExpandedChunks`).

Captured graphs of a `DecodeBatch` stay valid when lengths, page tables and masks change: only batch size, rows and
suffix are fixed. Those of a `PrefillBatch` stay valid when chunks change: only the numbers of rows and chunks are
fixed. A shape must run once before it is captured, which compiles its kernels and allocates its workspace. A backend is
used on one stream at a time, because all its layers and passes share the workspace.

The number of items that a request is split into depends on the other lengths in the batch, so the last bits of a row's
result may, too. Equal batches give equal bits. In a backend with a `span`, results depend on the row's own path only:
it splits all contexts at the same positions (`aerie.kernels.attend.fixed.spans_triton`). The results of spans are added
in order, in rounds and for prompt chunks. A token's KV then has the same bits whether the token was part of a prompt,
decoded or verified in a tree."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend, Prepared, assert_not_captured
from aerie.attention.backends.triton_kernels import FIXED_TILES, LayerShape, attend_chunks, attend_rows
from aerie.attention.expansion import ExpandedChunks
from aerie.kernels.attend.decode_plan_triton import MAX_SPLITS, DecodePlan, DecodeTiles, DecodeWorkspace, partial_rows
from aerie.kernels.attend.expanded_prefill_triton import attend_expanded, expanded_tiles
from aerie.kernels.attend.fixed.path_triton import plan_paths
from aerie.kernels.attend.prefill_plan_triton import plan_tiles
from aerie.kernels.attend.prefill_triton import PrefillTiles
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.attend.split_kv_triton import max_spans, plan_items, plan_spans, plan_whole_spans
from aerie.kernels.capability import Capability, num_multiprocessors
from aerie.kernels.kv.batches import DecodeBatch, ExpandedKV, LatentKV, LayerKV, PrefillBatch, newest_columns
from aerie.kernels.rope.rope_store import Angles


class TritonExpandedChunks(ExpandedChunks):
    """Expanded chunks for our kernel. Lists their tiles once per pass."""

    def attend(self, q: Tensor, made: ExpandedKV, angles: Angles, scale: float, out: Tensor) -> Tensor:
        tiles = expanded_tiles(q.itemsize)
        if tiles.block_m not in self.tile_lists:
            self.tile_lists[tiles.block_m] = plan_tiles(self.batch, tiles.block_m)
        if self.batch.is_padded:
            out.zero_()
        return attend_expanded(q, made, angles, self.tile_lists[tiles.block_m], tiles, scale, out)


CPU_MULTIPROCESSORS = 8  # in Triton's interpreter: enough to split short contexts

MERGED_AT_ONCE = 8  # partial results that a merging program loads at a time; measured, see tests/bench/EXPERIMENTS.md
LATENT_MERGED_AT_ONCE = 16  # the same over latent rows: a request of up to 1,024 tokens is merged in one step

FIXED_SPAN = 128  # base size of spans in tokens: short contexts, too, are read by several programs


def deterministic() -> "TritonBackend":
    """Return a backend whose results depend on a row's own path only."""
    return TritonBackend(FIXED_SPAN)


class TritonBackend(AttentionBackend):
    """Our Triton kernels.

    span: base size of spans in tokens (see the head of this module), a multiple of FIXED_TILES.block_n; of latent rows
        half of it. None: split for speed.
    """

    name = "triton"

    def __init__(self, span: int | None = None) -> None:
        assert span is None or span % FIXED_TILES.block_n == 0
        self.span = span
        self._workspaces: dict[tuple[torch.device, DecodeTiles, int], DecodeWorkspace] = {}
        self._outgrown: list[DecodeWorkspace] = []  # captured graphs hold their addresses

    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        if isinstance(batch, DecodeBatch):
            return _PreparedDecode(batch, self)
        return _PreparedPrefill(batch, self.span)

    def expand(self, batch: PrefillBatch, page_size: int) -> ExpandedChunks | None:
        return None if self.span is not None else TritonExpandedChunks.of(batch, page_size)

    def workspace(self, tiles: DecodeTiles, head_dim: int, device: torch.device) -> DecodeWorkspace:
        """Return the buffers for programs of this shape. They are never freed, because captured graphs hold their
        addresses."""
        key = (device, tiles, head_dim)
        if key not in self._workspaces:
            assert_not_captured(self.name, device, lambda: self.workspace(tiles, head_dim, device))
            num_programs = _num_multiprocessors(device) * tiles.programs_per_sm
            self._workspaces[key] = DecodeWorkspace.create(tiles, head_dim, num_programs, device)
        return self._workspaces[key]

    def fixed_workspace(
        self, tiles: DecodeTiles, num_rows: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Return memory for partials of num_rows rows (all items x columns), at 4 * (head_dim + 1) bytes per row.
        Graphs are captured from the largest batch down, so it is rarely allocated twice. 32 requests of up to 8,192
        tokens, with 4 rows and 8 KV heads of 4 query heads of 128 values each, take 21 MB."""
        key = (device, tiles, head_dim)
        held = self._workspaces.get(key)
        if held is None or held.lse.shape[0] < num_rows:
            assert_not_captured(self.name, device, lambda: self.fixed_workspace(tiles, num_rows, head_dim, device))
            if held is not None:
                self._outgrown.append(held)
            self._workspaces[key] = DecodeWorkspace.for_separate_merge(num_rows, head_dim, device)
        return self._workspaces[key]


@dataclass(frozen=True)
class _PreparedDecode(Prepared):
    """A pass of rounds.

    plans: by shape and window of layers, each with the batch cut to that window. Built by the first layer of each kind.
    """

    batch: DecodeBatch
    backend: TritonBackend
    plans: dict[tuple[LayerShape, int | None], tuple[DecodeBatch, DecodePlan]] = field(default_factory=dict)

    def plan(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule) -> bool:
        shape = LayerShape.of(q, kv)
        key = shape, rule.window
        is_new = key not in self.plans
        if is_new:
            fixed = self.backend.span is not None
            batch = _with_newest_columns(self.batch.for_window(rule.window), fixed)
            page_size = (kv.rows if isinstance(kv, LatentKV) else kv.k).shape[1]
            plan = (
                plan_fixed(batch, shape, self.backend, page_size) if fixed else plan_decode(batch, shape, self.backend)
            )
            self.plans[key] = batch, plan
        return is_new  # the attention kernel that follows is a fence for later layers

    def forward(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        key = LayerShape.of(q, kv), rule.window
        planned = key in self.plans  # else the preceding kernel writes the plan, and must have ended
        self.plan(q, kv, rule)
        batch, plan = self.plans[key]
        return attend_rows(q, kv, batch, plan, rule, sinks, early=planned)


def _with_newest_columns(batch: DecodeBatch, fixed: bool) -> DecodeBatch:
    """Return the batch with a sliding window applied to its trees: each node's mask has only the newest `window` nodes
    of its path. Trees of at most `window` nodes need no change.

    Kernels apply the window to the prefix themselves, because they know how many nodes a row's path has. They do not
    know which nodes of a tree come early on the path, except in chains.

    fixed: the kernels of fixed plans know it, because they read paths in order.
    """
    if batch.window is None or batch.window >= batch.suffix_len or batch.is_causal or fixed:
        return batch
    return replace(batch, mask=newest_columns(batch.mask, batch.suffix_len, batch.window))


def plan_decode(batch: DecodeBatch, shape: LayerShape, backend: TritonBackend) -> DecodePlan:
    """Return the plan of a backend without a span: split the KV of requests into items (split-KV), so that programs
    fill the device, and choose how the items' partial results are merged. Launches one small kernel.

    shape: of the layers that the plan is for.
    backend: has the workspace of the partial results.
    """
    device = batch.prefix_len.device
    multiprocessors = _num_multiprocessors(device)
    tiles = shape.decode_tiles(batch.rows, batch.num_requests * shape.num_kv_heads / multiprocessors)
    budget = multiprocessors * tiles.programs_per_sm // shape.columns(batch.rows, tiles)  # items that run at a time
    items = plan_items(
        batch.prefix_len, batch.suffix_len, budget, tiles.min_span, tiles.block_n, MAX_SPLITS, batch.window
    )
    # The host does not know the lengths. With equal ones, each request has this many items.
    usual_splits = min(MAX_SPLITS, budget // batch.num_requests)
    max_at_once = MERGED_AT_ONCE if shape.rotated is None else LATENT_MERGED_AT_ONCE
    return DecodePlan(
        tiles,
        items,
        backend.workspace(tiles, shape.dim, device),
        merges_separately=usual_splits > 1 and not tiles.rarely_splits,
        merged_at_once=min(max_at_once, 1 << max(1, (usual_splits - 1).bit_length())),
    )


def plan_fixed(batch: DecodeBatch, shape: LayerShape, backend: TritonBackend, page_size: int) -> DecodePlan:
    """Return the plan of a backend with a span: a row's result does not depend on other requests. Launches one small
    kernel, for trees two."""
    device, span, tiles = batch.prefix_len.device, shape.span(backend.span), shape.fixed_tiles(batch.rows)
    assert span is not None
    partials = max_spans(batch.suffix_len, span, batch.max_kv_len, batch.window)
    columns = shape.columns(batch.rows, tiles)
    leads = shape.rotated is None and shape.dim <= 128  # more dimensions leave no registers for a second sum
    paths = None
    if shape.rotated is None:
        partials += 1
        budget = max(1, _num_multiprocessors(device) * tiles.programs_per_sm // columns)
        items = plan_whole_spans(
            *(batch.prefix_len, batch.suffix_len, budget, tiles.block_n, span, MAX_SPLITS),
            *(batch.max_kv_len, batch.window, not batch.is_causal, leads),
        )
        paths = None if batch.is_causal else plan_paths(batch, page_size, tiles.block_n)
    else:
        items = plan_spans(batch.prefix_len, batch.suffix_len, span, batch.max_kv_len, batch.window)
    num_rows = partials * batch.num_requests * columns * partial_rows(tiles, batch.rows * shape.group)
    workspace = backend.fixed_workspace(tiles, num_rows, shape.dim, device)
    return DecodePlan(tiles, items, workspace, True, MERGED_AT_ONCE, fixed=True, span=span, leads=leads, paths=paths)


def _num_multiprocessors(device: torch.device) -> int:
    return num_multiprocessors(device) if Capability.of(device).is_gpu else CPU_MULTIPROCESSORS


@dataclass(frozen=True)
class _PreparedPrefill(Prepared):
    """A pass of prompt chunks.

    span: the backend's span of deterministic sums.
    plans: by shape of layers, built by the first such layer. Windows do not affect them.
    """

    batch: PrefillBatch
    span: int | None
    plans: dict[LayerShape, tuple[PrefillTiles, Tensor]] = field(default_factory=dict)

    def plan(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule) -> bool:
        shape = LayerShape.of(q, kv)
        is_new = shape not in self.plans
        self._plan(shape)
        return is_new

    def forward(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        shape = LayerShape.of(q, kv)
        tiles, tile_list = self._plan(shape)
        span = shape.span(self.span)
        return attend_chunks(q, kv, self.batch.for_window(rule.window), tile_list, tiles, rule, sinks, span)

    def _plan(self, shape: LayerShape) -> tuple[PrefillTiles, Tensor]:
        if shape not in self.plans:
            tiles = shape.prefill_tiles if self.span is None else shape.fixed_prefill_tiles
            self.plans[shape] = (tiles, plan_tiles(self.batch, shape.rows_of_prefill_tile(tiles)))
        return self.plans[shape]
