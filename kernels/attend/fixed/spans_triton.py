# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Spans of a context for deterministic attention: the same for every batch, prompt chunk and kernel.

A span is attended to on its own; `fold` adds the spans' results in order. So one program may compute all spans of a row
(prompts) or one of them (rounds), with the same bits. Short spans at the beginning let a round over a short context use
many programs; longer ones further on keep the number of partial results small. Sizes depend on positions only.
"""

import triton
import triton.language as tl

# Tiers of spans: their number, and their size in base sizes. Later spans have 16 times the base size. The kernels below
# have the same numbers.
_TIERS = ((4, 1), (6, 2), (12, 4), (24, 8))


@triton.jit
def span_start(i, span):
    """Return the first position of span `i`. span: base size, in tokens."""
    units = tl.minimum(i, 4) + 2 * tl.minimum(tl.maximum(i - 4, 0), 6) + 4 * tl.minimum(tl.maximum(i - 10, 0), 12)
    units += 8 * tl.minimum(tl.maximum(i - 22, 0), 24) + 16 * tl.maximum(i - 46, 0)
    return units * span


@triton.jit
def span_of(position, span):
    """Return the index of the span that contains `position`."""
    units = position // span
    later = tl.where(units < 256, 22 + (units - 64) // 8, 46 + (units - 256) // 16)
    early = tl.where(units < 16, 4 + (units - 4) // 2, 10 + (units - 16) // 4)
    return tl.where(units < 4, units, tl.where(units < 64, early, later))


@triton.jit
def fold(mean, weight, top, part, lse):
    """Add a span to the results of earlier ones and return them. Kernels that call it disable FMA fusion, because each
    kernel would fuse other operations.

    mean: [M, D] sum of the parts, each times 2^(lse - top).
    weight, top: [M] sum of these factors, and the largest lse; 0 and -inf before the first span.
    part, lse: [M, D], [M] the span's weighted mean of values, and log2 of its sum of weights; -inf if a row sees none
        of its columns, which changes nothing.
    """
    new_top = tl.maximum(top, lse)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - origin), tl.exp2(lse - origin)
    return mean * old[:, None] + part * new[:, None], weight * old + new, new_top


@triton.jit
def folded(mean, weight):
    """Return the weighted mean [M, D] of all spans; zeros for a row without columns."""
    return mean / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def finished(acc, total, top, v_scale):
    """Return a span's `part` and `lse` for `fold` from its softmax state (`online_softmax_triton`)."""
    safe = tl.where(total == 0.0, 1.0, total)
    return acc * (v_scale / safe)[:, None], tl.where(total == 0.0, float("-inf"), top + tl.log2(safe))


def num_spans(length: int, span: int) -> int:
    """Return the number of spans of a context of `length` tokens."""
    return len(span_starts(length, span)) - 1


def span_starts(length: int, span: int) -> list[int]:
    """Return the first positions of the spans of a context of `length` tokens, and its end."""
    sizes = [factor * span for count, factor in _TIERS for _ in range(count)]
    starts = [0]
    while starts[-1] < length:
        size = sizes[len(starts) - 1] if len(starts) <= len(sizes) else 16 * span
        starts.append(min(starts[-1] + size, length))
    return starts
