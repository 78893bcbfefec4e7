"""What families with experts share: which layers have them, sizes, layers, names and placement."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.route import Routing
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer, FeedForward
from aerie.workers.layers.moe import MixtureOfExperts
from aerie.workers.layers.weighted import WrongTensorError
from aerie.workers.models import llama
from aerie.workers.models.config_fields import MAX_EXPERTS, architecture_of, size_of
from aerie.workers.models.llama import LlamaConfig, LlamaForCausalLM, make_attention, make_mlp
from aerie.workers.models.name_map import Packed

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_GROUPED_MAJORS = (9, 10)  # compute capabilities on which torch 2.13 computes grouped products without a device sync


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """The layers with experts of a model.

    routing: how a router chooses the experts.
    layers: numbers of the layers.
    width: intermediate size of an expert.
    shared_width: intermediate size of a layer's shared experts together; 0: none.
    width_name, shared_name: what config.json calls these sizes.
    activation, biased: properties of the routed experts, see `MixtureOfExperts`.
    """

    routing: Routing
    layers: frozenset[int]
    width: int
    shared_width: int = 0
    width_name: str = "moe_intermediate_size"
    shared_name: str = "n_shared_experts * moe_intermediate_size"
    activation: GatedActivation = SWIGLU
    biased: bool = False

    def cut_sizes(self, whole: bool) -> dict[str, int]:
        """Return the sizes that ranks share, by config.json's names. whole: see `ModelConfig.whole_experts`."""
        routed = {"the number of experts": self.routing.num_experts} if whole else {self.width_name: self.width}
        return routed | ({self.shared_name: self.shared_width} if self.shared_width else {})

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        """Return the input sizes of one rank's linear layers, by config.json's names (`ModelConfig.linear_inputs`)."""
        return {self.shared_name: self.shared_width // tensor_parallel} if self.shared_width else {}

    def expert_inputs(self, whole: bool, tensor_parallel: int) -> dict[str, int]:
        """Return the input sizes of one rank's down projections of routed experts (`ModelConfig.expert_inputs`)."""
        return {self.width_name: self.width if whole else self.width // tensor_parallel}

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        """See `check_experts_device`; a model whose layers are all dense passes. Raises ValueError."""
        if self.layers:
            check_experts_device(device, dtype, source)

    def module(self, hidden_size: int, group: TPGroup, whole: bool) -> MixtureOfExperts:
        """Return the experts of one layer."""
        return MixtureOfExperts(
            hidden_size, self.width, self.routing, group, self.shared_width, whole, self.activation, self.biased
        )


@dataclass(frozen=True, kw_only=True)
class LlamaMoeConfig(LlamaConfig):
    """A Llama with experts instead of MLPs in all or some layers.

    intermediate_size: intermediate size of MLPs.
    experts: None: a dense model.
    """

    experts: ExpertLayers | None

    @property
    def has_mlps(self) -> bool:
        """Whether some layer has an MLP instead of experts."""
        return self.experts is None or not self.experts.layers.issuperset(range(self.num_layers))

    @property
    def recorded_routing(self) -> Routing | None:
        return None if self.experts is None else self.experts.routing

    @property
    def cut_sizes(self) -> dict[str, int]:
        dense = super().cut_sizes if self.has_mlps else {}
        return dense if self.experts is None else dense | self.experts.cut_sizes(self.whole_experts)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        if not self.has_mlps:
            del inputs[self.mlp_name]
        return inputs if self.experts is None else inputs | self.experts.linear_inputs(tensor_parallel)

    def expert_inputs(self, tensor_parallel: int) -> dict[str, int]:
        return {} if self.experts is None else self.experts.expert_inputs(self.whole_experts, tensor_parallel)

    def with_whole_experts(self, source: str) -> Self:
        return super().with_whole_experts(source) if self.experts is None else replace(self, whole_experts=True)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        if self.experts is not None:
            self.experts.check_device(device, dtype, source)


def make_feed_forward(config: LlamaMoeConfig, layer: int, group: TPGroup) -> FeedForward:
    """Return the experts of a layer, or its MLP."""
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return make_mlp(config, group)
    return experts.module(config.hidden_size, group, config.whole_experts)


def make_layer(config: LlamaMoeConfig, layer: int, group: TPGroup) -> DecoderLayer:
    attention = make_attention(config, layer, group, config.hidden_size)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, make_feed_forward(config, layer, group), group)


class LlamaMoeForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def num_experts_of(config: dict[str, Any], source: str) -> int:
    """Return the number of experts, which config.json may have under several names. Raises ValueError if it has
    none."""
    for key in _NUM_EXPERTS:
        if config.get(key) is not None:
            return size_of(config, key, source, max_value=MAX_EXPERTS)
    raise ValueError(
        f"{source}: config.json lacks {_NUM_EXPERTS[0]!r}, which a {architecture_of(config, 'model')} needs"
    )


def moe_rules(
    path: str, name: str, block: str = "mlp", router: str = "gate", shared: str = "shared_experts"
) -> dict[str, str]:
    """Return the rules of a `NameMap` for a layer's `MixtureOfExperts`; put them before the rules of dense layers.

    path, name: the layer's path and its name in the checkpoint.
    block, router, shared: names in the checkpoint of the block, and of router and shared experts in it.
    """
    block = f"{name}.{block}"
    return {
        f"{path}.mlp.router": f"{block}.{router}",
        f"{path}.mlp.experts": f"{block}.experts.{{expert}}.{{part}}",
        f"{path}.mlp.shared_experts.gate_up": f"{block}.{shared}.{{part}}",
        f"{path}.mlp.shared_experts.{{module}}": f"{block}.{shared}.{{module}}",
    }


def layer_rules(path: str, name: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for one layer (`llama.layer_rules`)."""
    return moe_rules(path, name) | llama.layer_rules(path, name)


def stacked_experts(
    name: str, num_experts: int, gate_up_name: str = "gate_up_proj", down_name: str = "down_proj"
) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for experts that bf16 checkpoints stack: one tensor of all gate and up
    projections, gate first, and one of all down projections. name: the experts' name in the checkpoint.
    gate_up_name, down_name: the matrices' names there."""
    experts = [f"{name}.{i}" for i in range(num_experts)]
    gate_up = tuple(f"{expert}.{part}.weight" for expert in experts for part in ("gate_proj", "up_proj"))
    return (
        Packed(f"{name}.{gate_up_name}", gate_up, lambda full, _: _stacked(full, num_experts, 2)),
        Packed(
            f"{name}.{down_name}",
            tuple(f"{expert}.down_proj.weight" for expert in experts),
            lambda full, _: _stacked(full, num_experts, 1),
        ),
    )


def _stacked(full: Tensor, num_experts: int, parts: int) -> list[Tensor]:
    """Return the matrices of [experts, parts * rows, columns]."""
    if full.dim() != 3 or full.shape[0] != num_experts or full.shape[1] % parts:
        raise WrongTensorError(f"has shape {tuple(full.shape)}, config.json implies {num_experts} experts")
    return [part for expert in full for part in expert.chunk(parts)]


def outputs_first(packed: Packed, outputs: int, inputs: int) -> Packed:
    """Return a rule that accepts matrices with outputs or inputs first. Square matrices are taken to have inputs first,
    as in published checkpoints."""

    def split(full: Tensor, kind: str) -> list[Tensor]:
        if full.dim() != 3 or set(full.shape[1:]) != {outputs, inputs}:
            raise WrongTensorError(f"has shape {tuple(full.shape)}, config.json implies matrices of {inputs}x{outputs}")
        return list(packed.split(full.mT if full.shape[1] == inputs else full, kind))

    return replace(packed, split=split)


def interleaved_experts(name: str, num_experts: int) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for a layer's experts as gpt-oss stacks them, with gate and up rows interleaved:
    MXFP4 blocks, scales and biases; or transposed 16-bit weights and biases. name: the layer's name in the
    checkpoint."""
    experts = [f"{name}.mlp.experts.{i}" for i in range(num_experts)]
    packed = [  # 16-bit weights, inputs first
        Packed(
            f"{name}.mlp.experts.gate_up_proj",
            tuple(f"{expert}.{part}.weight" for expert in experts for part in ("gate_proj", "up_proj")),
            lambda full, _: _interleaved(_transposed(full), num_experts, 2),
        ),
        Packed(
            f"{name}.mlp.experts.down_proj",
            tuple(f"{expert}.down_proj.weight" for expert in experts),
            lambda full, _: _interleaved(_transposed(full), num_experts, 1),
        ),
    ]
    for kind in ("blocks", "scales", "bias"):  # MXFP4's two tensors, outputs first; biases of both formats
        gate_up = tuple(f"{expert}.{part}.{kind}" for expert in experts for part in ("gate_proj", "up_proj"))
        down = tuple(f"{expert}.down_proj.{kind}" for expert in experts)
        packed += [
            Packed(
                f"{name}.mlp.experts.gate_up_proj_{kind}", gate_up, lambda full, _: _interleaved(full, num_experts, 2)
            ),
            Packed(f"{name}.mlp.experts.down_proj_{kind}", down, lambda full, _: _interleaved(full, num_experts, 1)),
        ]
    return tuple(packed)


def _transposed(full: Tensor) -> Tensor:
    """Return each expert's matrix [inputs, outputs] as [outputs, inputs]."""
    return full.mT if full.dim() == 3 else full.flatten()


def _interleaved(full: Tensor, num_experts: int, parts: int) -> list[Tensor]:
    """Return `parts` matrices of each expert; matrix i has the rows i, i + parts, i + 2 * parts, ..."""
    if full.dim() < 2 or full.shape[0] != num_experts or full.shape[1] % parts:
        raise WrongTensorError(f"has shape {tuple(full.shape)}, config.json implies {num_experts} experts")
    return [expert[first::parts] for expert in full for first in range(parts)]


def check_experts_device(device: Capability, dtype: torch.dtype, source: str) -> None:
    """Raise ValueError, naming `source`, if experts would need a device sync in every layer, which a captured step
    cannot do."""
    if not device.captures_graphs:
        return
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"{source}: experts on a GPU are multiplied in bfloat16, not in {name}; set dtype: bfloat16")
    capability = device.compute
    if capability is not None and capability[0] not in _GROUPED_MAJORS:
        raise ValueError(
            f"{source}: experts need a GPU of compute capability 9.x or 10.x, this one has "
            f"{capability[0]}.{capability[1]}; serve a dense model"
        )
