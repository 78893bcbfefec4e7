"""The gated MLP."""

from torch import Tensor

from aerie.kernels.experts.route import TokenSlots
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.layer.host_layer import HostProduct
from aerie.kernels.norm.activation import ACTIVATIONS
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import FeedForward
from aerie.workers.layers.linear import GateUpParallelLinear, RowParallelLinear


class GatedMLP(FeedForward):
    """(activation(x W_gate^T) * (x W_up^T)) W_down^T. activation: of `aerie.kernels.norm.activation.ACTIVATIONS`."""

    def __init__(self, hidden_size: int, intermediate_size: int, group: TPGroup, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = GateUpParallelLinear(hidden_size, intermediate_size, group, "intermediate_size")
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, "intermediate_size")

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return self.gate_up.method.fp8_inputs

    def host_products(self) -> tuple[HostProduct, HostProduct] | None:
        first, second = self.gate_up.host_product, self.down_proj.host_product
        return None if first is None or second is None or self.activation != "silu" else (first, second)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.down_proj.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        if self.activation == "silu":
            return self.down_proj.gated_partial(x, self.gate_up)
        inner = self.gate_up.method.multiply(x, None)
        return self.down_proj.partial(ACTIVATIONS[self.activation](inner))
