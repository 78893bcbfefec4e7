"""Which routed experts adapters may change, their tables, and `AdaptedExperts`, which serves them. A pass without
adapters runs the layer's own method, with its fused kernels."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from aerie.kernels.experts.adapted.product import ExpertAdapters, ExpertLoraTables
from aerie.kernels.experts.route import RouterLogits, TokenSlots
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.lora.product import VARIANT_ROWS
from aerie.workers.config import LoraConfig
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part
from aerie.workers.layers.moe import Experts, MixtureOfExperts
from aerie.workers.lora.adapted_weight import AdaptedWeight
from aerie.workers.lora.layers import AdapterRows, padded_rank

GATE_UP, DOWN = "gate_up", "down"  # names of the two products, after the path of their layer


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """Return the layers with routed experts, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Experts)}


def adapted_experts(model: nn.Module, config: LoraConfig, title: str) -> dict[str, Experts]:
    """Return the layers whose experts adapters may change, by path: none unless `LoraConfig.experts`. title: names the
    model. Raises ValueError if there are none although asked for, or if their weights have no such product."""
    if not config.experts:
        return {}
    layers = experts_of(model)
    if not layers:
        raise ValueError(f"lora.experts: {title} has no routed experts; leave it out")
    for layer in layers.values():
        if fault := layer.method.adapters_fault:
            raise ValueError(f"lora.experts: {title}: {fault}")
    return layers


def allocate_expert_tables(
    layers: Mapping[str, Experts], max_loras: int, rank: int, device: torch.device
) -> dict[str, ExpertLoraTables]:
    """Return the layers' tables without adapters, by path of the product. rank: of `padded_rank`."""

    def tables(shape: ExpertsShape, matrix: LinearShape, dtype: torch.dtype) -> ExpertLoraTables:
        ends = [part.offset + part.rows.size for part in matrix.parts]
        first = max_loras, shape.num_experts
        down = torch.zeros(*first, len(ends) * rank, matrix.in_features, dtype=dtype, device=device)
        up = torch.zeros(*first, matrix.out_features, rank, dtype=dtype, device=device)
        return ExpertLoraTables(down, up, (0, *ends))

    return {
        f"{path}.{product}": tables(layer.shape, matrix, layer.method.dtype)
        for path, layer in layers.items()
        for product, matrix in ((GATE_UP, layer.shape.gate_up), (DOWN, layer.shape.down))
    }


def expert_table_bytes(layers: Mapping[str, Experts], config: LoraConfig) -> int:
    """Return the bytes of all layers' tables on this rank."""
    rank, meta = padded_rank(config.max_lora_rank), torch.device("meta")
    tables = allocate_expert_tables(layers, config.max_loras, rank, meta)
    return sum(table.down.nbytes + table.up.nbytes for table in tables.values())


class AdaptedExperts(AdaptedWeight, ExpertsMethod):
    """The method of a layer's experts, with adapters. inner: the layer's own, which has the weights."""

    inner: ExpertsMethod

    def __init__(
        self, inner: ExpertsMethod, gate_up: ExpertLoraTables, down: ExpertLoraTables, rows: AdapterRows
    ) -> None:
        super().__init__(inner.shape)
        self.inner, self.dtype, self.kinds = inner, inner.dtype, inner.kinds
        self.gate_up, self.down = gate_up, down
        self._rows = rows

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        return self._adapted(x, router, out) if self._rows.is_active else self.inner.multiply(x, router, out)

    def multiply_routed(self, x: Tensor | Fp8Rows, router: RouterLogits) -> Tensor:
        return self._adapted(x, router, None) if self._rows.is_active else self.inner.multiply_routed(x, router)

    def _adapted(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None) -> Tensor:
        """Return the sum without joined experts: a pass with adapters multiplies shared experts alone."""
        assert isinstance(x, Tensor), "fp8_inputs is None in a pass with adapters"
        adapters = ExpertAdapters(self.gate_up, self.down, self._rows.lora_indices(x.shape[0]))
        return self.inner.multiply_adapted(x, router, adapters, out)

    def routed_rows(self) -> list[int]:
        return self.inner.routed_rows()

    @property
    def is_fused(self) -> bool:
        return not self._rows.is_active and self.inner.is_fused

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return None if self._rows.is_active else self.inner.fp8_inputs

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        self.inner.load(kind, expert, part, full)

    def fill_missing(self, kind: str) -> bool:
        return self.inner.fill_missing(kind)

    def join(self, gate_up: LinearMethod, down: LinearMethod, options: GEMMOptions) -> bool:
        return self.inner.join(gate_up, down, options)


def launch_adapted_experts(model: nn.Module, rows: AdapterRows) -> None:
    """Launch all variants of the kernels of experts with adapters, with rows that have none, so that no step compiles
    one. Layers of equal sizes share them. All rows are padding."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for layer in {(layer.experts.shape, layer.experts.method.format): layer for layer in layers}.values():
        method, router = layer.experts.method, layer.router
        if not isinstance(method, AdaptedExperts):
            continue
        for num_rows in VARIANT_ROWS:
            x = torch.zeros(num_rows, method.shape.size, dtype=method.dtype, device=router.weight.device)
            slots = torch.zeros(num_rows, dtype=torch.int64, device=x.device)
            with rows.without_adapters(num_rows):
                method.multiply_routed(x, router.scored(x, TokenSlots(slots, 1)))
