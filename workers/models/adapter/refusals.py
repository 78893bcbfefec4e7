"""Checks that raise UnservableError for unsupported models. Called by `aerie.workers.models.adapter.config`."""

from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from aerie.workers.models.adapter.matching import match_experts
from aerie.workers.models.adapter.survey import AttentionCall, UnservableError, is_plain_embedding

_LAYER_KINDS = {"full_attention", "sliding_attention"}
_FROM_PADDING = "create_position_ids_from_input_ids"  # method of embeddings that count positions from padding (RoBERTa)


def check_class(config: PreTrainedConfig) -> None:
    """Check a model's class and kinds of layers, without building it."""
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if made is None:
        raise UnservableError(
            f"has a decoder of model_type={config.model_type!r}, of which transformers has no causal language model"
        )
    if made._is_stateful:
        raise UnservableError(f"is a {made.__name__}, which keeps a state that only its own family could serve")
    if not made._supports_attention_backend:
        raise UnservableError(f"is a {made.__name__}, whose attention transformers does not let others replace")
    layers, shared = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "num_kv_shared_layers"))
    if 0 < layers <= shared:
        raise UnservableError("is a draft whose layers all read the KV of another model")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        raise UnservableError(f"has layers of {', '.join(sorted(kinds))}, which only a family of its own could serve")


def check_model(model: PreTrainedModel, expert_names: tuple[str, ...] | None) -> None:
    """Refuse modules that Aerie's layers would compute differently, and tensors that a checkpoint does not have.

    expert_names: see `aerie.workers.models.adapter.names.expert_names`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not is_plain_embedding(embedding):
        raise UnservableError(f"has an embedding of its own ({type(embedding).__name__})")
    for path, module in model.named_modules():
        stacked = "down_proj" in module._parameters and module._parameters["down_proj"].dim() == 3
        if expert_names is not None and stacked and match_experts(module) is None:
            raise UnservableError(f"has experts ({path}) with an activation or gate that Aerie has no operation for")
        if hasattr(module, _FROM_PADDING):
            raise UnservableError(f"counts positions ({path}) from its padding token, as no decoder of Aerie does")
    _check_ties(model, {id(each.weight) for each in (embedding, head) if each is not None})


def _check_ties(model: nn.Module, allowed: set[int]) -> None:
    """Refuse parameters with two names, because a checkpoint has only one of them. allowed: ids of parameters that may
    have two."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and id(parameter) not in allowed:
            raise UnservableError(f"has one tensor as {other} and as {name}, which the adapter cannot load")


def check_layers(config: PreTrainedConfig, calls: tuple[AttentionCall, ...]) -> None:
    """Refuse layers without attention."""
    layers = getattr(config, "num_hidden_layers", len(calls))
    if layers != len(calls):
        raise UnservableError(f"has {layers} layers, of which {len(calls)} have attention that could be served")
