"""`AdapterConfig`: a decoder of transformers as a target, from its config.json."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aerie.attention.kv_cache.layout import LayerGroup
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.lazy_import import load
from aerie.workers.models.adapter.names import (
    Group,
    TransformersNames,
    check_class,
    check_layers,
    check_model,
    conversions,
    expert_names,
    groups_of,
    part_names,
    prefixes_of,
    record_linear_calls,
    renamings,
    stacked_experts_of,
    unused_tensors,
)
from aerie.workers.models.adapter.streams import path_of_layers, record_shapes
from aerie.workers.models.adapter.survey import (
    LENGTH_DEPENDENT,
    AttentionCall,
    UnservableError,
    make_model,
    record_chosen,
    survey,
)
from aerie.workers.models.config import ModelConfig, check_cuts, dtype_of, head_groups
from aerie.workers.models.config_fields import MAX_LAYERS, MAX_POSITIONS, architecture_of, ids_of, number_of, size_of
from aerie.workers.models.moe import check_experts_device, stacked_experts
from aerie.workers.quantization.quant_method import Unquantized
from aerie.workers.quantization.table import read_quant_method

KV_PROJECTIONS = ("k_proj", "v_proj")  # projections of which several ranks may have the same outputs
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(ModelConfig):
    """See `ModelConfig`.

    num_heads, num_kv_heads, head_dim: those of the first layer, as in the KV cache.
    raw: config.json of the decoder, as JSON.
    calls: attention calls of a pass, in order.
    plan: transformers' tensor-parallel plan: (pattern of module paths, how ranks share the module).
    cut: (name, size) of the sharded sizes.
    experts_per_token: experts that routers choose for a row; 1 without experts.
    renamed, experts, parts, unused, prefixes: see `aerie.workers.models.adapter.names`.
    stacked: see `aerie.workers.models.adapter.names.stacked_experts_of`; empty if checkpoints have a tensor for each
        expert.
    siblings: paths of linear layers with the same input (`aerie.workers.models.adapter.names`).
    layers: path of the list of layers that drafts can read (`aerie.workers.models.adapter.streams`); None if they
    cannot.
    """

    raw: str
    calls: tuple[AttentionCall, ...]
    plan: tuple[tuple[str, str], ...]
    cut: tuple[tuple[str, int], ...]
    renamed: tuple[tuple[str, str], ...]
    experts: tuple[str, ...] | None
    experts_per_token: int
    layers: str | None
    stacked: tuple[tuple[str, int], ...] = ()
    siblings: tuple[Group, ...] = ()
    parts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    @property
    def served_by(self) -> str:
        return f"the modules of transformers' {self.architecture}; a family of its own may be faster (Llama: by 2 %)"

    def score_rule(self, layer: int) -> ScoreRule:
        rule = self.calls[layer].rule
        hides = rule.window is not None and rule.window < self.max_position
        return rule if hides else replace(rule, window=None)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        if self.experts is not None or self.stacked:
            check_experts_device(device, dtype, source)

    def check_shards(self, tensor_parallel: int, source: str) -> None:
        if tensor_parallel == 1:
            return
        if not self._shares_attention:
            raise ValueError(
                f"tensor_parallel={tensor_parallel}: transformers has no plan of how ranks share {source} "
                f"({self.architecture}); use tensor_parallel: 1"
            )
        kv_heads = (call.num_kv_heads for call in self.calls)
        check_cuts(tensor_parallel, source, self.num_heads, dict(self.cut), kv_heads)
        load("aerie.workers.models.adapter.ranks:check_ranks")(self, tensor_parallel, source)  # which runs our model

    @property
    def _shares_attention(self) -> bool:
        """Return whether the plan shards the output projection of every attention; some plans shard only the
        vocabulary."""
        cut = {path.rpartition(".")[0] for path, style in self.plan if "row" in style}
        return all(re.sub(r"\.\d+(?=\.|$)", ".*", call.module) in cut for call in self.calls)

    def kv_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        return head_groups(((call.num_kv_heads, call.cached_dim) for call in self.calls), tensor_parallel, dtype)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        heads = self.num_heads * self.head_dim // tensor_parallel
        shares = {name: size // tensor_parallel for name, size in self.cut}
        return {"hidden_size": self.hidden_size, "num_attention_heads * head_dim": heads} | shares


def weight_names(config: AdapterConfig) -> TransformersNames:
    """Return the names of the model's tensors in the checkpoint."""
    ignored = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_embeddings else ()))
    return TransformersNames(
        {},
        ignored=ignored,
        packed=tuple(names for path, number in config.stacked for names in stacked_experts(path, number)),
        renamed=config.renamed,
        experts=config.experts,
        parts=config.parts,
        unused=config.unused,
        prefixes=config.prefixes,
    )


def is_known(architecture: str) -> bool:
    """Return whether transformers may have a decoder of that name, alone or in a model of images and text."""
    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or architecture.endswith(
        "ForConditionalGeneration"
    )


def read_config(config: dict[str, Any], source: str) -> AdapterConfig:
    """Read config.json. Raises ValueError, with the reason, for a model that would be computed wrongly."""
    try:
        return _read(json.dumps(config, sort_keys=True), source)
    except UnservableError as error:
        raise ValueError(f"{source}: {error}; serve it with transformers itself") from error


@lru_cache(maxsize=8)
def _read(text: str, source: str) -> AdapterConfig:
    """Run the model without weights to learn its attention calls, experts and linear layers. Return its configuration.
    text: config.json. Raises UnservableError, ValueError."""
    whole: dict[str, Any] = json.loads(text, object_hook=_plain_number)
    raw = decoder_part(whole, source)
    config = transformers_config(raw, source)
    check_class(config)
    model = make_model(config)
    converted = conversions(model)
    shapes, linear_calls, chosen = record_shapes(model), record_linear_calls(model), record_chosen(model)
    calls = survey(model)
    check_layers(config, calls)
    check_model(model, expert_names(converted))
    quant = read_quant_method(whole, source)
    names, stacked = expert_names(converted), any(parameter.dim() == 3 for parameter in model.parameters())
    if not isinstance(quant, Unquantized) and stacked and names is None:
        raise UnservableError("has quantised experts in one tensor, which only a family of its own could serve")
    first = calls[0]
    hidden = size_of({"hidden_size": getattr(config, "hidden_size", None)}, "hidden_size", source)
    plan = tuple(sorted(model.tp_plan.items()))
    return AdapterConfig(
        architecture=architecture_of(whole),
        hidden_size=hidden,
        num_layers=size_of({"num_hidden_layers": len(calls)}, "num_hidden_layers", source, max_value=MAX_LAYERS),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.cached_dim,
        vocab_size=size_of({"vocab_size": getattr(config, "vocab_size", None)}, "vocab_size", source),
        max_position=_max_position(config, source),
        rms_eps=number_of(raw, "rms_norm_eps", source, 1e-6),
        tie_embeddings=_is_tied(model),
        dtype=dtype_of(whole | raw),
        quant=quant,
        eos_token_ids=ids_of(whole, "eos_token_id", source) or ids_of(raw, "eos_token_id", source),
        raw=json.dumps(raw, sort_keys=True),
        calls=calls,
        plan=plan,
        cut=tuple(_cut_sizes(model, dict(plan))),
        renamed=renamings(converted),
        experts=names,
        experts_per_token=max(chosen, default=1),
        layers=path_of_layers(calls, shapes, hidden),
        stacked=stacked_experts_of(model) if names is None else (),
        siblings=groups_of(linear_calls),
        parts=() if raw == whole else part_names(model),
        unused=unused_tensors(model, config, len(calls)),
        prefixes=prefixes_of(model),
    )


def _plain_number(fields: dict[str, Any]) -> Any:
    """Return the infinity or NaN that transformers writes as an object, because JSON has none; other objects as they
    are."""
    return _NUMBERS.get(str(fields.get("__float__")), fields) if len(fields) == 1 else fields


def _is_tied(model: PreTrainedModel) -> bool:
    """Return whether the vocabulary head's weight is the embedding's. Some classes never tie them, regardless of
    config.json (Moshi)."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def decoder_part(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the part of config.json that describes the token decoder; for a text-only model, all of it."""
    inner = config.get("text_config")
    if isinstance(inner, dict) and "model_type" in inner:
        tied = config.get("tie_word_embeddings", _usually_tied(str(config.get("model_type") or "")))
        return dict(inner) if tied is None else inner | {"tie_word_embeddings": tied}
    return dict(config)


def _usually_tied(kind: str) -> bool | None:
    """Return transformers' default of tie_word_embeddings for that model_type; None if unknown."""
    tied = getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", None) if kind in CONFIG_MAPPING else True
    return tied if isinstance(tied, bool) else None


def transformers_config(raw: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """Return transformers' configuration. Raises ValueError, or UnservableError for kinds that transformers lacks."""
    kind = str(raw.get("model_type") or "")
    if "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise UnservableError("needs code that the checkpoint brings along, which Aerie does not run")
    if kind not in CONFIG_MAPPING:
        raise UnservableError(f"has model_type={kind!r}, which this release of transformers does not have")
    if raw.get("is_encoder_decoder"):
        raise UnservableError("has an encoder and a decoder")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(
            {key: value for key, value in raw.items() if key not in ("quantization_config", "auto_map")}
        )
    except Exception as error:  # classes raise different exceptions for invalid fields
        reason = " ".join(str(error).split())
        raise ValueError(f"{source}: config.json: {reason}; correct it, or download the checkpoint again") from error
    return config


def _max_position(config: PreTrainedConfig, source: str) -> int:
    """Return the maximum text length in tokens. If RoPE angles depend on the length, it ends where they change."""
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [item for item in (rope, *rope.values()) if isinstance(item, dict)]
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    for section in sections:
        if section.get("rope_type") in LENGTH_DEPENDENT:
            original = section.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", longest
            )
            longest = min(longest, int(original or longest))
    return size_of({"max_position_embeddings": longest}, "max_position_embeddings", source, max_value=MAX_POSITIONS)


def style_of(plan: Mapping[str, str], path: str) -> str | None:
    """Return the plan's sharding style of the module `path`; None: replicated."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", path)
    return plan.get(path) or plan.get(generic)


def _cut_sizes(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return (name, size) of the sharded outputs and inputs, each once, without the vocabulary."""
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        style = style_of(plan, path)
        if style is None or not isinstance(module, nn.Linear) or path.count(".") < 2:
            continue
        name, size = path.rsplit(".", 1)[1], module.in_features if "row" in style else module.out_features
        if name not in KV_PROJECTIONS:
            sizes[f"{name}'s {'inputs' if 'row' in style else 'outputs'}"] = size
    return list(sizes.items())
