"""Attention of float32 heads over pages on CPUs, for `aerie.attention.backends.torch_backend`. A row's result depends
only on its own request."""

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles, function
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV

MIN_SHARED_KEYS = 1 << 11  # positions of all rows and heads from which threads share them


@cache
def _function() -> Any:
    p, i, n = c_void_p, c_int64, c_int32
    heads_and_pages = p, i, i, p, p, i, i, i, p
    return function("attend_rounds", *heads_and_pages, i, p, i, p, i, i, i, i, i, c_float, p, n, n)


def serves(q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, window: int | None, rows: int) -> bool:
    """Return whether the kernels compute this. window: of the batch and the layer. rows: of each request."""
    if isinstance(kv, LatentKV) or rule.has_sinks or rule.soft_cap is not None or (window is not None and rows > 1):
        return False
    heads_are_adjacent = q.stride(1) == q.shape[2] and q.stride(2) == 1
    is_plain = q.dtype == kv.k.dtype == kv.v.dtype == torch.float32 and heads_are_adjacent
    return is_plain and compiles(Capability.of(q.device))


def attend_rounds(q: Tensor, kv: LayerKV, batch: DecodeBatch, scale: float) -> Tensor:
    """Return attention of the rows of a round, [B * R, q_heads, head_dim]. batch: through the layer's window."""
    out = torch.empty(q.shape, dtype=torch.float32)
    mask = batch.mask
    _function()(
        *_heads_and_pages(q, kv, batch.page_table),
        batch.page_table.stride(0),
        batch.prefix_len.data_ptr(),
        batch.suffix_len,
        mask.data_ptr(),
        mask.stride(0),
        mask.stride(1),
        batch.num_requests,
        batch.rows,
        batch.window or 0,
        scale,
        out.data_ptr(),
        torch.get_num_threads(),
        batch.num_rows * q.shape[1] * batch.max_kv_len >= MIN_SHARED_KEYS,
    )
    return out


def _heads_and_pages(q: Tensor, kv: LayerKV, page_table: Tensor) -> tuple[Any, ...]:
    _, page_size, kv_heads, head_dim = kv.k.shape
    pages = kv.k.data_ptr(), kv.v.data_ptr(), page_size, kv_heads, head_dim
    return q.data_ptr(), q.stride(0), q.shape[1], *pages, page_table.data_ptr()
