"""Phi-3 and Phi-4: Llama layers, some with windows; checkpoints have q, k and v in one matrix, and the gate and up
projections in another. The adapter serves variants whose RoPE depends on the length (`longrope`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from aerie.workers.models import mistral
from aerie.workers.models.config import rope_scaling_of, rotated_dim_of
from aerie.workers.models.llama import LlamaForCausalLM
from aerie.workers.models.llama import weight_names as llama_names
from aerie.workers.models.mistral import WindowedConfig
from aerie.workers.models.name_map import NameMap, Packed, split_rows
from aerie.workers.models.registry import ModelFamily
from aerie.workers.quantization.integers.format import split_outputs


def is_served(config: Mapping[str, Any]) -> bool:
    scaling = rope_scaling_of(config, "")
    return (scaling.get("rope_type") or scaling.get("type") or "default") == "default"


def read_config(config: dict[str, Any], source: str) -> WindowedConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    windowed = mistral.read_config({"rms_norm_eps": 1e-5, **config}, source)
    return replace(windowed, rotated_dim=rotated_dim_of(config, windowed.head_dim, source, 1.0))


def weight_names(config: WindowedConfig) -> NameMap:
    """Return Llama's names, with q, k and v packed in one matrix, and the gate and up projections in another."""
    llama = llama_names(config)
    kv = config.num_kv_heads * config.head_dim

    heads = {"q_proj": config.num_heads * config.head_dim, "k_proj": kv, "v_proj": kv}
    halves = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
    return NameMap(
        llama.rules,
        ignored=llama.ignored,
        packed=(
            packed_rows("model.layers.{layer}.self_attn", "qkv_proj", heads),
            packed_rows("model.layers.{layer}.mlp", "gate_up_proj", halves),
        ),
    )


def packed_rows(module: str, name: str, rows: Mapping[str, int]) -> Packed:
    """Return the rule of a `NameMap` for linear layers that are packed in one matrix.

    module: name of the module in the checkpoint.
    name: name of the matrix in that module.
    rows: number of outputs of each linear layer, by name, in order.
    """
    return Packed(
        f"{module}.{name}.{{kind}}",
        tuple(f"{module}.{part}.{{kind}}" for part in rows),
        _splitter(tuple(rows.values()), ", ".join(rows)),
    )


def _splitter(rows: Sequence[int], what: str) -> Callable[[Tensor, str], list[Tensor]]:
    return lambda full, kind: split_outputs(full, kind, rows, lambda matrix: split_rows(matrix, rows, what))


FAMILY = ModelFamily(read_config, LlamaForCausalLM, weight_names, is_served)
