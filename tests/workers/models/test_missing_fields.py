"""Fields that config.json leaves out are what transformers takes for them, in every family of our own."""

import dataclasses
import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aerie.workers.models.registry import ARCHITECTURES, family_for
from tests.support.known_models import known_config

# Models of images, whose text part is a kind of its own.
OUTER = {"gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe"}
KINDS = [
    kind
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if name in ARCHITECTURES and kind not in OUTER and kind != "granitemoehybrid"  # which has recurrent layers then
]
# Without these tensors do not fit, a text is shorter, or generation_config.json decides.
OTHERS = {"head_dim", "num_key_value_heads", "n_shared_experts", "first_k_dense_replace", "q_lora_rank"}
OTHERS |= {"shared_expert_intermediate_size", "intermediate_size", "max_position_embeddings", "eos_token_id"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_field_is_what_transformers_takes(kind: str) -> None:
    """Whatever is drawn, read with the field and without it; or it is refused."""
    base = as_json(known_config(kind, **({"n_group": 4, "topk_group": 2} if kind == "deepseek_v3" else {})), kind)
    differing = {}
    for field in dataclasses.fields(CONFIG_MAPPING[kind]):
        if field.name not in base or field.name in {*OTHERS, "architectures", "layer_types", "dtype"}:
            continue
        without = {name: value for name, value in base.items() if name != field.name}
        try:
            whole = as_json(CONFIG_MAPPING[kind].from_dict(dict(without)), kind)
            ours, theirs = read(without), read(whole)
        except Exception:  # refused by us or by transformers
            continue
        if ours != theirs:
            differing[field.name] = [(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]]
    assert not differing


def as_json(config: Any, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return made | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "dtype": "float32"}


def read(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(family_for(raw, "m").read_config(raw, "m")).items() if name != "raw"}
