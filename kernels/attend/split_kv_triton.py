# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Cuts the contexts of a batch into items of similar length, on the device, for a grid that is fixed at capture.

An item is a span of one request's KV (a split, in flash-decoding); one program per KV head reads it. The grid has
`num_requests + budget` items; unused ones are marked idle. A pass plans once for all layers.

In fixed plans, items end where spans of `spans_triton` do. Of K/V heads an item is one or several of them
(`plan_whole_spans`), of latent rows one (`plan_spans`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.fixed.spans_triton import num_spans, span_of, span_start
from aerie.kernels.attend.tree_mask_triton import first_seen

# Fields of an item: request or IDLE; first KV position; end position; index of its partial result among all requests';
# that index of the request's first item; the request's number of items.
ITEM_FIELDS = tl.constexpr(8)  # six are used; with eight an item does not cross a 32-byte sector
IDLE = tl.constexpr(-1)  # in place of the request: an unused item
CHUNK = tl.constexpr(16)  # items of each request that are written at a time
IDLE_AT_ONCE = tl.constexpr(512)  # unused items that are marked at a time
SPANS = tl.constexpr(8)  # candidate spans: 1 to 2.75 times the minimum, with smaller steps between short ones
SPANS_BLOCK = 64  # spans of a program of the fixed planner; the longest request must not choose the kernel


@triton.jit
def _span(least, number):
    return least + least * (number * (number + 1) // 2) // 16


@triton.jit
def _best_span(length, budget, min_span, tile, MAX_SPLITS: tl.constexpr):
    """Return the candidate span with which all items end soonest if `budget` of them run at a time; among equals, the
    longest.

    length: [requests] tokens.
    min_span, tile: minimum tokens of an item, and the number of which its length is a multiple.
    MAX_SPLITS: maximum items of a request.
    """
    total = tl.sum(length, 0)
    least = tl.maximum(tl.cdiv(total, budget), min_span)
    number = tl.arange(0, SPANS)
    span = _span(least, number)
    count = tl.minimum(tl.cdiv(length[:, None], span[None, :]), MAX_SPLITS)
    even = tl.cdiv(tl.cdiv(length[:, None], tl.maximum(count, 1)), tile) * tile
    longest = tl.max(even, 0).to(tl.int64)
    waves = tl.cdiv(tl.sum(count, 0), budget)
    # Items start as soon as there is room, not in waves.
    time = tl.minimum(waves * (longest + tile), tl.cdiv(total, budget) + longest + tile)
    best = tl.min(time * SPANS + SPANS - 1 - number, 0)
    return _span(least, SPANS - 1 - (best % SPANS).to(tl.int32))


@triton.jit
def _store_items(item, request, low, high, partial, first, count, used):
    """Store the fields of items, in their order (`ITEM_FIELDS`).

    item: addresses of the items; the fields are broadcast to their shape.
    request, low, high: request, first position and end position.
    partial, first, count: index of the item's partial result, of the request's first one, and the request's items.
    used: whether an item is stored.
    """
    tl.store(item, request, mask=used)
    tl.store(item + 1, low, mask=used)
    tl.store(item + 2, high, mask=used)
    tl.store(item + 3, partial, mask=used)
    tl.store(item + 4, first, mask=used)
    tl.store(item + 5, count, mask=used)


@triton.jit
def _store_requests(requests_ptr, request, first, count, present):
    tl.store(requests_ptr + 2 * request, first, mask=present)
    tl.store(requests_ptr + 2 * request + 1, count, mask=present)


@triton.jit
def _store_idle(items_ptr, used, num_items):
    """Mark items `used` .. num_items - 1 as idle."""
    for start in range(used, num_items, IDLE_AT_ONCE):
        rest = start + tl.arange(0, IDLE_AT_ONCE)
        tl.store(items_ptr + rest * ITEM_FIELDS, rest * 0 + IDLE, mask=rest < num_items)


@triton.jit(do_not_specialize=["suffix_len", "num_requests", "budget", "min_span", "num_items", "tile"])
def _plan_items(
    prefix_ptr,
    items_ptr,
    requests_ptr,
    suffix_len,
    num_requests,
    budget,
    min_span,
    num_items,
    tile,
    MAX_SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Cut each request into `count` items of equal length, a multiple of `tile` and at least min_span, so that all
    requests have about `budget` items.

    prefix_ptr: [num_requests] tokens before the suffix_len new ones.
    items_ptr: [num_items, ITEM_FIELDS] int32, written.
    requests_ptr: [num_requests, 2] index of a request's first partial result and number of its items, written.
    MAX_SPLITS: maximum items of a request. REQUESTS: num_requests, padded.
    WINDOW: tokens that a row sees; 0: all.
    """
    request = tl.arange(0, REQUESTS)
    present = request < num_requests
    length = tl.where(present, tl.load(prefix_ptr + request, mask=present, other=0) + suffix_len, 0)
    end = length
    if WINDOW:
        origin = tl.maximum(length - suffix_len + 1 - WINDOW, 0) // tile * tile
        length -= origin
    # With spans of total / budget, rounding adds less than one item per request: at most budget + num_requests.
    span = _best_span(length, budget, min_span, tile, MAX_SPLITS)
    count = tl.minimum(tl.cdiv(length, span), MAX_SPLITS)
    even = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), tile) * tile
    count = tl.cdiv(length, tl.maximum(even, 1))
    start = tl.cumsum(count, 0) - count
    partials = tl.where(count > 1, count, 0)
    first = tl.cumsum(partials, 0) - partials
    for chunk in range(0, tl.max(count, 0), CHUNK):
        i = chunk + tl.arange(0, CHUNK)[None, :]
        item = items_ptr + (start[:, None] + i) * ITEM_FIELDS
        used = i < count[:, None]
        low = i * even[:, None]
        if WINDOW:
            low += origin[:, None]
        high = tl.minimum(low + even[:, None], end[:, None])
        _store_items(item, request[:, None], low, high, first[:, None] + i, first[:, None], count[:, None], used)
    _store_requests(requests_ptr, request, first, count, present)
    _store_idle(items_ptr, tl.sum(count, 0), num_items)


@triton.jit(do_not_specialize=["suffix_len", "span", "each"])
def _plan_spans(prefix_ptr, items_ptr, requests_ptr, suffix_len, span, each, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Make an item of each span of each request.

    prefix_ptr, items_ptr, requests_ptr, suffix_len, WINDOW: as in `_plan_items`.
    span: tokens of a span.
    each: maximum items of a request.
    BLOCK: items per program.
    """
    request, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(prefix_ptr + request) + suffix_len
    place, total = i, span_of(length - 1, span) + 1
    if WINDOW:
        skipped = span_of(tl.maximum(length - suffix_len + 1 - WINDOW, 0), span)
        place += skipped
        total -= skipped
    count = tl.minimum(total, each)
    first = request * each
    item = items_ptr + (first + i) * ITEM_FIELDS
    low, high = span_start(place, span), tl.minimum(span_start(place + 1, span), length)
    _store_items(item, tl.where(i < count, request, IDLE), low, high, first + i, first, count, i < each)
    _store_requests(requests_ptr, request, first, count, None)


@triton.jit(do_not_specialize=["suffix_len", "num_requests", "budget", "num_items", "span", "max_partials"])
def _plan_whole_spans(
    prefix_ptr,
    items_ptr,
    requests_ptr,
    suffix_len,
    num_requests,
    budget,
    num_items,
    span,
    max_partials,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    PATHS: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Cut requests as `_plan_items` does, for fixed plans: items end at borders of spans, and each span of an item has
    a partial result of its own.

    span: tokens of a span. TILE: tokens of a tile.
    max_partials: maximum partial results of a request.
    PATHS: items end before the first tile with suffix columns, which `path_triton` continues.
    LEADS: the first item adds the partial results of its spans.
    Other arguments: `_plan_items`.
    """
    request = tl.arange(0, REQUESTS)
    present = request < num_requests
    prefix = tl.load(prefix_ptr + request, mask=present, other=0)
    end = tl.where(present, prefix // TILE * TILE if PATHS else prefix + suffix_len, 0)
    origin = tl.maximum(prefix + 1 - WINDOW, 0) // TILE * TILE if WINDOW else prefix * 0
    length = end - origin
    count = tl.minimum(tl.cdiv(length, _best_span(length, budget, span, TILE, MAX_SPLITS)), MAX_SPLITS)
    even = tl.maximum(tl.cdiv(length, tl.maximum(count, 1)), 1)
    skipped, spans = span_of(origin, span), span_of(tl.maximum(end, 1) - 1, span) + 1
    leading_end, later = origin, skipped
    if LEADS:
        leads = tl.cdiv(span_start(skipped + 1, span) - origin, even)
        leading_end = tl.where(leads < count, span_start(span_of(origin + leads * even, span), span), end)
        later = tl.where(leading_end < end, span_of(leading_end, span), spans)
    # LEADS: the first partial result is that of all spans before `later`.
    partials = tl.where(length > 0, spans - later + LEADS, 0)
    if PATHS:  # the partial result of the span that paths continue stands after the others
        partials -= ((partials > LEADS) & (end < span_start(spans, span))).to(tl.int32)
    first = request * max_partials
    start = tl.cumsum(count, 0) - count
    for chunk in range(0, tl.max(count, 0), CHUNK):
        i = chunk + tl.arange(0, CHUNK)[None, :]
        item = items_ptr + (start[:, None] + i) * ITEM_FIELDS
        used = i < count[:, None]
        low = tl.maximum(span_start(span_of(origin[:, None] + i * even[:, None], span), span), origin[:, None])
        high = span_start(span_of(origin[:, None] + (i + 1) * even[:, None], span), span)
        high = tl.where(i + 1 < count[:, None], high, end[:, None])
        own = tl.where(low < leading_end[:, None], 0, span_of(low, span) - later[:, None] + LEADS)
        owner = tl.where(low < high, request[:, None], IDLE)
        _store_items(item, owner, low, high, first[:, None] + own, first[:, None], partials[:, None], used)
    _store_requests(requests_ptr, request, first, partials, present)
    _store_idle(items_ptr, tl.sum(count, 0), num_items)


@dataclass(frozen=True)
class Items:
    """Spans of KV for programs.

    items: [any, ITEM_FIELDS] int32.
    requests: [num_requests, 2] int32: the index of the partial result of each request's first item; its number of
        items.
    """

    items: Tensor
    requests: Tensor


def plan_items(
    prefix_len: Tensor,
    suffix_len: int,
    budget: int,
    min_span: int,
    tile: int,
    max_splits: int,
    window: int | None = None,
) -> Items:
    """Cut requests of prefix_len + suffix_len positions into items, starting with the first tile of their window.

    prefix_len: [B] int32.
    budget: items that run at a time; 0 splits nothing. Requests of similar length are cut into enough items to fill the
        device once; longer requests get more items. At most 2 * budget partials are used.
    min_span: minimum length of an item, except a request's last.
    tile: item boundaries are multiples of it.
    max_splits: maximum number of items per request.
    """
    num_requests = prefix_len.shape[0]
    num_items = num_requests + budget
    items = torch.empty((num_items, ITEM_FIELDS.value), dtype=torch.int32, device=prefix_len.device)
    requests = torch.empty((num_requests, 2), dtype=torch.int32, device=prefix_len.device)
    # Each power of two has a kernel. The other arguments select none: steps without a graph have any number of
    # requests, and with it other tiles and budgets.
    most_requests = triton.next_power_of_2(num_requests)
    _plan_items[(1,)](
        prefix_len,
        items,
        requests,
        suffix_len,
        num_requests,
        max(budget, 1),
        min_span if budget else 1 << 24,  # longer than any request; 2.75 times as much fits in int32
        num_items,
        tile,
        MAX_SPLITS=max_splits,
        REQUESTS=most_requests,
        WINDOW=window or 0,
        num_warps=plan_warps(most_requests),
    )
    return Items(items, requests)


def plan_warps(num_requests: int) -> int:
    """Return the number of warps of the planner, which holds `SPANS` numbers per request."""
    return 4 if num_requests <= 128 else 16


def plan_spans(prefix_len: Tensor, suffix_len: int, span: int, max_kv_len: int, window: int | None = None) -> Items:
    """Cut each request at the borders of spans (`spans_triton`), independently of the other requests.

    Requests have prefix_len + suffix_len positions, at most max_kv_len. Each has as many partials as a request of
    max_kv_len has spans, or as many as a window can touch.

    prefix_len: [B] int32.
    """
    num_requests, each = prefix_len.shape[0], max_spans(suffix_len, span, max_kv_len, window)
    items = torch.empty((num_requests * each, ITEM_FIELDS.value), dtype=torch.int32, device=prefix_len.device)
    requests = torch.empty((num_requests, 2), dtype=torch.int32, device=prefix_len.device)
    _plan_spans[(num_requests, triton.cdiv(each, SPANS_BLOCK))](
        prefix_len,
        items,
        requests,
        suffix_len,
        span,
        each,
        BLOCK=SPANS_BLOCK,
        WINDOW=window or 0,
        num_warps=1,
    )
    return Items(items, requests)


def max_spans(suffix_len: int, span: int, max_kv_len: int, window: int | None) -> int:
    """Return the maximum number of spans that a request's rows see."""
    spans = num_spans(max_kv_len, span)
    return spans if window is None else min(spans, triton.cdiv(window + suffix_len, span) + 1)


def plan_whole_spans(
    prefix_len: Tensor,
    suffix_len: int,
    budget: int,
    tile: int,
    span: int,
    max_splits: int,
    max_kv_len: int,
    window: int | None = None,
    paths: bool = False,
    leads: bool = True,
) -> Items:
    """`plan_items` with items that end where spans do (`spans_triton`), so that a program computes whole spans.

    Each span has a partial result; with `leads`, those of a request's first item have one together. With `paths`, items
    end at the last tile without suffix columns. If a span is open there, its sums are the partial result after the
    counted ones.

    prefix_len: [B] int32.
    budget: items that run at a time, at least 1.
    tile: a window's first item begins at a multiple of it.
    span: base size, in tokens; minimum length of an item.
    max_splits: maximum number of items per request.
    max_kv_len: length of the longest request. Each request has `max_spans` + 1 partial results.
    """
    num_requests, device = prefix_len.shape[0], prefix_len.device
    num_items = num_requests + budget
    items = torch.empty((num_items, ITEM_FIELDS.value), dtype=torch.int32, device=device)
    requests = torch.empty((num_requests, 2), dtype=torch.int32, device=device)
    most_requests = triton.next_power_of_2(num_requests)
    _plan_whole_spans[(1,)](
        prefix_len,
        items,
        requests,
        suffix_len,
        num_requests,
        budget,
        num_items,
        span,
        max_spans(suffix_len, span, max_kv_len, window) + 1,
        TILE=tile,
        MAX_SPLITS=max_splits,
        REQUESTS=most_requests,
        WINDOW=window or 0,
        PATHS=paths,
        LEADS=int(leads),
        num_warps=plan_warps(most_requests),
    )
    return Items(items, requests)


def reference(
    prefixes: list[int],
    suffix_len: int,
    budget: int,
    min_span: int,
    tile: int,
    max_splits: int,
    window: int | None = None,
) -> list[list[int]]:
    """Return the items of `plan_items` as rows of six fields, without idle ones."""
    origins = [first_seen(prefix, window) // tile * tile for prefix in prefixes]
    lengths = [prefix + suffix_len - origin for prefix, origin in zip(prefixes, origins, strict=True)]
    each = -(-sum(lengths) // max(budget, 1))
    least = max(each, min_span if budget else 1 << 24)

    def time(span: int) -> int:
        counts = [min(-(-length // span), max_splits) for length in lengths]
        one = max(-(-n // (k * tile)) * tile for n, k in zip(lengths, counts, strict=True)) + tile
        return min(-(-sum(counts) // max(budget, 1)) * one, each + one)

    span = min((least + least * (i * (i + 1) // 2) // 16 for i in reversed(range(SPANS.value))), key=time)
    items, partial = [], 0
    for request, (origin, length) in enumerate(zip(origins, lengths, strict=True)):
        count = min(triton.cdiv(length, span), max_splits)
        even = triton.cdiv(triton.cdiv(length, count), tile) * tile
        bounds = [(origin + low, origin + min(low + even, length)) for low in range(0, length, even)]
        items += [[request, low, high, partial + i, partial, len(bounds)] for i, (low, high) in enumerate(bounds)]
        partial += len(bounds) if len(bounds) > 1 else 0
    return items
