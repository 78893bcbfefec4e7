"""Tensor-parallel linear layers. Column-parallel layers shard outputs and do not communicate. Row-parallel layers shard
inputs and sum outputs over ranks. A `LinearMethod` stores and multiplies the weight."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.fp8.tiles import fp8_workspace_size
from aerie.kernels.gemm.blocks import largest
from aerie.kernels.gemm.tiles import workspace_size
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.host_layer import HostProduct
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup, shard_size
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from aerie.workers.layers.weighted import WeightedModule, WeightKey, check_plain, check_shape

QKV = ("q_proj", "k_proj", "v_proj")


class LinearBase(WeightedModule):
    """y = x W^T + b.

    method: unquantised by default; may be replaced before weights are loaded.
    bias: [out_features] of this rank.
    """

    method: LinearMethod
    bias: nn.Parameter | None

    def __init__(self, shape: LinearShape, bias: bool, method: LinearMethod | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.out_features = shape.out_features
        self.method = method or UnquantizedLinearMethod(shape)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of inputs and results."""
        return self.method.dtype

    @property
    def is_sharded(self) -> bool:
        return any(not (part.rows.is_whole and part.columns.is_whole) for part in self.shape.parts)

    def weight_keys(self) -> Iterator[WeightKey]:
        for part in self.shape.parts:
            for kind in self.method.kinds_of(part):
                yield WeightKey(kind, part.name)
            if self.bias is not None:
                yield WeightKey("bias", part.name)

    def load(self, key: WeightKey, full: Tensor) -> None:
        part = self.shape.part(key.part)
        if key.kind != "bias":
            self.method.load(key.kind, part, full)
            return
        assert self.bias is not None, "key not in `weight_keys`"
        check_plain(full)
        check_shape(full, (part.rows.total,))
        self.bias.data[part.offset : part.offset + part.rows.size].copy_(full[part.rows.first : part.rows.end])

    @property
    def host_product(self) -> HostProduct | None:
        """The weight that a CPU's kernels multiply, and the bias; None if another kernel multiplies."""
        weight = self.method.host_weight
        return None if weight is None else (weight, self.bias)

    def fill_missing(self, key: WeightKey) -> bool:
        return key.kind != "bias" and self.method.fill_missing(key.kind, self.shape.part(key.part))

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.method.fill_dummy(generator)
        if self.bias is not None:
            self.bias.data.zero_()

    def workspace_size(self) -> tuple[int, int]:
        return self.method.workspace_size()

    def finish(self, options: GEMMOptions) -> None:
        self.method.finish(options)

    @property
    def reload_fault(self) -> str:
        return self.method.reload_fault

    def reopen(self) -> None:
        self.method.reopen()

    def reloaded(self) -> None:
        self.method.reloaded()


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank has whole."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(LinearShape.stacked([("", Span.whole(out_features))], Span.whole(in_features)), bias)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.method.multiply(x, self.bias)


class ColumnParallelLinear(LinearBase):
    """One or several matrices of the checkpoint, each sharded along its outputs; their outputs are concatenated.

    parts: this rank's rows of each matrix, by name; {"": rows} for a single matrix.
    """

    def __init__(self, in_features: int, parts: Mapping[str, Span], bias: bool = False) -> None:
        super().__init__(LinearShape.stacked(parts.items(), Span.whole(in_features)), bias)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.method.multiply(x, self.bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q_proj, k_proj and v_proj, sharded by heads.

    num_heads, num_kv_heads: heads of the model; the attributes are this rank's.
    gated: q_proj returns q and its gate for each head.
    projections: the projections that the layer has. Without v_proj, k_proj's output is also v; with only q_proj, the
        layer attends to another layer's KV.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: TPGroup,
        bias: bool,
        gated: bool = False,
        projections: tuple[str, ...] = QKV,
    ) -> None:
        q = rank_span(num_heads, group, "num_attention_heads")
        kv = Span(*kv_head_span(num_kv_heads, group), num_kv_heads)
        q_rows, kv_rows = q.times(head_dim * (1 + gated)), kv.times(head_dim)
        rows = dict(zip(QKV, (q_rows, kv_rows, kv_rows), strict=True))
        super().__init__(in_features, {name: rows[name] for name in projections}, bias)
        self.num_heads, self.num_kv_heads = q.size, kv.size
        self._num_stored = kv_rows.size * (len(projections) - 1)

    def keys_values(self, x: Tensor | Fp8Rows) -> Tensor:
        """Return k, or k and v concatenated, [rows, kv_heads * head_dim] each, without computing q."""
        return self.method.multiply_last(x, self.bias, self._num_stored)

    def workspace_size(self) -> tuple[int, int]:
        stored = workspace_size([(self._num_stored, self.shape.in_features)] if self._num_stored else [])
        return largest([super().workspace_size(), stored])


class GateUpParallelLinear(ColumnParallelLinear):
    """silu(x W_gate^T) * (x W_up^T), sharded along the outputs."""

    def __init__(self, in_features: int, out_features: int, group: TPGroup, what: str) -> None:
        span = rank_span(out_features, group, what)
        super().__init__(in_features, {"gate_proj": span, "up_proj": span})

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        out = self.method.multiply_gated(x)
        assert isinstance(out, Tensor)
        return out


class RowParallelLinear(LinearBase):
    """y = x W^T + b with W sharded along its inputs. The ranks' outputs are summed.

    what: the configuration's name for in_features, for errors.
    """

    def __init__(self, in_features: int, out_features: int, group: TPGroup, what: str, bias: bool = False) -> None:
        columns = rank_span(in_features, group, what)
        super().__init__(LinearShape.stacked([("", Span.whole(out_features))], columns), bias)
        self.group = group

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor | Fp8Rows) -> Tensor:
        """Return this rank's part of y; the bias is in rank 0's part.

        The caller sums the parts immediately (`RMSNorm.add`): the next row-parallel layer may overwrite the buffer.
        """
        bias = self.bias if self.group.rank == 0 else None
        return self.method.multiply(x, bias, self._buffer(x))

    def gated_partial(self, x: Tensor | Fp8Rows, gate_up: GateUpParallelLinear) -> Tensor:
        """`partial` of the outputs of `gate_up`, for a layer without a bias."""
        assert self.bias is None
        return gate_up.method.multiply_mlp(x, self.method, self._buffer(x))

    def _buffer(self, x: Tensor | Fp8Rows) -> Tensor | None:
        rows = (x if isinstance(x, Tensor) else x.values).shape[0]
        return self.group.all_reduce_buffer(rows, self.out_features, self.method.dtype)


def rank_span(total: int, group: TPGroup, what: str) -> Span:
    """Return this rank's share of `total` outputs or inputs. Raises ValueError that names `what` if `total` is not a
    multiple of the group's size."""
    size = shard_size(total, group.size, what)
    return Span(group.rank * size, (group.rank + 1) * size, total)


def kv_head_span(num_kv_heads: int, group: TPGroup) -> tuple[int, int]:
    """Return [first, end) of this rank's KV heads. With more ranks than heads, several ranks have the same head."""
    if num_kv_heads >= group.size:
        span = rank_span(num_kv_heads, group, "num_key_value_heads")
        return span.first, span.end
    if group.size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel={group.size}: is no multiple of num_key_value_heads={num_kv_heads}; "
            f"try {num_kv_heads} or {2 * num_kv_heads}"
        )
    head = group.rank * num_kv_heads // group.size
    return head, head + 1


def finish_weights(model: nn.Module, deterministic: bool = False, adapted: bool = False) -> None:
    """Call `finish` on every module of `model` that is not finished yet.

    deterministic: on a GPU, a row's result must not depend on other rows (needs 16-bit weights and in_features that are
        multiples of 128).
    adapted: see `GEMMOptions`.
    """
    modules = [module for module in model.modules() if isinstance(module, WeightedModule)]
    layers = [module for module in modules if isinstance(module, LinearBase)]
    shapes = [(layer.shape.out_features, layer.shape.in_features) for layer in layers]
    device = next(model.parameters()).device
    others = [module.workspace_size() for module in modules]
    if Capability.of(device).multiplies_fp8:
        others.append(fp8_workspace_size(shapes))
    options = replace(GEMMOptions.of(shapes, others, layers[0].method.dtype, device, deterministic), adapted=adapted)
    for module in modules:
        if not module.finished:
            module.finish(options)
            module.finished = True
