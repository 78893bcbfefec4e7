"""Common parts of families with mixtures of experts: names, sizes, and placement."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from attention.capability import Capability
from workers.layers.weighted import WrongTensorError
from workers.models.config_fields import MAX_EXPERTS, architecture_of, size_of
from workers.models.llama import LlamaConfig
from workers.models.name_map import Packed
from workers.ops.experts.route import Routing

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_GROUPED_MAJORS = (9, 10)  # compute capabilities on which torch 2.13 computes grouped products without a device sync


@dataclass(frozen=True, kw_only=True)
class LlamaMoeConfig(LlamaConfig):
    """Llama layers whose MLPs are experts, in all or some layers."""

    routing: Routing

    def with_whole_experts(self, source: str) -> Self:
        return replace(self, whole_experts=True)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        check_experts_device(device, dtype, source)


def num_experts_of(config: dict[str, Any], source: str) -> int:
    """Return the number of experts, which config.json may have under several names. Raises ValueError if it has
    none."""
    for key in _NUM_EXPERTS:
        if config.get(key) is not None:
            return size_of(config, key, source, most=MAX_EXPERTS)
    raise ValueError(
        f"{source}: config.json lacks {_NUM_EXPERTS[0]!r}, which a {architecture_of(config, 'model')} needs"
    )


def expert_cuts(routing: Routing, width: int, shared_width: int, whole: bool) -> dict[str, int]:
    """Return the sharded dimensions of a layer's experts, by config.json's names; see `MixtureOfExperts`."""
    if not whole:
        return {"moe_intermediate_size": width}
    shared = {"n_shared_experts * moe_intermediate_size": shared_width} if shared_width else {}
    return {"the number of experts": routing.num_experts} | shared


def expert_inputs(width: int, shared_width: int, whole: bool, tensor_parallel: int) -> dict[str, int]:
    """Return the entries of `ModelConfig.linear_inputs` for experts."""
    if not whole:
        return {"moe_intermediate_size": width // tensor_parallel}
    shared = {"n_shared_experts * moe_intermediate_size": shared_width // tensor_parallel} if shared_width else {}
    return {"moe_intermediate_size": width} | shared


def moe_rules(ours: str, theirs: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for a layer's `MixtureOfExperts`; put them before the rules of dense layers.
    ours, theirs: the layer's path and its name in the checkpoint."""
    return {
        f"{ours}.mlp.router": f"{theirs}.mlp.gate",
        f"{ours}.mlp.experts": f"{theirs}.mlp.experts.{{expert}}.{{part}}",
        f"{ours}.mlp.shared_experts.gate_up": f"{theirs}.mlp.shared_experts.{{part}}",
        f"{ours}.mlp.shared_experts.{{module}}": f"{theirs}.mlp.shared_experts.{{module}}",
    }


def stacked_experts(
    theirs: str, num_experts: int, gate_up_name: str = "gate_up_proj", down_name: str = "down_proj"
) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for experts that bf16 checkpoints stack: one tensor of all gate and up
    projections, gate first, and one of all down projections. theirs: the experts' name in the checkpoint.
    gate_up_name, down_name: the matrices' names there."""
    experts = [f"{theirs}.{i}" for i in range(num_experts)]
    gate_up = tuple(f"{each}.{part}.weight" for each in experts for part in ("gate_proj", "up_proj"))
    return (
        Packed(f"{theirs}.{gate_up_name}", gate_up, lambda full, _: _stacked(full, num_experts, 2)),
        Packed(
            f"{theirs}.{down_name}",
            tuple(f"{each}.down_proj.weight" for each in experts),
            lambda full, _: _stacked(full, num_experts, 1),
        ),
    )


def _stacked(full: Tensor, num_experts: int, parts: int) -> list[Tensor]:
    """Return the matrices of [experts, parts * rows, columns]."""
    if full.dim() != 3 or full.shape[0] != num_experts or full.shape[1] % parts:
        raise WrongTensorError(f"has shape {tuple(full.shape)}, config.json implies {num_experts} experts")
    return [part for expert in full for part in expert.chunk(parts)]


def outputs_first(packed: Packed, outputs: int, inputs: int) -> Packed:
    """Return the rule for matrices of either layout; square matrices have inputs first, as published."""

    def split(full: Tensor, kind: str) -> list[Tensor]:
        if full.dim() != 3 or set(full.shape[1:]) != {outputs, inputs}:
            raise WrongTensorError(f"has shape {tuple(full.shape)}, config.json implies matrices of {inputs}x{outputs}")
        return list(packed.split(full.mT if full.shape[1] == inputs else full, kind))

    return replace(packed, split=split)


def interleaved_experts(theirs: str, num_experts: int) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for a layer's experts as gpt-oss stacks them, with gate and up rows interleaved:
    MXFP4 blocks, scales and biases; or transposed 16-bit weights and biases. theirs: the layer's name in the
    checkpoint."""
    experts = [f"{theirs}.mlp.experts.{i}" for i in range(num_experts)]
    found = [
        Packed(
            f"{theirs}.mlp.experts.gate_up_proj",
            tuple(f"{each}.{part}.weight" for each in experts for part in ("gate_proj", "up_proj")),
            lambda full, _: _in_turn(_transposed(full), num_experts, 2),
        ),
        Packed(
            f"{theirs}.mlp.experts.down_proj",
            tuple(f"{each}.down_proj.weight" for each in experts),
            lambda full, _: _in_turn(_transposed(full), num_experts, 1),
        ),
    ]
    for kind in ("blocks", "scales", "bias"):
        gate_up = tuple(f"{each}.{part}.{kind}" for each in experts for part in ("gate_proj", "up_proj"))
        down = tuple(f"{each}.down_proj.{kind}" for each in experts)
        found += [
            Packed(
                f"{theirs}.mlp.experts.gate_up_proj_{kind}", gate_up, lambda full, _: _in_turn(full, num_experts, 2)
            ),
            Packed(f"{theirs}.mlp.experts.down_proj_{kind}", down, lambda full, _: _in_turn(full, num_experts, 1)),
        ]
    return tuple(found)


def _transposed(full: Tensor) -> Tensor:
    """Return each expert's matrix [inputs, outputs] as [outputs, inputs]."""
    return full.mT if full.dim() == 3 else full.flatten()


def _in_turn(full: Tensor, num_experts: int, parts: int) -> list[Tensor]:
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
