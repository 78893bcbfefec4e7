"""`aerie.kernels`: rows of rounds and chunks with padding, page sizes from 1 on, paths that overlap, chunks
without rows, more chunks than a kernel looks at together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, LayerKV, Mode, PrefillBatch, causal_mask
from aerie.kernels.kv.slot_mapping import map_decode_rows, map_prefill_rows, move_path
from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles, rope, rope_store
from aerie.kernels.rope.rotate_heads import rotate_heads
from tests.kernels.ops.case import TYPES, Case

Arguments = Callable[[torch.device], tuple[Any, ...]]
LAYERS, PAGES = 2, 24
EIGHT_BITS = 32 / 448  # a number on the border of two of eight bits may become either
NORMED_EIGHT_BITS = 2.0**-3  # the same, if the largest number does not saturate
# A chain that stays, trees whose path moves over itself, a path that ends at once.
PATHS = ((0, 1, 3, 4), (0, 2, 3, 0), (0, 0, 0, 0), (0, 3, 4, 0), (0, 4, 5, 7))
CHUNKS = (
    ((0,), (1,)),
    ((0, 5, 33, 0), (7, 1, 20, 30)),
    (tuple(range(0, 40 * 16, 16)), tuple(n % 23 for n in range(40))),
    ((4096, 0), (300, 5)),
)


def _numbers(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes) + seed)).to(dtype)


def _table(requests: int, width: int) -> Tensor:
    """[requests, width] int32 of pages in any order, a part of a wider table."""
    generator = torch.Generator().manual_seed(width)
    return torch.randint(1, PAGES, (requests, width + 3), dtype=torch.int32, generator=generator)[:, :width]


def _decode(rows: int, suffix_len: int, page_size: int) -> Arguments:
    def arguments(device: torch.device) -> tuple[Any, ...]:
        prefix = torch.tensor([0, 3, 17, 54], dtype=torch.int32, device=device)
        mask = causal_mask(4, rows, device)
        table = _table(4, 70).to(device)
        return DecodeBatch(Mode.VERIFY, rows, suffix_len, prefix, mask, table, 70), page_size

    return arguments


def _prefill(
    starts: Sequence[int], counts: Sequence[int], padding: int, page_size: int, recomputed: int | None = None
) -> Arguments:
    """Two chunks without rows come after them. recomputed: rows of each chunk, more by one of the next, whose KV is
    there."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        width = -(-max(start + count for start, count in zip(starts, counts, strict=True)) // page_size)
        table = _table(len(starts) + 2, width)
        table[-2:] = 0
        batch = PrefillBatch.from_lists(starts, counts, table.to(device), sum(counts) + padding)
        if recomputed is not None:
            more = torch.arange(batch.num_chunks, dtype=torch.int32, device=device)
            batch = replace(batch, store_from=batch.starts + recomputed + more)
        return batch, page_size

    return arguments


def _move(page_size: int, *tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Arguments:
    """tokens: the shape of a token's part of each tensor."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        tensors = tuple(
            _numbers(LAYERS, PAGES + 1, page_size, *shape, seed=seed).to(dtype).to(device)
            for seed, shape in enumerate(tokens)
        )
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(page_size)) + 1
        width = PAGES // len(PATHS)
        if page_size < 3:  # a page has few tokens: one request's pages must hold its path
            paths, table = PATHS[-1:], pages.view(1, -1)
        else:
            paths, table = PATHS, pages[: width * len(PATHS)].view(len(PATHS), width)
        length = torch.tensor([0, 2, 1, 3, 1][: len(paths)], dtype=torch.int32, device=device)
        return tensors, table.int().to(device), length, torch.tensor(paths, device=device)

    return arguments


@dataclass(frozen=True)
class _Norms:
    """Norms of a case. weight: dtype of their weights. gated: a gate lies after each query head. values: values are
    normed, and are the keys before their norm."""

    weight: torch.dtype
    gated: bool = False
    values: bool = False

    def of(self, head_dim: int, device: torch.device) -> HeadNorms:
        q, k = (1.0 + 0.3 * _numbers(2, head_dim)).to(self.weight).to(device).unbind()
        return HeadNorms(q, k, 1e-5, self.values)


def _rope(
    group: int,
    head_dim: int,
    rotated: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    norms: _Norms | None = None,
    rows: int = 7,
    heads: int = 2,
) -> Arguments:
    """Parts of one product; slots in no order. One key and one value are NaN, which Triton's interpreter (3.6) does not
    have in FP8. In FP8, some keys and values saturate."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        num_pages, generator = 5 + rows // 16, torch.Generator().manual_seed(rows)
        slots = torch.randperm(num_pages * 16, generator=generator)[:rows].to(device)
        index = torch.randint(0, 40, (rows,), generator=generator).to(device)
        step, same = (1, False) if norms is None else (1 + norms.gated, norms.values)
        num_q = step * group * heads
        packed = _numbers(rows, num_q + (2 - same) * heads, head_dim, dtype=dtype).to(device)
        angles = _numbers(40, rotated // 2).to(device) * 6
        if kv_dtype is not None:
            packed *= torch.logspace(-4, 4, rows, device=device, dtype=dtype).view(-1, 1, 1)
        q, k, v = packed[:, :num_q:step], packed[:, num_q : num_q + heads], packed[:, -heads:]
        if rows > 2 and (kv_dtype is None or device.type == "cuda"):
            k[1, 0, 0] = v[2, 1, 3] = float("nan")
        pages = torch.zeros((2, num_pages, 16, heads, head_dim), dtype=kv_dtype or dtype, device=device)
        kv = LayerKV(*pages.unbind(), *((0.3, 1.7) if kv_dtype else (1.0, 1.0)))
        of_heads = None if norms is None else norms.of(head_dim, device)
        return q, k, v, Angles(angles.cos(), angles.sin(), index), kv, slots, of_heads

    return arguments


def _queries(heads: int, head_dim: int, rotated: int, dtype: torch.dtype, norms: _Norms | None = None) -> Arguments:
    """A part of a product."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        q = _numbers(5, heads + 2, head_dim, dtype=dtype).to(device)[:, :heads]
        angles = _numbers(40, rotated // 2).to(device) * 6
        of_heads = None if norms is None else replace(norms.of(head_dim, device), k=None)
        index = torch.tensor([39, 4, 4, 0, 17], device=device)
        return q, Angles(angles.cos(), angles.sin(), index), of_heads

    return arguments


def _heads_and_angles(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Arguments:
    """Queries and keys beside values, and angles beside others."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        angles = 6 * _numbers(rows, head_dim)
        cos, sin = (each.to(device)[:, : head_dim // 2] for each in (angles.cos(), angles.sin()))
        return _numbers(rows, heads + 3, head_dim, dtype=dtype).to(device)[:, :heads], cos, sin

    return arguments


NORMED = (
    (4, 128, 128, torch.bfloat16, None, _Norms(torch.bfloat16), 7),
    (8, 256, 64, torch.float16, None, _Norms(torch.float32, gated=True), 7),
    (3, 96, 80, torch.float32, None, _Norms(torch.float32), 7),
    (5, 16, 2, torch.float16, None, _Norms(torch.float16, gated=True), 1),
    (1, 512, 512, torch.float16, None, _Norms(torch.float32, values=True), 7),
    (2, 16, 16, torch.float32, None, _Norms(torch.float32, values=True), 0),
    (4, 128, 128, torch.float16, FP8, _Norms(torch.float16), 7),
    (6, 256, 64, torch.bfloat16, FP8, _Norms(torch.float32, gated=True, values=True), 7),
)


CASES = (
    *(
        Case(map_decode_rows, f"{rows}-of-{suffix}-pages-of-{page}", _decode(rows, suffix, page), exact=True)
        for rows, suffix, page in ((1, 1, 1), (4, 4, 16), (3, 9, 4), (7, 7, 64))
    ),
    *(
        Case(
            map_prefill_rows,
            f"{len(starts)}-chunks-padding-{padding}-pages-of-{page}",
            _prefill(starts, counts, padding, page),
            exact=True,
        )
        for starts, counts in CHUNKS
        for padding in (0, 37)
        for page in (1, 16)
    ),
    Case(
        map_prefill_rows,
        "recomputed-rows-write-to-page-0",
        _prefill((0, 5, 32, 0), (7, 1, 20, 30), 5, 4, recomputed=4),
        exact=True,
    ),
    *(
        Case(move_path, name, arguments, written=(0,), exact=True)
        for name, arguments in {
            "pages-of-1": _move(1, (2, 16), (2, 16)),
            "pages-of-16": _move(16, (8, 128), (8, 128), dtype=torch.bfloat16),
            "odd-heads": _move(4, (3, 32), (3, 32)),
            "latent-rows": _move(4, (48,), dtype=torch.bfloat16),
            "wide-latent-rows": _move(16, (576,), dtype=torch.bfloat16),
            "fp8": _move(16, (8, 64), (8, 64), dtype=FP8),
            "fp8-latent-rows": _move(4, (48,), dtype=FP8),
        }.items()
    ),
    *(
        Case(
            rope_store,
            f"group-{group}-head_dim-{head_dim}-{rotated}-{dtype}",
            _rope(group, head_dim, rotated, dtype),
            written=(6,),
        )
        for group, head_dim, rotated, dtype in (
            (1, 16, 16, torch.float32),
            (3, 32, 32, torch.bfloat16),
            (4, 128, 128, torch.float16),
            (7, 64, 64, torch.bfloat16),
            (6, 256, 64, torch.bfloat16),
            (2, 16, 4, torch.float32),
        )
    ),
    *(
        Case(
            rope_store,
            f"normed-{group}-{head_dim}-{rotated}-{dtype}-{kv_dtype}-{norms.weight}-{norms.gated}-{norms.values}-{rows}",
            _rope(group, head_dim, rotated, dtype, kv_dtype, norms, rows),
            written=(6,),
            tolerance=NORMED_EIGHT_BITS if kv_dtype else None,
        )
        for group, head_dim, rotated, dtype, kv_dtype, norms, rows in NORMED
    ),
    *(
        Case(rope, f"normed-{heads}-{head_dim}-{rotated}", _queries(heads, head_dim, rotated, torch.float16, norms))
        for heads, head_dim, rotated, norms in (
            (8, 512, 512, _Norms(torch.float32)),
            (5, 48, 12, _Norms(torch.float16)),
        )
    ),
    *(
        Case(
            rope_store,
            f"rows-{rows}-heads-{heads}-group-{group}-head_dim-{head_dim}-{norms is not None}",
            _rope(group, head_dim, 8, torch.float32, None, norms, rows, heads),
            written=(6,),
        )
        for rows, heads, group, head_dim, norms in (
            (0, 2, 1, 16, None),
            (5, 2, 0, 16, None),
            (5, 3, 0, 200, _Norms(torch.float32)),
            (17, 3, 3, 40, _Norms(torch.float32, gated=True)),
            (5, 3, 3, 200, _Norms(torch.float32, gated=True)),
        )
    ),
    *(
        Case(
            rope,
            f"heads-{heads}-head_dim-{head_dim}-{rotated}-{dtype}",
            _queries(heads, head_dim, rotated, dtype),
        )
        for heads, head_dim, rotated, dtype in (
            (3, 16, 16, torch.float32),
            (8, 512, 512, torch.bfloat16),
            (5, 64, 16, torch.bfloat16),
        )
    ),
    *(
        Case(
            rope_store,
            f"fp8-group-{group}-head_dim-{head_dim}-{rotated}-{dtype}",
            _rope(group, head_dim, rotated, dtype, FP8),
            written=(6,),
            tolerance=EIGHT_BITS,
        )
        for group, head_dim, rotated, dtype in (
            (1, 16, 16, torch.float32),
            (3, 32, 32, torch.bfloat16),
            (4, 128, 128, torch.float16),
            (6, 256, 64, torch.bfloat16),
        )
    ),
    *(
        Case(
            rotate_heads,
            f"rows-{rows}-heads-{heads}-head_dim-{head_dim}-{dtype}",
            _heads_and_angles(rows, heads, head_dim, dtype),
            written=(0,),
            seen=lambda given, _: given[0],
        )
        for rows, heads, head_dim in ((1, 2, 8), (19, 32, 80), (33, 11, 72), (16, 8, 64), (0, 4, 16))
        for dtype in TYPES
    ),
)
