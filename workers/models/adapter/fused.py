"""Layers with fewer kernels than transformers' modules: linear layers with the same input as one product, and gated
MLPs with one product before the activation."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from aerie.kernels.norm.activation import ACTIVATIONS
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import ColumnParallelLinear
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.models.adapter.layers import Rows
from aerie.workers.models.adapter.matching import MLPMatch

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
        assert isinstance(self.method, DenseLinearMethod)
        part = self.shape.parts[index]
        return self.method.described()[part.offset : part.offset + part.rows.size]

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
        found = self._outputs.pop(index)
        if not self._outputs:
            self._x = None
        return found


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

    rows: this rank's outputs of the gate and up projections, or of the one projection that has both.
    """

    def __init__(
        self, match: MLPMatch, theirs: Mapping[str, nn.Linear], rows: Sequence[Span], group: TPGroup, path: str
    ) -> None:
        super().__init__()
        first = theirs[match.gates[0]]
        parts = dict(zip(match.gates, rows, strict=True))
        self._gates, self._down, self._activation = match.gates[0], match.down, match.activation
        self.add_module(self._gates, ColumnParallelLinear(first.in_features, parts, first.bias is not None))
        self.add_module(self._down, Rows(theirs[match.down], group, f"{path}.{match.down}", whole_inputs=False))

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
