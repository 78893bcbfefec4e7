"""The uses that every attention backend is compared on, and batches of them as production makes them: pages in any
order, zeros in a page table after a request's end, and the padding rows of a captured bucket, whose prefix is 0 and
whose page table is the dummy page's. Used by the conformance suite, its matrix and the benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aerie.attention.kv_cache.layout import HeadsLayout, KVLayout, LatentLayout, LayerGroup
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.limits import AttentionUse
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, Mode, PrefillBatch, causal_mask
from aerie.kernels.kv.stored_values import FP8, KVScales, stored

NUM_KV_HEADS = 2
ROWS = 6  # of a verified tree or an accepted path
TOP_K = 3
STEPS_BEFORE = 2  # drafting steps whose columns a draft row may see, beside its own
H200 = (9, 0)

# Of a request's lengths before a pass; the last two are padding. The second set is for a replay: other requests pad.
LENGTHS = ((1, 17, 63, 200, 1021, 0, 0), (129, 0, 2050, 5, 64, 31, 0))
CHUNKS = ((0, 40), (33, 1), (5, 130), (1000, 64))  # start and rows
MAX_LENGTH = 4096


@dataclass(frozen=True)
class Work:
    """A mode with its mask: rows of a request and columns after its prefix. window: of a draft that has one. rule: of
    layers that do more than a softmax; its scale is the shape's."""

    name: str
    mode: Mode
    rows: int = 1
    suffix_len: int = 1
    tree: bool = False
    window: int | None = None
    rule: ScoreRule | None = None


WORKS = (
    Work("prefill", Mode.PREFILL),
    Work("decode", Mode.DECODE),
    Work("verify a chain", Mode.VERIFY, ROWS, ROWS),
    Work("verify a tree", Mode.VERIFY, ROWS, ROWS, tree=True),
    Work("draft_extend", Mode.DRAFT_EXTEND, ROWS, ROWS),
    Work("draft_decode a chain", Mode.DRAFT_DECODE, 1, STEPS_BEFORE + 1),
    Work("draft_decode a tree", Mode.DRAFT_DECODE, TOP_K, TOP_K * (STEPS_BEFORE + 1), tree=True),
)
RULED = tuple(
    replace(work, name=f"{work.name} by {name}", rule=rule)
    for work in WORKS
    for name, rule in (
        ("a window and sinks", ScoreRule(1.0, window=100, has_sinks=True)),
        ("a soft cap", ScoreRule(1.0, soft_cap=2.0)),
    )
)
# What a draft with a window does.
WINDOWED = tuple(
    replace(work, name=f"{work.name} in a window", window=100)
    for work in WORKS
    if work.mode in (Mode.PREFILL, Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE)
)


@dataclass(frozen=True)
class Shape:
    """What a model and a cache fix. latent: of latent rows, which all heads share, the part that is values too.
    kv_dtype: of the cache; None: the model's."""

    head_dim: int = 128
    group: int = 4
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    latent: int | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def num_kv_heads(self) -> int:
        return NUM_KV_HEADS if self.latent is None else 1

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @property
    def layout(self) -> KVLayout[Any]:
        dtype = self.kv_dtype or self.dtype
        if self.latent is None:
            return HeadsLayout(NUM_KV_HEADS, self.head_dim, dtype)
        return LatentLayout(self.latent, self.head_dim - self.latent, dtype)

    @property
    def name(self) -> str:
        kept = "" if self.latent is None else f"l{self.latent}-"
        cache = "" if self.kv_dtype is None else "-fp8"
        return f"{kept}d{self.head_dim}-g{self.group}-p{self.page_size}-{str(self.dtype).removeprefix('torch.')}{cache}"


# Each value of each dimension with the others usual, then two unusual in all.
SHAPES = (
    Shape(),
    Shape(head_dim=64),
    Shape(group=1),
    Shape(group=8),
    Shape(page_size=1),
    Shape(page_size=64),
    Shape(dtype=torch.float16),
    Shape(64, 8, 64),
    Shape(128, 1, 1, torch.float16),
    Shape(kv_dtype=FP8),
    Shape(64, 8, 64, torch.float16, kv_dtype=FP8),
    Shape(256, 2, 1, kv_dtype=FP8),
)
# DeepSeek's latent rows, and the heads of one of eight ranks, of one of four, and of all.
LATENT_SHAPES = (
    Shape(576, 16, 64, latent=512),
    Shape(576, 16, 1, latent=512),
    Shape(576, 16, 16, torch.float16, latent=512),
    Shape(576, 32, 16, latent=512),
    Shape(576, 128, 64, latent=512),
    Shape(48, 5, 4, latent=32),
    Shape(576, 16, 64, latent=512, kv_dtype=FP8),
    Shape(48, 5, 4, torch.float16, latent=32, kv_dtype=FP8),
)
SCALES = KVScales(0.75, 1.3)  # of layers in FP8


def use_of(work: Work, shape: Shape, device: str = "cuda", capability: tuple[int, int] | None = H200) -> AttentionUse:
    return AttentionUse(
        work.mode,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        shape.dtype,
        Capability(device, capability if device == "cuda" else None),
        work.tree,
        shape.layout.kind,
        shape.latent,
        work.window,
        shape.kv_dtype or shape.dtype,
        () if work.rule is None else (work.rule,),
    )


def uniform_pool(
    num_layers: int, num_pages: int, page_size: int, layout: KVLayout[Any], device: torch.device
) -> KVPool:
    """Empty, of layers that are all alike."""
    layers = tuple(range(num_layers))
    return KVPool([LayerGroup(layers, layout)], num_pages, page_size, device, dict.fromkeys(layers, SCALES))


def random_pool(shape: Shape, num_pages: int, device: torch.device) -> KVPool:
    """All pages filled, those of nobody and page 0 too: what a kernel must not read would be seen."""
    pool = uniform_pool(1, num_pages, shape.page_size, shape.layout, device)
    fill_randomly(pool)
    return pool


def fill_randomly(pool: KVPool) -> None:
    for tensor in pool.tensors[0]:
        if tensor.dtype == FP8:
            tensor.view(torch.uint8).copy_(stored(torch.randn(tensor.shape), FP8, 1.0).view(torch.uint8))
        else:
            tensor.normal_()


def write_tokens(kv: LayerKV, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [n, kv_heads, head_dim] as they are, at token indices slot_mapping [n] int64."""
    for pages, rows in ((kv.k, k), (kv.v, v)):
        pages.view(-1, *rows.shape[1:]).index_copy_(0, slot_mapping, rows)


def random_table(lengths: Sequence[int], page_size: int, width: int) -> Tensor:
    """[len(lengths), width] int32 of distinct pages in random order, zeros after a request's end. 0: padding."""
    counts = [-(-n // page_size) for n in lengths]
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    pages = (torch.randperm(sum(counts)) + 1).int().split(counts)
    for row, mine in zip(table, pages, strict=True):
        row[: len(mine)] = mine
    return table


def decode_batch(work: Work, shape: Shape, prefixes: Sequence[int], device: torch.device) -> DecodeBatch:
    """Requests of these prefixes; prefix 0 makes a padding row."""
    lengths = [n + work.suffix_len if n else 0 for n in prefixes]
    table = random_table(lengths, shape.page_size, MAX_LENGTH // shape.page_size)
    prefix = torch.tensor(prefixes, dtype=torch.int32)
    max_kv_len = max(prefixes) + work.suffix_len
    return DecodeBatch(
        work.mode,
        work.rows,
        work.suffix_len,
        prefix.to(device),
        mask_of(work, len(prefixes)).to(device),
        table.to(device),
        max_kv_len,
        chain=work.mode is Mode.VERIFY and not work.tree,
        window=work.window,
    )


def mask_of(work: Work, num_requests: int) -> Tensor:
    """[num_requests, rows] int64: as a chain, a path or a random tree has them; branches of a draft tree continue a
    random node of each step before."""
    if work.mode is Mode.DRAFT_DECODE:
        return _draft_mask(work, num_requests)
    if not work.tree:
        return causal_mask(num_requests, work.rows, torch.device("cpu")).contiguous()
    masks = torch.ones((num_requests, work.rows), dtype=torch.int64)
    for request in masks:
        for node in range(1, work.rows):
            parent = int(torch.randint(0, node, ()))
            request[node] = request[parent] | 1 << node
    return masks


def _draft_mask(work: Work, num_requests: int) -> Tensor:
    masks = torch.zeros((num_requests, work.rows), dtype=torch.int64)
    for step in range(work.suffix_len // work.rows):
        parent = torch.randint(0, work.rows, masks.shape) if step else torch.arange(work.rows).expand(masks.shape)
        own = torch.arange(step * work.rows, (step + 1) * work.rows)
        masks = masks.gather(1, parent) | 1 << own
    return masks


def prefill_batch(shape: Shape, device: torch.device, window: int | None = None) -> PrefillBatch:
    lengths = [start + rows for start, rows in CHUNKS]
    table = random_table(lengths, shape.page_size, MAX_LENGTH // shape.page_size)
    starts, counts = zip(*CHUNKS, strict=True)
    return replace(PrefillBatch.from_lists(starts, counts, table.to(device)), window=window)


def num_pages(page_size: int, suffix_len: int) -> int:
    """Enough for each of `LENGTHS` and for `CHUNKS`."""
    assert max(map(max, LENGTHS)) + suffix_len <= MAX_LENGTH
    requests = [*LENGTHS, [start + rows for start, rows in CHUNKS]]
    return max(sum(-(-(n + suffix_len) // page_size) for n in lengths) for lengths in requests)


def random_rows(num_rows: int, shape: Shape, device: torch.device) -> Tensor:
    """[num_rows, heads, head_dim] as a model has them: a part of a packed product."""
    packed = torch.randn((num_rows, shape.num_heads + 2 * NUM_KV_HEADS, shape.head_dim), device=device)
    return packed.to(shape.dtype)[:, : shape.num_heads]


def in_float64(kv: LayerKV | LatentKV) -> LayerKV | LatentKV:
    if isinstance(kv, LatentKV):
        return LatentKV(kv.rows.float().double() * kv.scale, kv.latent)
    return LayerKV(kv.k.float().double() * kv.k_scale, kv.v.float().double() * kv.v_scale)
