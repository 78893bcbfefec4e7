"""Decoders of transformers with other sizes and options than their tiny defaults. Each is served with transformers'
log-probabilities, or refused in one line. Own classes and the adapter; with drafts, ranks, few pages, cached prefixes,
stop tokens and bfloat16.

    pytest -m slow tests/workers/models/adapter/test_varied_decoders.py    # 20 configurations of a kind, about a minute
"""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from aerie.workers.scheduling.request import Request
from tests.support.known_models import can_be_set, make_known
from tests.support.target_answers import CHAIN, FEW_PAGES, TREE, check_answers, check_bfloat16, head_for, served_answers
from tests.workers.models.test_targets import worker_of

# What transformers calls them; each shows something that the others do not have. Of the rest some sixty were tried
# once, with three to six configurations each.
KINDS = ["afmoe", "llama", "olmo3", "granitemoeshared", "cohere"]
MAX_LINE = 700  # letters of a refusal; those of unknown architectures list what there is
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]
COMMON = {field.name for field in dataclasses.fields(PreTrainedConfig)}
OF_TRAINING = ("drop", "init", "aux", "jitter", "use_cache", "output_", "summary", "loss", "_std", "is_", "add_cross")
ACTIVATIONS = ["silu", "silu", "silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"]


@st.composite
def ropes(draw: st.DrawFn, usual: Any) -> dict[str, Any]:
    """RoPE of all layers; of each kind of layer where the usual one is by kinds."""
    if isinstance(usual, dict) and any(isinstance(each, dict) for each in usual.values()):
        return {kind: draw(ropes(None)) for kind in usual}
    return draw(st.sampled_from(ROPES)) | {"rope_theta": draw(st.sampled_from([500.0, 1e6]))}


@st.composite
def switches(draw: st.DrawFn, usual: Any) -> dict[str, Any]:
    """Some of the flags and factors that a kind of model has and others have not."""
    found: dict[str, Any] = {}
    for field in sorted({field.name for field in dataclasses.fields(type(usual))} - COMMON):
        if any(word in field for word in OF_TRAINING) or not can_be_set(usual, field):
            continue
        value = vars(usual).get(field)  # what differs by layer is no attribute
        if isinstance(value, bool | float) and draw(st.integers(0, 3)) == 0:
            new = st.booleans() if isinstance(value, bool) else st.sampled_from([0.5 * value, 2.0 * value])
            found[field] = draw(new)
    return found


@st.composite
def options(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Fields that the configuration of that kind has, with values that differ from its defaults."""
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING[kind]()
    layers, heads, head_dim = (
        draw(st.integers(2, 5)),
        draw(st.sampled_from([2, 4, 6])),
        draw(st.sampled_from([8, 12, 32])),
    )
    wanted: dict[str, Any] = {
        "num_hidden_layers": layers,
        "n_layer": layers,
        "num_attention_heads": heads,
        "n_head": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, heads) if heads % n == 0])),
        "head_dim": head_dim,
        "hidden_size": heads * head_dim if not can_be_set(usual, "head_dim") else draw(st.sampled_from([48, 60, 96])),
        "n_embd": heads * head_dim,
        "intermediate_size": draw(st.sampled_from([48, 100, 160])),
        "vocab_size": draw(st.sampled_from([97, 131, 256])),
        "max_position_embeddings": draw(st.sampled_from([192, 256, 1000])),
        "sliding_window": draw(st.sampled_from([1, 5, 33, 4096])),
        "use_sliding_window": draw(st.booleans()),
        "max_window_layers": draw(st.integers(0, 3)),
        "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
        "hidden_activation": draw(st.sampled_from(ACTIVATIONS)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "num_experts_per_tok": draw(st.integers(1, 3)),
        "moe_intermediate_size": draw(st.sampled_from([24, 40])),
        "n_shared_experts": draw(st.integers(0, 2)),
        "num_shared_experts": draw(st.integers(0, 2)),
        "shared_intermediate_size": draw(st.sampled_from([0, 48])),
        "first_k_dense_replace": draw(st.integers(0, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "v_head_dim": draw(st.sampled_from([8, 16, 40])),
        "q_lora_rank": draw(st.sampled_from([None, 24])),
        "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0])),
        **{
            name: draw(st.booleans())
            for name in (
                "tie_word_embeddings",
                "attention_bias",
                "mlp_bias",
                "use_bias",
                "qkv_bias",
                "norm_topk_prob",
                "use_qk_norm",
                "qk_layernorm",
                "parallel_attn",
                "use_parallel_residual",
                "attention_out_bias",
                "add_bias_linear",
            )
        },
        **{
            name: draw(st.sampled_from([0.5, 1.0, 3.0]))
            for name in (
                "embedding_multiplier",
                "residual_multiplier",
                "attention_multiplier",
                "logits_scaling",
                "logit_scale",
                "scale_emb",
                "scale_depth",
            )
        },
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0])),
        "attn_logit_softcapping": draw(st.sampled_from([None, 3.0])),
        "query_pre_attn_scalar": draw(st.sampled_from([7, 16])),
        "layer_types": draw(
            st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers)
        ),
        "rope_parameters": draw(ropes(getattr(usual, "rope_parameters", None))),
    }
    chosen = {name: value for name, value in wanted.items() if can_be_set(usual, name) and draw(st.integers(0, 2))}
    if "layer_types" in chosen:
        chosen["num_hidden_layers"] = layers
    if can_be_set(usual, "head_dim") and draw(st.integers(0, 3)) == 0:
        odd = draw(st.sampled_from([3, 5]))
        chosen |= {"num_attention_heads": odd, "num_key_value_heads": draw(st.sampled_from([1, odd]))}
        chosen |= {"hidden_size": 60, "head_dim": 12}
    chosen |= {name: value for name, value in draw(switches(usual)).items() if name not in wanted}
    if "hidden_size" in chosen and can_be_set(usual, "word_embed_proj_dim"):
        chosen["word_embed_proj_dim"] = chosen["hidden_size"]  # no head shares a narrower embedding
    return chosen


def made(folder: Path, kind: str, settings: dict[str, Any]) -> Path | None:
    """A checkpoint, or None where transformers itself does not run it."""
    from transformers import AutoModelForCausalLM

    try:
        target = make_known(folder, kind, **settings)
        with torch.no_grad():
            AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")(
                torch.tensor([[3, 4, 5]])
            )
    except Exception:  # it checks its fields by running into them
        return None
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}))
    return target


def in_bfloat16(target: Path) -> None:
    """Store the checkpoint's weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(target)


def one_line(error: ValueError) -> str:
    text = str(error)
    assert "\n" not in text and len(text) <= MAX_LINE, text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_varied_decoder_is_served_with_equal_logprobs_or_refused(kind: str, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        target = made(Path(folder) / "target", kind, data.draw(options(kind)))
        if target is None:
            return
        source = ModelSource(path=str(target), device="cpu")
        try:
            config = read_target_config(source, 1)
        except ValueError as error:
            one_line(error)
            return
        way = data.draw(st.sampled_from(["plain", "ranks", "chain", "tree", "suffix", "pages"]))
        tensor_parallel = 1
        if way == "ranks":
            try:
                read_target_config(source, 2)
                tensor_parallel = 2
            except ValueError as error:
                one_line(error)
        speculative = SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8) if way == "suffix" else None
        if way in ("chain", "tree"):
            head = head_for(config, Path(folder))
            speculative = SpeculativeConfig(str(head), "eagle3", *(CHAIN if way == "chain" else TREE))
        rounded = data.draw(st.integers(0, 3)) == 0
        worker = worker_of(target, FEW_PAGES if way == "pages" else 200, tensor_parallel=tensor_parallel)
        if rounded:
            in_bfloat16(target)
            worker = replace(worker, model=replace(worker.model, dtype="bfloat16"))
        stops = tuple(data.draw(st.sets(st.integers(0, config.vocab_size - 1), max_size=config.vocab_size // 8)))
        answers = served_answers(worker, speculative, 1 + (way == "pages"), stops)
        for answer in answers:
            check_end(answer.request, set(stops))
        (check_bfloat16 if rounded else check_answers)(answers, target)


def check_end(request: Request, stops: set[int]) -> None:
    """The answer ends with its first stop token, or is as long as it may be."""
    output, limit = request.output, request.sampling.max_tokens
    assert not stops & set(output[:-1])
    assert output[-1] in stops or len(output) == limit
