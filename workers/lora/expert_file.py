"""Finds the matrices of routed experts in an adapter: a module of each expert's matrix, or peft's wrappers of
parameters that stack all experts (`target_parameters`), which their shapes distinguish."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertLoraTables
from aerie.workers.layers.linear_method import Part
from aerie.workers.layers.moe import Experts
from aerie.workers.layers.weighted import WrongTensorError
from aerie.workers.lora.adapter_config import AdapterConfig
from aerie.workers.lora.experts import DOWN, GATE_UP
from aerie.workers.lora.matrices import LayerMatrices, Matrices, check_matrices, check_scaled
from aerie.workers.models.name_map import NameMap

ASK = "is of routed experts, which adapters change only with lora.experts: true (docs/lora.md)"
_NESTED = ".base_layer"  # peft's name of the inner of two wrappers around one module
# peft (src/peft/tuners/lora/layer.py, ParamWrapper) took the second dimension of every stacked parameter for the
# inputs before this version; most families have the outputs there. Version 0.19.0 took the third for all families.
_KNOWS_LAYOUTS = (0, 19, 1)


@dataclass(frozen=True)
class _Layer:
    """One layer with routed experts.

    path: in our model.
    experts: the layer.
    gates: rows of gate and of up in a stacked B.
    inputs_first: whether the family stacks matrices with inputs first, as gpt-oss does.
    """

    path: str
    experts: Experts
    gates: tuple[Tensor, Tensor]
    inputs_first: bool


@dataclass(frozen=True)
class _Stack:
    """Matrices of all experts of a product.

    down: [experts, rank, in_features].
    up: [experts, out_features, rank].
    """

    down: Tensor
    up: Tensor


class ExpertNames:
    """Finds the experts of the modules that an adapter names.

    experts: layers with routed experts, by path in our model.
    names: the checkpoint's names of the model's tensors.
    enabled: `LoraConfig.experts`.
    """

    def __init__(self, experts: Mapping[str, Experts], names: NameMap, enabled: bool) -> None:
        self.layers, self.enabled = experts, enabled
        self._names = names
        self._single: dict[str, tuple[str, Experts, Part, int]] = {}
        self._stacked: dict[str, _Layer] = {}
        for path, layer in experts.items():
            for expert in range(layer.shape.held.total):
                for part in layer.shape.parts:
                    self._single[names.module_name(path, part.name, expert)] = path, layer, part, expert
            name = names.module_name(path, "gate_proj", 0).rsplit(".", 2)[0]  # without expert and matrix
            found = _Layer(path, layer, *_layout(layer, names, path, name))
            self._stacked |= {name: found, f"{name}.experts": found}

    def write(
        self,
        layers: dict[str, LayerMatrices],
        tables: Mapping[str, ExpertLoraTables],
        module: str,
        matrices: Matrices,
        config: AdapterConfig,
    ) -> bool:
        """Copy this rank's share of a module's matrices into `layers`, by path of product; return False if it is not of
        routed experts. tables: only their shapes and dtype are read. Raises WrongTensorError."""
        name = self._names.canonical_module(module)
        single, layer = self._single.get(name), self._stacked.get(name.removesuffix(_NESTED))
        if single is None and layer is None:
            return False
        if not self.enabled:
            raise WrongTensorError(ASK)
        if single is not None:
            path, experts, part, expert = single
            check_matrices(matrices, config.rank_of(module))
            target = _target(layers, tables, path, experts, part)
            _write(target, experts, part, expert, matrices.down, matrices.up, matrices.scale)
        elif layer is not None:
            product, key, stack = _unstacked(layer, module.removesuffix(_NESTED), matrices, config)
            scale = config.scale_of(key)
            for part, rows in _parts(layer, product):
                target = _target(layers, tables, layer.path, layer.experts, part)
                for expert in range(stack.down.shape[0]):
                    up = stack.up[expert] if rows is None else stack.up[expert][rows]
                    _write(target, layer.experts, part, expert, stack.down[expert], up, scale)
        return True


def _layout(layer: Experts, names: NameMap, path: str, name: str) -> tuple[tuple[Tensor, Tensor], bool]:
    """Return the rows of gate and of up in the family's stacked matrices, and whether these have inputs first. By the
    checkpoint's names; without such names, gate rows come first."""
    width, count = layer.shape.gate_up.parts[0].rows.total, layer.shape.held.total
    numbers = torch.arange(2 * width, dtype=torch.float32)
    for inputs_first in (True, False):
        probe = (numbers[None, :] if inputs_first else numbers[:, None]).expand(count, -1, -1)
        try:
            pieces = dict(names.pieces(f"{name}.gate_up_proj", probe))
        except WrongTensorError:
            continue
        found = [pieces.get(f"{names.module_name(path, part, 0)}.weight") for part in ("gate_proj", "up_proj")]
        rows = [piece.flatten().long() for piece in found if piece is not None and piece.numel() == width]
        if len(rows) == 2:
            return (rows[0], rows[1]), inputs_first
    gate, up = numbers.long().chunk(2)
    return (gate, up), False


def _parts(layer: _Layer, product: str) -> Iterator[tuple[Part, Tensor | None]]:
    """Yield the parts of a product, and the rows of each in a stacked B; None: all."""
    shape = layer.experts.shape
    yield from (
        zip(shape.gate_up.parts, layer.gates, strict=True) if product == GATE_UP else ((shape.down.parts[0], None),)
    )


def _unstacked(layer: _Layer, module: str, matrices: Matrices, config: AdapterConfig) -> tuple[str, str, _Stack]:
    """Return the product that stacked matrices are of, the name by which peft's patterns know it, and the matrices by
    expert. Ranks of experts are neighbours in A, and far apart in B. Raises WrongTensorError."""
    shape = layer.experts.shape
    count, size, width = shape.held.total, shape.size, shape.gate_up.parts[0].rows.total
    given = matrices.down.shape[-1], matrices.up.shape[0]  # inputs and outputs
    forms = (
        (GATE_UP, False, (size, 2 * width)),
        (GATE_UP, True, (2 * width, size)),
        (DOWN, False, (width, size)),
        (DOWN, True, (size, width)),
    )
    found = {(product, is_turned) for product, is_turned, sizes in forms if sizes == given}
    if not found:
        raise WrongTensorError(
            f"has shapes {tuple(matrices.down.shape)} and {tuple(matrices.up.shape)}, which do not fit experts of "
            f"{size} inputs and a width of {width}"
        )
    if len(found) > 1:  # square matrices
        found = {form for form in found if form[1] == _turns(config.peft_version, layer.inputs_first)}
    ((product, is_turned),) = found
    key = f"{module}.{'gate_up_proj' if product == GATE_UP else 'down_proj'}"
    rank = config.rank_of(key)
    check_matrices(matrices, rank * count)
    down = matrices.down.view(count, rank, -1)
    up = matrices.up.view(-1, rank, count).permute(2, 0, 1)
    return product, key, _Stack(up.mT, down.mT) if is_turned else _Stack(down, up)


def _turns(version: tuple[int, ...], inputs_first: bool) -> bool:
    """Whether this version of peft took outputs for inputs."""
    return version[:2] == (0, 19) and version < _KNOWS_LAYOUTS if inputs_first else version < _KNOWS_LAYOUTS


def _target(
    layers: dict[str, LayerMatrices], tables: Mapping[str, ExpertLoraTables], path: str, experts: Experts, part: Part
) -> LayerMatrices:
    product = f"{path}.{DOWN if part in experts.shape.down.parts else GATE_UP}"
    if product not in layers:
        mine = tables[product]
        layers[product] = LayerMatrices(
            *(torch.zeros(table.shape[1:], dtype=table.dtype) for table in (mine.down, mine.up))
        )
    return layers[product]


def _write(
    into: LayerMatrices, experts: Experts, part: Part, expert: int, down: Tensor, up: Tensor, scale: float
) -> None:
    """Copy this rank's share of one expert's matrices. Raises WrongTensorError."""
    rank, columns, held = down.shape[0], part.columns, experts.shape.held
    if down.shape[1] != columns.total:
        raise WrongTensorError(f"(lora_A) has shape {tuple(down.shape)}, the expert has {columns.total} inputs")
    if up.shape[0] != part.rows.total:
        raise WrongTensorError(f"(lora_B) has shape {tuple(up.shape)}, the expert has {part.rows.total} outputs")
    if not held.first <= expert < held.end:
        return
    matrix = experts.shape.down if part in experts.shape.down.parts else experts.shape.gate_up
    first = matrix.parts.index(part) * into.up.shape[2]
    into.down[expert - held.first, first : first + rank] = down[:, columns.first : columns.end]
    target = into.up[expert - held.first, part.offset : part.offset + part.rows.size, :rank]
    target.copy_(up[part.rows.first : part.rows.end].float() * scale)
    check_scaled(target, scale)
