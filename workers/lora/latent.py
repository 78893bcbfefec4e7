"""Adapters of MLA's up-projection of latent rows (kv_b_proj), whose part for keys is applied to queries, and whose part
for values is applied to the attention output, head by head: q (W_k + B_k A) is q W_k plus (q B_k) A, and
out (W_v + B_v A)^T is out W_v^T plus (out A^T) B_v^T.

Both factors have the ranks of all adapters side by side. Between the two products a row's other ranks are set to zero,
so that shapes do not depend on the rows' adapters, and torch's batched products serve all rows; in deterministic
engines `head_products`, whose sums have one order for any rows."""

import itertools

import torch
from torch import Tensor, nn

from aerie.kernels.latent.head_products import head_products
from aerie.kernels.lora.product import LoraTables
from aerie.workers.layers.latent_attention import HeadAdapters, LatentAttention, LatentUpProjection
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.lora.layers import AdapterRows

_MAX_INNER_BYTES = 1 << 26  # bound on scratch for a block of rows times all adapters' ranks
_MAX_FIXED_RANKS = 512  # inputs of `head_products` whose tiles fit on a multiprocessor
_VARIANT_ROWS = (1, 17, 65, 129, 1025)  # rows that launch all variants of `head_products`


def allocate_latent_tables(
    shape: LinearShape, max_loras: int, rank: int, dtype: torch.dtype, device: torch.device
) -> LoraTables:
    """Return tables without adapters whose `up` is a view of [out_features, max_loras, rank], contiguous. rank: of
    `aerie.workers.lora.layers.padded_rank`."""
    down = torch.zeros(max_loras, rank, shape.in_features, dtype=dtype, device=device)
    up = torch.zeros(shape.out_features, max_loras, rank, dtype=dtype, device=device)
    return LoraTables(down, up.transpose(0, 1), (0, shape.out_features))


class LatentAdapters(HeadAdapters):
    """See `HeadAdapters`. tables: of `allocate_latent_tables`."""

    def __init__(self, layer: LatentUpProjection, tables: LoraTables, rows: AdapterRows) -> None:
        self._rows = rows
        heads, device = layer.num_heads, tables.up.device
        self._down = tables.down.flatten(0, 1)  # [ranks, latent]
        self._up = tables.up.transpose(0, 1).flatten(1)  # [heads * (key_dim + value_dim), ranks]
        by_head = self._up.view(heads, layer.key_dim + layer.value_dim, -1)
        self._key_dim, self._latent = layer.key_dim, self._down.shape[1]
        self._keys = by_head[:, : layer.key_dim], self._down.expand(heads, -1, -1)
        self._values = self._down.t().expand(heads, -1, -1), by_head[:, layer.key_dim :].transpose(1, 2)
        owners = torch.arange(tables.max_loras, dtype=torch.int32, device=device)
        self._owners = owners.repeat_interleave(tables.max_rank)  # each rank's adapter

    @property
    def is_active(self) -> bool:
        return self._rows.is_active

    def add_keys(self, q: Tensor, absorbed: Tensor, num_rows: int) -> None:
        self._add(q[..., : self._key_dim], self._keys, absorbed[..., : self._latent], num_rows)

    def add_values(self, out: Tensor, values: Tensor, num_rows: int) -> None:
        self._add(out, self._values, values, num_rows)

    def add_expanded(self, latents: Tensor, kv: Tensor) -> None:
        assert not self._rows.is_fixed, "deterministic engines do not expand latents"
        inner = latents @ self._down.t()
        kv.addmm_(inner.masked_fill_(self._rows.other_ranks(None, self._owners), 0), self._up.t())

    def _add(self, x: Tensor, factors: tuple[Tensor, Tensor], out: Tensor, num_rows: int) -> None:
        """Add x times both factors to `out`, for each head.

        x: [n, heads, in], the first n of `num_rows` rows.
        factors: [heads, in, ranks] and [heads, ranks, outputs].
        out: [n, heads, outputs], written.
        """
        first, second = factors
        others = self._rows.other_ranks(num_rows, self._owners)[: x.shape[0]]
        num_ranks = min(first.shape[2], _MAX_FIXED_RANKS) if self._rows.is_fixed else first.shape[2]
        step = max(16, _MAX_INNER_BYTES // (first.shape[0] * num_ranks * x.itemsize))
        for begin, lowest in itertools.product(range(0, x.shape[0], step), range(0, first.shape[2], num_ranks)):
            block, ranks = slice(begin, begin + step), slice(lowest, lowest + num_ranks)
            inner = self._products(x[block], first[:, :, ranks])
            inner = inner.masked_fill_(others[block, ranks].unsqueeze(1), 0)
            out[block] += self._products(inner, second[:, ranks])

    def _products(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return [n, heads, outputs] for x [n, heads, in] and weight [heads, in, outputs]."""
        if not self._rows.is_fixed:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        out = x.new_empty(*x.shape[:2], weight.shape[2])
        head_products(x, weight, out, fixed=True)
        return out

    def launch(self, num_rows: int) -> None:
        """Launch what a pass with adapters launches for `num_rows` rows."""
        heads, latent, value_dim = self._values[0].shape[0], self._latent, self._values[1].shape[2]
        q, out = (self._up.new_zeros(num_rows, heads, size) for size in (self._key_dim, latent))
        with self._rows.without_adapters(num_rows):
            self.add_keys(q, torch.zeros_like(out), num_rows)
            self.add_values(out, out.new_zeros(num_rows, heads, value_dim), num_rows)


def launch_head_products(model: nn.Module) -> None:
    """Launch what passes with adapters launch for values, also in the model's dtype where they are FP8 otherwise, so
    that no step compiles a kernel."""
    layers = [module.kv_b_proj for module in model.modules() if isinstance(module, LatentAttention)]
    for up in {(up.num_heads, up.key_dim, up.value_dim): up for up in layers}.values():
        for num_rows in _VARIANT_ROWS:
            out = up.values.new_zeros(num_rows, up.num_heads, up.values.shape[1])
            values = out.new_empty(num_rows, up.num_heads, up.value_dim)
            head_products(out, up.values, values, fixed=up.deterministic)
            if isinstance(up.head_adapters, LatentAdapters):
                up.head_adapters.launch(num_rows)
