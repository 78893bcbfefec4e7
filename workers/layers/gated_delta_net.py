"""A recurrent layer by the gated delta rule (Gated DeltaNet, arXiv 2412.06464) over a `ForwardContext`. Instead of KV,
each request has a state of fixed size."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from aerie.kernels.delta_rule.tables import TAPS, DeltaHeads, DeltaRows, DeltaWeights
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.rope.rope_store import Angles
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import AttentionLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ColumnParallelLinear, RowParallelLinear, rank_span
from aerie.workers.layers.weighted import WeightedModule, WeightKey, check_plain, check_shape

IN_PROJ = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")
GATES = ("in_proj_b", "in_proj_a")
# Checkpoint names of the layer, whose own tensors `DeltaCore` loads, and of two modules of it.
_LAYER, _CONV, _NORM = "linear_attn", "linear_attn.conv1d", "linear_attn.norm"


def heads_of_rank(heads: DeltaHeads, tensor_parallel: int) -> DeltaHeads:
    """Return the heads of one rank: key heads with all their value heads."""
    return DeltaHeads(
        heads.key_heads // tensor_parallel, heads.value_heads // tensor_parallel, heads.key_dim, heads.value_dim
    )


def recurrent_weights(model: nn.Module) -> dict[int, DeltaWeights]:
    """Return the recurrences' weights by layer index in the state pool."""
    return {module.layer: module.core.weights for module in model.modules() if isinstance(module, GatedDeltaNet)}


class GatedDeltaNet(AttentionLayer):
    """A recurrent layer by the gated delta rule.

    layer: index in the state pool.
    heads: heads of the model; the attribute is this rank's.
    eps: epsilon of the output norm.
    merged: whether one GEMM computes all input projections; False if the checkpoint quantises only some of them.
    """

    def __init__(
        self, layer: int, group: TPGroup, hidden_size: int, heads: DeltaHeads, eps: float, merged: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads_of_rank(heads, group.size)
        keys = rank_span(heads.key_heads, group, "linear_num_key_heads")
        values = rank_span(heads.value_heads, group, "linear_num_value_heads")
        key_rows, value_rows = keys.times(heads.key_dim), values.times(heads.value_dim)
        rows = dict(zip(IN_PROJ, (key_rows, key_rows, value_rows, value_rows), strict=True))
        gates = dict.fromkeys(GATES, values)
        self.in_proj = ColumnParallelLinear(hidden_size, rows | gates if merged else rows)
        self.gates = None if merged else ColumnParallelLinear(hidden_size, gates)
        self.core = DeltaCore(key_rows, value_rows, values, heads.value_dim, eps)
        self.out_proj = RowParallelLinear(
            heads.value_heads * heads.value_dim, hidden_size, group, "linear_num_value_heads"
        )

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        wanted = self.in_proj.method.fp8_inputs
        return None if wanted is None else Fp8Inputs(wanted.by_group, wanted.many, plain=True)  # for `gates`

    def partial(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> Tensor:
        heads, projected = self.heads, self.in_proj(x)
        sizes = [heads.channels, heads.value_heads * heads.value_dim, heads.value_heads, heads.value_heads]
        if self.gates is None:
            qkv, z, b, a = torch.split(projected, sizes, dim=1)
        else:
            plain = x if isinstance(x, Tensor) else x.plain
            assert plain is not None, "`fp8_inputs` asks for it"
            (qkv, z), (b, a) = torch.split(projected, sizes[:2], dim=1), self.gates(plain).chunk(2, dim=1)
        return self.out_proj.partial(context.recur(self.layer, DeltaRows(qkv, z, b, a), self.core.weights))

    def keep(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> None:
        raise AssertionError("drafts have no recurrent layers")


class DeltaCore(WeightedModule):
    """The recurrence's own weights; see `DeltaWeights`.

    conv: [4, C].
    a_log, dt_bias: [Hv] float32.
    norm: [dv].
    """

    def __init__(self, keys: Span, values: Span, heads: Span, value_dim: int, eps: float) -> None:
        super().__init__()
        self._channels = (keys, keys, values)
        self._heads = heads

        def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        self.conv = parameter(TAPS, 2 * keys.size + values.size)
        self.a_log, self.dt_bias = (parameter(heads.size, dtype=torch.float32) for _ in range(2))
        self.norm = parameter(value_dim)
        self._eps = eps

    @property
    def is_sharded(self) -> bool:
        return not self._heads.is_whole

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv.data, self.a_log.data, self.dt_bias.data, self.norm.data, self._eps)

    def weight_keys(self) -> Iterator[WeightKey]:
        yield WeightKey("weight", _CONV)
        yield WeightKey("weight", _NORM)
        yield WeightKey("A_log", _LAYER)
        yield WeightKey("dt_bias", _LAYER)

    def load(self, key: WeightKey, full: Tensor) -> None:
        check_plain(full)
        if key.part == _CONV:
            check_shape(full, (sum(span.total for span in self._channels), 1, TAPS))
            whole = torch.split(full.squeeze(1), [span.total for span in self._channels])
            mine = [part[span.first : span.end] for part, span in zip(whole, self._channels, strict=True)]
            self.conv.data.copy_(torch.cat(mine).t())
        elif key.part == _NORM:
            check_shape(full, self.norm.shape)
            self.norm.data.copy_(full)
        else:
            check_shape(full, (self._heads.total,))
            parameter = self.a_log if key.kind == "A_log" else self.dt_bias
            parameter.data.copy_(full[self._heads.first : self._heads.end])

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with decays from 0.5 to 0.999 per token, as in trained models."""
        self.conv.data.normal_(0.0, 0.5, generator=generator)
        self.norm.data.fill_(1.0)
        self.a_log.data.uniform_(-4.0, 1.0, generator=generator)
        self.dt_bias.data.uniform_(-4.0, 0.0, generator=generator)
