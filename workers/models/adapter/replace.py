"""Puts Aerie's layers into a model of transformers. Linear layers with the same input become one product, and gated
MLPs one product before the activation, so that a pass launches fewer kernels."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aerie.kernels.norm.norm import ACTIVATIONS
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import ColumnParallelLinear, kv_head_span, rank_span
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.models.adapter.config import KV_PROJECTIONS, AdapterConfig, style_of
from aerie.workers.models.adapter.layers import (
    ColumnLinear,
    Embedding,
    Leaf,
    LeafEmbedding,
    RowLinear,
    RunningPass,
    own_tensors,
)
from aerie.workers.models.adapter.matching import MLPMatch, gathers_experts, match_experts, match_gated_mlp, match_norm
from aerie.workers.models.adapter.routers import (
    GatheringExperts,
    MatchedRouter,
    RouterChosenExperts,
    RouterMatch,
    RouterShell,
    find_router,
    hidden_of,
    traits_of,
)
from aerie.workers.models.adapter.survey import UnservableError, is_plain_embedding
from aerie.workers.quantization.quant_method import Unquantized

ALIGNED = 128  # rows of a part of a merged quantised layer: no block of scales and no packed word has rows of two parts


class Merged(ColumnParallelLinear):
    """Linear layers of one module with the same input, as one product. It replaces the first layer; a `Part` replaces
    each of the others.

    rows: this rank's outputs of each layer, by name.
    """

    def __init__(self, in_features: int, rows: Mapping[str, Span], bias: bool) -> None:
        super().__init__(in_features, rows, bias)
        self._x: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    @property
    def weight(self) -> Tensor:
        """Return the weight [this rank's outputs, inputs] of the first layer."""
        return self.weight_of(0)

    def weight_of(self, index: int) -> Tensor:
        """Return the unquantised weight of one of the layers, because models read its dtype."""
        method, part = self.method.base, self.shape.parts[index]
        assert isinstance(method, DenseLinearMethod)
        return method.described()[part.offset : part.offset + part.rows.size]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.output_of(0, x)

    def output_of(self, index: int, x: Tensor) -> Tensor:
        """Return the output of one layer: [..., outputs], last stride 1, of x [..., in]. The first call for an x
        computes all layers; each output is returned once."""
        if x is not self._x or index not in self._outputs:
            out = self.method.multiply(x.flatten(0, -2), self.bias)
            self._x = x
            for i, part in enumerate(self.shape.parts):
                mine = out[:, part.offset : part.offset + part.rows.size]
                self._outputs[i] = mine.view(*x.shape[:-1], part.rows.size)
        output = self._outputs.pop(index)
        if not self._outputs:
            self._x = None
        return output


class Part(nn.Module):
    """One layer of a `Merged`, other than the first."""

    def __init__(self, merged: Merged, index: int) -> None:
        super().__init__()
        self._merged = (merged,)  # the tuple keeps it from being a submodule
        self._index = index

    @property
    def weight(self) -> Tensor:
        return self._merged[0].weight_of(self._index)

    def forward(self, x: Tensor) -> Tensor:
        return self._merged[0].output_of(self._index, x)


class GatedMLP(nn.Module):
    """activation(gate(x)) * up(x), then the down projection. Its modules have the names of the checkpoint's.

    match: the names of the projections and the activation.
    linears: the model's projections by these names, for their sizes and biases.
    rows: this rank's outputs of the gate and up projections, or of the one projection that has both.
    path: name of the MLP in the model, for errors.
    """

    def __init__(
        self, match: MLPMatch, linears: Mapping[str, nn.Linear], rows: Sequence[Span], group: TPGroup, path: str
    ) -> None:
        super().__init__()
        first = linears[match.gates[0]]
        parts = dict(zip(match.gates, rows, strict=True))
        self._gates, self._down, self._activation = match.gates[0], match.down, match.activation
        self.add_module(self._gates, ColumnParallelLinear(first.in_features, parts, first.bias is not None))
        self.add_module(self._down, RowLinear(linears[match.down], group, f"{path}.{match.down}", whole_inputs=False))

    def forward(self, x: Tensor) -> Tensor:
        gates: ColumnParallelLinear = self._modules[self._gates]  # type: ignore[assignment]
        rows = x.flatten(0, -2)
        if self._activation == "silu" and gates.bias is None:
            inner = gates.method.multiply_gated(rows)
        else:
            inner = ACTIVATIONS[self._activation](gates.method.multiply(rows, gates.bias))
        assert isinstance(inner, Tensor), "of no FP8 format"
        out: Tensor = self._modules[self._down](inner)  # type: ignore[misc]
        return out.view(*x.shape[:-1], out.shape[-1])


def can_merge(rows: Sequence[Span], is_quantised: bool) -> bool:
    """Return whether layers with these outputs on this rank can be merged without a scale block that covers two of
    them."""
    return not is_quantised or all(span.first % ALIGNED == span.end % ALIGNED == 0 for span in rows)


_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
_WHOLE = (None, "replicated_with_grad_allreduce", "mla_kv_a_proj")  # the last differs only in its gradient


def put_layers(model: PreTrainedModel, config: AdapterConfig, group: TPGroup, running_pass: RunningPass) -> None:
    """Replace, in place, experts and their routers, gated MLPs, RMSNorms, linear layers and the token embedding; other
    modules with tensors become a `Leaf`. Raises UnservableError for an unknown style in the tensor-parallel plan."""
    _Replacement(model, config, group, running_pass).run()


class _Replacement:
    """One run of `put_layers`, whose arguments it keeps.

    _live: returns which rows of the running pass are not padding, for routers.
    _kv_heads: number of K/V heads of each key and value projection, by path.
    """

    def __init__(
        self, model: PreTrainedModel, config: AdapterConfig, group: TPGroup, running_pass: RunningPass
    ) -> None:
        self._model, self._config, self._group, self._plan = model, config, group, dict(config.plan)
        self._live = running_pass.live
        self._is_quantised = not isinstance(config.quant, Unquantized)
        self._kv_heads = {
            f"{call.module}.{name}": call.num_kv_heads for call in config.calls for name in KV_PROJECTIONS
        }

    def run(self) -> None:
        """Replace the model's modules: experts, gated MLPs and linear layers with a common input first, because they
        contain modules that are replaced one by one afterwards."""
        model = self._model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._put_experts()
        for path, module in list(model.named_modules()):
            mlp = self._gated_mlp(path, module)
            if mlp is not None:
                self._put(path, mlp)
        self._merge_siblings()
        for path, module in list(model.named_modules()):
            if module is head:  # the caller replaces it
                continue
            if module is embedding:
                self._put(path, Embedding(module, self._group))
            elif type(module) is nn.Linear:
                self._put(path, self._linear(path, module))
            elif own_tensors(module) and not _is_ours(module):
                norm = match_norm(module, torch.get_default_dtype())
                if norm is not None:
                    self._put(path, norm.kind(norm.size, norm.eps))
                    continue
                kind = leaf_kind(module)
                module.__class__ = type(type(module).__name__, (kind, type(module)), {})

    def _put_experts(self) -> None:
        """Replace every stack of experts, and its router if one of Aerie's chooses the same experts.

        Routers are compared on random inputs once for each kind of block (`traits_of`).
        """
        known: dict[Hashable, tuple[str, RouterMatch] | None] = {}
        for path, module in list(self._model.named_modules()):
            activation = match_experts(module)
            if activation is None:
                continue
            parent, _, name = path.rpartition(".")
            block = self._model.get_submodule(parent)
            traits = traits_of(block)
            if traits not in known:
                known[traits] = find_router(block, name)
            router = known[traits]
            is_routed = False
            if router is not None:
                where, match = router
                # a submodule that computes the logits may be quantised, and `MatchedRouter` computes them in full
                is_routed = match.linear is None or not self._is_quantised
            if router is not None and is_routed:
                ours = MatchedRouter(match, hidden_of(block.get_submodule(where), match), self._live)
                # If a submodule has the router's weight, a shell keeps the submodule's name, by which the weight loads.
                self._put(f"{parent}.{where}", ours if match.linear is None else RouterShell(match.linear, ours))
            per_token = self._config.experts_per_token
            self._put(path, RouterChosenExperts(module, activation, self._group, per_token, is_routed))

    def _put(self, path: str, new: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self._model.get_submodule(parent), name, new)

    def _style(self, path: str) -> str | None:
        return style_of(self._plan, path) if self._group.size > 1 else None

    def _gated_mlp(self, path: str, module: nn.Module) -> GatedMLP | None:
        """Return a fused MLP in place of `module`; None if it is none, or if its sharding or quantization separates its
        matrices."""
        match = match_gated_mlp(module)
        if match is None:
            return None
        paths = [f"{path}.{name}" for name in match.gates]
        rows = [self._rows_of(gate_path) for gate_path in paths]
        whole_or_cut = {self._style(gate_path) for gate_path in paths} | {self._style(f"{path}.{match.down}")}
        is_cut = whole_or_cut == {"colwise", "rowwise"} and len(rows) == 2  # sharding would separate gate and up
        if None in rows or (self._group.size > 1 and not is_cut):
            return None
        spans = [span for span in rows if span is not None]
        if len(spans) > 1 and not can_merge(spans, self._is_quantised):
            return None
        linears: dict[str, nn.Linear] = {name: module._modules[name] for name in (*match.gates, match.down)}  # type: ignore[misc]
        return GatedMLP(match, linears, spans, self._group, path)

    def _merge_siblings(self) -> None:
        """Merge linear layers that read the same input (q, k and v; gate and up) to one product."""
        modules = dict(self._model.named_modules())
        for siblings in self._config.siblings:
            spans = [(path, self._rows_of(path)) for path in siblings if type(modules.get(path)) is nn.Linear]
            rows = {path.rpartition(".")[2]: span for path, span in spans if span is not None}
            if len(rows) < 2 or not can_merge(list(rows.values()), self._is_quantised):
                continue
            parent = siblings[0].rpartition(".")[0]
            first: nn.Linear = modules[f"{parent}.{next(iter(rows))}"]
            merged = Merged(first.in_features, rows, first.bias is not None)
            for index, name in enumerate(rows):
                self._put(f"{parent}.{name}", Part(merged, index) if index else merged)

    def _rows_of(self, path: str) -> Span | None:
        """Return this rank's outputs of a linear layer; None if its inputs are sharded or its outputs gathered."""
        linear, style, heads = self._model.get_submodule(path), self._style(path), self._kv_heads.get(path)
        assert isinstance(linear, nn.Linear), "asked of linear layers"
        if style in _WHOLE:
            return Span.whole(linear.out_features)
        if style != _COLUMNS[0]:
            return None
        if heads is not None:
            return Span(*kv_head_span(heads, self._group), heads).times(linear.out_features // heads)
        return rank_span(linear.out_features, self._group, path)

    def _linear(self, path: str, linear: nn.Linear) -> nn.Module:
        """Return the tensor-parallel layer that replaces a linear one, as transformers' plan shares it."""
        style, rows = self._style(path), self._rows_of(path)
        if rows is not None:
            return ColumnLinear(linear, rows, self._group, gather=False)
        if style in _COLUMNS:
            return ColumnLinear(linear, rank_span(linear.out_features, self._group, path), self._group, gather=True)
        if style in _ROWS:
            return RowLinear(linear, self._group, path, style == _ROWS[1])
        raise UnservableError(f"shares {path} among ranks by {style!r}, which Aerie does not know")


def leaf_kind(module: nn.Module) -> type[Leaf]:
    """Return the class for a module with tensors that no layer of Aerie replaces."""
    if is_plain_embedding(module):
        return LeafEmbedding
    return GatheringExperts if gathers_experts(module) else Leaf


def _is_ours(module: nn.Module) -> bool:
    """Return whether the module has been replaced."""
    return type(module).__module__.startswith("aerie.")
