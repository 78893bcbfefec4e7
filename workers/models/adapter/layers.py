"""Aerie's layers, which replace those of a transformers model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.experts.route import TokenSlots
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.rope.rope_store import Angles
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ColumnParallelLinear, RowParallelLinear, kv_head_span, rank_span
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.layers.weighted import WeightedModule, WeightKey, check_plain, check_shape
from aerie.workers.models.adapter.survey import AttentionCall

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of models


class ColumnLinear(ColumnParallelLinear):
    """A linear layer sharded along its outputs: x [..., in] -> [..., out].

    gather: return the outputs of all ranks.
    """

    def __init__(self, linear: nn.Linear, rows: Span, group: TPGroup, gather: bool) -> None:
        super().__init__(linear.in_features, {"": rows}, linear.bias is not None)
        self._gather = group if gather and group.size > 1 else None

    @property
    def weight(self) -> Tensor:
        """Return the weight of an unquantised layer, [this rank's outputs, inputs], because models read its dtype."""
        method = self.method.base
        assert isinstance(method, DenseLinearMethod)
        return method.described()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x.flatten(0, -2))
        if self._gather is not None:
            out = self._gather.all_gather_last(out)
        return out.view(*x.shape[:-1], out.shape[-1])


class RowLinear(RowParallelLinear):
    """A linear layer sharded along its inputs: x [..., in] -> [..., out], summed over ranks.

    whole_inputs: x is not sharded.
    """

    def __init__(self, linear: nn.Linear, group: TPGroup, path: str, whole_inputs: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, group, path, linear.bias is not None)
        self._columns = self.shape.parts[0].columns if whole_inputs else None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self._columns is not None:
            x = x[..., self._columns.first : self._columns.end]
        rows = x.flatten(0, -2)
        # not in the all-reduce buffer, because a model may still need one product when it computes the next
        part = self.method.multiply(rows, self.bias if self.group.rank == 0 else None)
        return self.group.all_reduce(part).view(*x.shape[:-1], part.shape[-1])


class Head(LMHead):
    """Vocabulary head: x [..., hidden_size] -> logits [..., shard size]."""

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden.flatten(0, -2))
        return logits.view(*hidden.shape[:-1], logits.shape[-1])


class Embedding(VocabEmbedding):
    """Token embedding, with the model's factor on every row (Gemma)."""

    def __init__(self, embedding: nn.Embedding, group: TPGroup) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, group)
        self._scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        # scalars on the host, because kernels take them as arguments; rounded as in transformers
        self._rounded = {dtype: torch.tensor(self._scale, dtype=dtype, device="cpu") for dtype in _DTYPES}

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows if self._scale == 1.0 else rows * self._rounded[rows.dtype]


class Leaf(WeightedModule):
    """A transformers module with tensors of its own that no layer of Aerie replaces. Each rank loads them whole;
    `forward` is unchanged.

    reads_rows: whether its matrices are only tables of rows.
    """

    reads_rows = False

    def weight_keys(self) -> Iterable[WeightKey]:
        return [WeightKey(name) for name, _ in own_tensors(self)]

    def load(self, key: WeightKey, full: Tensor) -> None:
        mine = dict(own_tensors(self))[key.kind]
        check_plain(full)
        check_shape(full, mine.shape)
        mine.data.copy_(full)

    def finish(self, options: GEMMOptions) -> None:
        if options.deterministic and not self.reads_rows and any(tensor.dim() > 1 for _, tensor in own_tensors(self)):
            raise ValueError(
                f"deterministic=true: the sums of this model's {type(self).__name__} may depend on the batch; set "
                "deterministic: false"
            )

    def fill_dummy(self, generator: torch.Generator) -> None:
        for name, tensor in own_tensors(self):
            if tensor.dim() == 1:
                tensor.data.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                tensor.data.normal_(0.0, 0.02, generator=generator)


class LeafEmbedding(Leaf):
    """A second embedding besides that of tokens. Token ids beyond its rows get row 0, as in transformers' Gemma 3n,
    because a client may send any id of the vocabulary."""

    reads_rows = True
    num_embeddings: int

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = super().forward(torch.where(ids < self.num_embeddings, ids, 0))
        return rows


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the checkpoint's tensors of a module, without its submodules'."""
    lasting = (
        pair for pair in module.named_buffers(recurse=False) if pair[0] not in module._non_persistent_buffers_set
    )
    return [*module.named_parameters(recurse=False), *lasting]


class PagedAttention:
    """Attention of one layer over the pages of a context; see `aerie.workers.models.adapter.survey.attend`.

    layer: index in the KV pool.
    call: sizes are those of the whole model.
    rule: see `ModelConfig.score_rule`.
    running_pass: holds the context of the pass.
    """

    def __init__(
        self, layer: int, call: AttentionCall, rule: ScoreRule, group: TPGroup, running_pass: "RunningPass"
    ) -> None:
        self._layer, self._call, self._rule, self._pass = layer, call, rule, running_pass
        self._q = rank_span(call.num_heads, group, "num_attention_heads")
        self._kv = Span(*kv_head_span(call.num_kv_heads, group), call.num_kv_heads)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        call, whole = self._call, q.shape[1] == self._q.total
        angles = self._pass.zero_angles(call.cached_dim) if call.rotary is None else self._pass.postponed_angles(q, k)
        q, k, v = (_padded(tensor, call.cached_dim) for tensor in (q, k, v))
        heads = _rows(q, self._q), (_rows(k, self._kv), _rows(v, self._kv))
        sinks = None if not self._rule.has_sinks else _own_sinks(options["s_aux"], self._q)
        out = self._pass.attend(self._layer, *heads, angles, self._rule, sinks)[..., : call.value_dim]
        if not whole or self._q.size == self._q.total:
            return out.contiguous().unsqueeze(0)  # some models (AFMoE) call `view` on it
        # the plan does not shard this layer's heads: the model expects all, but uses only this rank's
        full = out.new_zeros(1, out.shape[0], self._q.total, call.value_dim)
        full[:, :, self._q.first : self._q.end] = out
        return full


def _own_sinks(sinks: Tensor, mine: Span) -> Tensor:
    """Return this rank's sinks, float32, from those of this rank or of all ranks."""
    own = sinks if sinks.shape[0] == mine.size else sinks[mine.first : mine.end]
    return own.float().contiguous()


def _rows(heads: Tensor, mine: Span) -> Tensor:
    """Convert [1, heads, rows, size], with the heads of this rank or of all ranks, to [rows, this rank's heads, size].
    The last two dimensions are contiguous, as attention backends require."""
    rows = heads[0].transpose(0, 1)
    if rows.shape[1] != mine.size:
        rows = rows[:, mine.first : mine.end]
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def _padded(heads: Tensor, size: int) -> Tensor:
    missing = size - heads.shape[-1]
    return nn.functional.pad(heads, (0, missing)) if missing else heads


class RunningPass:
    """The context of the running pass, and its RoPE angles.

    Attention layers store rotated keys in the KV pool, and Aerie's kernels rotate and store in one launch. So where a
    model calls attention right after its RoPE function, `postpone_rope` replaces that function: q and k stay
    unrotated, and attention gets the function's angles with them (`postponed_angles`). Other models rotate themselves,
    and their attention gets zero angles.

    sizes: head sizes in the KV pool.
    _postponed: arguments of the last call of RoPE: q, k, cos and sin; () outside a pass.
    """

    def __init__(self, device: torch.device, sizes: Iterable[int]) -> None:
        self._context: ForwardContext | None = None
        zeros = {size: torch.zeros(1, size // 2, dtype=torch.float32, device=device) for size in sizes}
        self._zero_angles = {size: (torch.ones_like(zero), zero) for size, zero in zeros.items()}
        self._postponed: tuple[Tensor, ...] = ()
        # by id of the model's cos, which layers share: that tensor, so that its id stays taken; our cos and sin
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._rows: dict[bool, Tensor] = {}

    @contextmanager
    def over(self, context: ForwardContext) -> Iterator[None]:
        """Use `context` in all calls of `attend` within."""
        self._context = context
        try:
            yield
        finally:
            self._context = None
            self._postponed = ()
            self._tables.clear()
            self._rows.clear()

    def postpone_rope(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Return q and k unchanged, and keep the angles for attention. Replaces a model's RoPE function,
        `AttentionCall.rotary`.

        q, k: [1, heads, rows, size]. cos, sin: [1, rows, rotated size], of which the second half repeats the first.
        """
        self._postponed = q, k, cos, sin
        return q, k

    def live(self) -> TokenSlots | None:
        """Return the marks of the pass's padding rows; None outside a pass."""
        return None if self._context is None else self._context.token_slots

    def postponed_angles(self, q: Tensor, k: Tensor) -> Angles:
        """Return the angles with which the model would have rotated q and k, [rows, rotated size / 2] float32."""
        known_q, known_k, cos, sin = self._postponed
        assert known_q is q and known_k is k, "`survey` saw attention get the results of RoPE"
        if id(cos) not in self._tables:
            half = cos.shape[-1] // 2
            cosines, sines = (table[0, :, :half].float().contiguous() for table in (cos, sin))
            self._tables[id(cos)] = cos, cosines, sines
        _, cosines, sines = self._tables[id(cos)]
        return Angles(cosines, sines, self._index(by_row=True))

    def zero_angles(self, size: int) -> Angles:
        """Return zero angles, which change no bit, for heads of this size that the model has rotated."""
        return Angles(*self._zero_angles[size], self._index(by_row=False))

    def attend(
        self,
        layer: int,
        q: Tensor,
        rows: tuple[Tensor, Tensor],
        angles: Angles,
        rule: ScoreRule,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `ForwardContext.attend`."""
        assert self._context is not None, "attention is called in a pass"
        with torch._C.DisableTorchFunction():  # tensors created in attention are not constants of the model
            return self._context.attend(layer, q, rows, angles, rule, sinks)

    def _index(self, by_row: bool) -> Tensor:
        """Return [rows] int64: row numbers if `by_row`, else zeros. All layers of a pass use the same tensor."""
        assert self._context is not None, "attention is called in a pass"
        if by_row not in self._rows:
            positions = self._context.positions
            numbers = torch.arange(positions.shape[0], device=positions.device)
            self._rows[by_row] = numbers if by_row else torch.zeros_like(positions)
        return self._rows[by_row]
