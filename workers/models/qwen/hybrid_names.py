"""Tensor names in checkpoints of hybrids, including packed tensors."""

from workers.models.moe import stacked_experts
from workers.models.name_map import Packed
from workers.models.qwen.hybrid import HybridConfig


def shared_expert_rules(ours: str, theirs: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for experts with a gated shared expert; see `layer_rules`."""
    return {
        f"{ours}.mlp.router": f"{theirs}.mlp.{{part}}",
        f"{ours}.mlp.experts": f"{theirs}.mlp.experts.{{expert}}.{{part}}",
        f"{ours}.mlp.shared_experts.gate_up": f"{theirs}.mlp.shared_expert.{{part}}",
        f"{ours}.mlp.shared_experts.{{module}}": f"{theirs}.mlp.shared_expert.{{module}}",
    }


def layer_rules(ours: str, theirs: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for any layer. ours, theirs: its path and its name in the checkpoint."""
    recurrent = {
        f"{ours}.self_attn.in_proj": f"{theirs}.linear_attn.{{part}}",
        f"{ours}.self_attn.gates": f"{theirs}.linear_attn.{{part}}",
        f"{ours}.self_attn.core": f"{theirs}.{{part}}",
        f"{ours}.self_attn.out_proj": f"{theirs}.linear_attn.out_proj",
    }
    return {
        **shared_expert_rules(ours, theirs),
        **recurrent,
        f"{ours}.self_attn.qkv": f"{theirs}.self_attn.{{part}}",
        f"{ours}.mlp.gate_up": f"{theirs}.mlp.{{part}}",
        f"{ours}.{{block}}.{{module}}": f"{theirs}.{{block}}.{{module}}",
        f"{ours}.{{norm}}": f"{theirs}.{{norm}}",
    }


def packed_experts(config: HybridConfig, theirs: str) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for a layer's experts, which bf16 checkpoints stack. theirs: see
    `layer_rules`."""
    if config.experts is None:
        return ()
    return stacked_experts(f"{theirs}.mlp.experts", config.experts.routing.num_experts)
