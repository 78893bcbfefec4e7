"""Qwen3-Next: a hybrid (`aerie.workers.models.qwen.hybrid`) whose recurrent layers' projections are packed by key
heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aerie.kernels.delta_rule.tables import DeltaHeads
from aerie.workers.layers.weighted import WrongTensorError
from aerie.workers.models.name_map import NameMap, Packed, decoder_names, split_rows
from aerie.workers.models.qwen.hybrid import HybridConfig, HybridForCausalLM, layer_rules, packed_experts, read_config
from aerie.workers.models.registry import ModelFamily
from aerie.workers.quantization.integers.format import split_outputs


def _packed_projections(config: HybridConfig, name: str) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for the projections of a recurrent layer. The checkpoint has two matrices: rows
    of q, k, v and z of the first key head, those of the second, ...; and rows of b and a in the same order. name: the
    layer's name in the checkpoint."""
    heads, layer = config.heads, f"{name}.linear_attn"
    values = heads.group * heads.value_dim
    qkvz, ba = (heads.key_dim, heads.key_dim, values, values), (heads.group, heads.group)
    return (
        Packed(
            f"{layer}.in_proj_qkvz.{{kind}}",
            tuple(f"{layer}.in_proj_{part}.{{kind}}" for part in "qkvz"),
            lambda full, kind: _split(full, kind, heads, qkvz, "q, k, v and z"),
        ),
        Packed(
            f"{layer}.in_proj_ba.{{kind}}",
            tuple(f"{layer}.in_proj_{part}.{{kind}}" for part in "ba"),
            lambda full, kind: _split(full, kind, heads, ba, "b and a"),
        ),
    )


def _split(full: Tensor, kind: str, heads: DeltaHeads, sizes: Sequence[int], what: str) -> list[Tensor]:
    """Return the parts of a tensor of a packed linear layer. kind: which of its tensors, such as "weight". sizes, what:
    see `_by_key_heads`."""
    rows = [heads.key_heads * size for size in sizes]
    return split_outputs(full, kind, rows, lambda matrix: _by_key_heads(matrix, heads, sizes, what))


def _by_key_heads(full: Tensor, heads: DeltaHeads, sizes: Sequence[int], what: str) -> list[Tensor]:
    """Split a matrix, or its scales, whose rows are grouped by key head: sizes[i] rows of part i for each head. what:
    names of the parts, for errors."""
    if full.dim() != 2 or full.shape[0] % heads.key_heads:
        raise WrongTensorError(
            f"has shape {tuple(full.shape)}, which cannot be cut into linear_num_key_heads={heads.key_heads} parts"
        )
    parts = [split_rows(rows, sizes, what) for rows in full.reshape(heads.key_heads, -1, full.shape[1])]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def weight_names(config: HybridConfig) -> NameMap:
    name = "model.layers.{layer}"
    packed = (*_packed_projections(config, name), *packed_experts(config, name))
    return decoder_names(layer_rules, config.tie_embeddings, ignored=("mtp.*",), packed=packed)


FAMILY = ModelFamily(read_config, HybridForCausalLM, weight_names)
