# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Soft caps and sinks of a `ScoreRule` in kernels over K/V heads. A layer without them passes None, and its compiled
kernels contain no code for them."""

import triton
import triton.language as tl

from aerie.kernels.attend.scores import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def cap_scales(scale_log2, SOFT_CAP: tl.constexpr):
    """Return two factors that replace scale_log2: on the input of `soft_capped`, and on its result."""
    return scale_log2 * (2.0 / SOFT_CAP), SOFT_CAP * _LOG2_E


@triton.jit
def soft_capped(scores, factor):
    """Return tanh(scores * scale / SOFT_CAP) with an error of at most 1e-7. 1 - 2 / (1 + e^2x) overflows to 1 or -1."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * factor))


@triton.jit
def sink_scores(sinks_ptr, query_head, live):
    """Return the sinks of query heads [M] as initial maxima of the online softmax, where their weight is 1."""
    return tl.load(sinks_ptr + query_head, mask=live, other=0.0) * _LOG2_E
