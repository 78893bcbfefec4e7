"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1) in absorbed form: the up-projection of
keys is applied to queries, and that of values to the output, so heads attend to the cached latent rows."""

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from aerie.attention.expansion import ExpandedChunks
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.fp8.rows import GROUP, Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.kv.batches import ExpandedKV
from aerie.kernels.latent.head_products import head_products, latent_values
from aerie.kernels.latent.latents import cached_latents, expand_latents, normed_latents
from aerie.kernels.rope.rope_store import Angles
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.attention import KVScaleWeights
from aerie.workers.layers.decoder_layer import AttentionLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ColumnParallelLinear, RowParallelLinear, rank_span
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.layers.norm import RMSNorm

LATENT_EPS = 1e-6  # epsilon of latent norms; config.json's rms_norm_eps is for the other norms


class HeadAdapters(ABC):
    """Adds adapters to the products of a `LatentUpProjection`, in passes with adapters. Passes without one call
    nothing."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the running pass has adapters."""

    @abstractmethod
    def add_keys(self, q: Tensor, absorbed: Tensor, num_rows: int) -> None:
        """Add the adapters' part to queries in the latent space.

        q: [n, heads, key_dim + rotated_dim], the first n of `num_rows` rows of the pass.
        absorbed: [n, heads, latent + rotated_dim], written.
        """

    @abstractmethod
    def add_values(self, out: Tensor, values: Tensor, num_rows: int) -> None:
        """Add the adapters' part to values.

        out: [n, heads, latent], the first n of `num_rows` rows of the pass, or of those that attend.
        values: [n, heads, value_dim], written.
        """

    @abstractmethod
    def add_expanded(self, latents: Tensor, kv: Tensor) -> None:
        """Add the adapters' part to expanded keys and values.

        latents: [tokens, latent], of `ForwardContext.expanded`.
        kv: [tokens, heads * (key_dim + value_dim)], contiguous, written.
        """


class LatentUpProjection(ColumnParallelLinear):
    """The up-projection from latent rows to keys and values (kv_b_proj), sharded by heads.

    num_heads: heads of this rank. A head has `key_dim` rows for keys, then `value_dim` for values.
    head_adapters: None in engines without adapters.

    After `finish`:
    keys_and_values: [heads * (key_dim + value_dim), latent].
    keys: [heads, key_dim, latent], a view.
    values: [heads, latent, value_dim], a view.
    deterministic: a row's result must not depend on other rows.
    """

    keys_and_values: Tensor
    keys: Tensor
    values: Tensor
    deterministic: bool

    def __init__(self, latent: int, heads: Span, key_dim: int, value_dim: int) -> None:
        super().__init__(latent, {"": heads.times(key_dim + value_dim)})
        self.num_heads, self.key_dim, self.value_dim = heads.size, key_dim, value_dim
        self.head_adapters: HeadAdapters | None = None

    @property
    def adapters(self) -> HeadAdapters | None:
        """The adapters of the running pass; None if it has none."""
        return self.head_adapters if self.head_adapters is not None and self.head_adapters.is_active else None

    def absorb_keys(self, q: Tensor, out: Tensor, angles: Angles, num_rows: int) -> None:
        """Write queries in the latent space, and their rotated part after RoPE, to `out`; shapes as for
        `HeadAdapters.add_keys`."""
        head_products(q, self.keys, out, angles, fixed=self.deterministic)
        if self.adapters is not None:
            self.adapters.add_keys(q, out, num_rows)

    def project_values(self, out: Tensor, values: Tensor, num_rows: int) -> None:
        """Write the values of attention output to `values`; shapes as for `HeadAdapters.add_values`."""
        head_products(out, self.values, values, fixed=self.deterministic)
        if self.adapters is not None:
            self.adapters.add_values(out, values, num_rows)

    def finish(self, options: GEMMOptions) -> None:
        # multiplied in the model's dtype, by `aerie.kernels.latent`
        super().finish(dataclasses.replace(options, fp8=False, packed=False, host=False, deterministic=False))
        self.deterministic = options.deterministic
        assert isinstance(self.method, DenseLinearMethod), "only dense weights have views per head"
        self.keys_and_values = self.method.dense_weight()
        weight = self.keys_and_values.view(self.num_heads, self.key_dim + self.value_dim, -1)
        self.keys, self.values = weight[:, : self.key_dim], weight[:, self.key_dim :].transpose(1, 2)


class LatentAttention(AttentionLayer):
    """MLA, sharded by heads; every rank has whole latent rows.

    layer: index in the KV pool.
    num_heads: heads of the model.
    q_rank: rank of q's low-rank projection (`q_lora_rank`); None if q is projected directly.
    latent: size of a latent row without its RoPE part (`kv_lora_rank`).
    key_dim: size of a head's keys without the RoPE part (`qk_nope_head_dim`).
    rotated_dim: size of the RoPE part, which all heads share (`qk_rope_head_dim`).
    value_dim: size of a head's values (`v_head_dim`).
    scale: factor on q . k.
    _can_expand: whether the kernels can expand latent rows to keys and values, as prompt chunks use them: sizes of a
        head are powers of two, at least 16.
    """

    def __init__(
        self,
        layer: int,
        group: TPGroup,
        *,
        hidden_size: int,
        num_heads: int,
        q_rank: int | None,
        latent: int,
        key_dim: int,
        rotated_dim: int,
        value_dim: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.layer, self.rule = layer, ScoreRule(scale)
        self.latent, self.key_dim, self.row_dim = latent, key_dim, latent + rotated_dim
        self.value_dim = value_dim
        heads = rank_span(num_heads, group, "num_attention_heads")
        self.num_heads = heads.size
        q_rows = heads.times(key_dim + rotated_dim)
        first = {"q_proj": q_rows} if q_rank is None else {"q_a_proj": Span.whole(q_rank)}
        self.qkv_a = ColumnParallelLinear(hidden_size, first | {"kv_a_proj_with_mqa": Span.whole(self.row_dim)})
        self.q_a_layernorm = None if q_rank is None else RMSNorm(q_rank, LATENT_EPS)
        self.q_b_proj = None if q_rank is None else ColumnParallelLinear(q_rank, {"": q_rows})
        self.kv_a_layernorm = RMSNorm(latent, LATENT_EPS)
        self.kv_b_proj = LatentUpProjection(latent, heads, key_dim, value_dim)
        self.kv_scales = KVScaleWeights(layer)  # latent rows use the scale of k
        self.o_proj = RowParallelLinear(num_heads * value_dim, hidden_size, group, "num_attention_heads")
        self._can_expand = all(size >= 16 and size.bit_count() == 1 for size in (key_dim, rotated_dim, value_dim))

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return self.qkv_a.method.fp8_inputs

    def partial(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> Tensor:
        # `normed_latents` can add split-K partial sums, but only of parts that it normalises
        parts = None if self.q_a_layernorm is None else self.qkv_a.method.multiply_apart(x)
        return self._partial(self.qkv_a(x) if parts is None else parts, angles, context)

    def keep(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> None:
        kv, slots = context.pool.layer(self.layer), context.slot_mapping
        fixed = self.kv_b_proj.deterministic
        normed_latents(self.qkv_a(x), None, self.kv_a_layernorm.weight, LATENT_EPS, angles, kv, slots, fixed=fixed)

    def _partial(self, both: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """Attend in absorbed form, except for prompt chunks with `context.expanded`. Return this rank's part of the
        layer's output.

        both: the concatenated outputs of qkv_a, or their partial sums (`LinearMethod.multiply_apart`).
        """
        rows, heads, dtype = both.shape[-2], self.num_heads, self.qkv_a.method.dtype
        expanded = context.expanded if self._can_expand else None
        absorbed = context if expanded is None else context.rounds
        num_absorbed = rows if expanded is None else context.num_decode_rows
        absorbed_q = torch.empty((num_absorbed, heads, self.row_dim), dtype=dtype, device=both.device)
        store_is_fence = absorbed.plan(self.layer, absorbed_q, self.rule)
        q = self._store_latents(both, angles, context, store_is_fence)
        up = self.kv_b_proj
        if expanded is None:
            up.absorb_keys(q, absorbed_q, angles, rows)
            return self.o_proj.partial(self._values(context.attend_to_cached(self.layer, absorbed_q, self.rule)))
        num_values = rows if context.attending is None else context.attending.shape[0]
        values = torch.empty((num_values, heads, self.value_dim), dtype=dtype, device=both.device)
        if num_absorbed > 0:
            up.absorb_keys(q[:num_absorbed], absorbed_q, _rows(angles, 0, num_absorbed), rows)
            out = absorbed.attend_to_cached(self.layer, absorbed_q, self.rule)
            up.project_values(out, values[: out.shape[0]], num_values)
        chunk_angles = _rows(angles, num_absorbed, rows)
        self._attend_expanded(q[num_absorbed:], chunk_angles, context, expanded, values[num_absorbed:])
        return self.o_proj.partial(values.flatten(1))

    def _store_latents(self, both: Tensor, angles: Angles, context: ForwardContext, is_fence: bool) -> Tensor:
        """Write the rows' latents to the KV pool. Return the queries before RoPE, [rows, heads, key_dim + rotated_dim].

        both: see `_partial`.
        is_fence: see `Prepared.plan`.
        """
        latent_q = normed_latents(
            both,
            None if self.q_a_layernorm is None else self.q_a_layernorm.weight,
            self.kv_a_layernorm.weight,
            LATENT_EPS,
            angles,
            context.pool.layer(self.layer),
            context.slot_mapping,
            wanted=None if self.q_b_proj is None else self.q_b_proj.method.fp8_inputs,
            fence=is_fence,
            fixed=self.kv_b_proj.deterministic,
        )
        q = latent_q if self.q_b_proj is None else self.q_b_proj(latent_q)
        assert isinstance(q, Tensor)
        by_head: Tensor = q.unflatten(1, (self.num_heads, -1))  # type: ignore[no-untyped-call]
        return by_head

    def _values(self, out: Tensor) -> Tensor | Fp8Rows:
        """Project the attention output to values, in FP8 if o_proj accepts it and a head's values are one scale group.

        out: [rows, heads, latent].
        returns: [rows, heads * value_dim].
        """
        rows, wanted, up = out.shape[0], self.o_proj.method.fp8_inputs, self.kv_b_proj
        if wanted is not None and wanted.by_group and self.value_dim == GROUP and up.adapters is None:
            return latent_values(out, up.keys_and_values, self.key_dim, rows > wanted.many, up.deterministic)
        values = torch.empty((rows, self.num_heads, self.value_dim), dtype=out.dtype, device=out.device)
        up.project_values(out, values, rows)
        return values.flatten(1)

    def _attend_expanded(
        self, q: Tensor, angles: Angles, context: ForwardContext, expanded: ExpandedChunks, out: Tensor
    ) -> None:
        """Attend with expanded keys and values.

        q: [rows of chunks, heads, key_dim + rotated_dim], before RoPE.
        out: [rows of chunks, heads, value_dim], written.
        """
        cached, up = context.pool.layer(self.layer), self.kv_b_proj
        kv, rotated = expand_latents(cached.rows, expanded.tokens, expanded.ends, up.keys_and_values, cached.scale)
        if up.adapters is not None:
            up.adapters.add_expanded(cached_latents(cached, expanded.tokens, kv.dtype), kv)
        made = ExpandedKV(kv.unflatten(1, (self.num_heads, -1)), rotated, expanded.first, self.key_dim)  # type: ignore[no-untyped-call]
        expanded.attend(q, made, angles, self.rule.scale, out)


def _rows(angles: Angles, first: int, end: int) -> Angles:
    return dataclasses.replace(angles, index=angles.index[first:end])
