"""The configurations and tensors of published EAGLE-3 heads, at their real sizes, without memory for their weights.

Written by hand from the checkpoints' documentation and their trainers' configurations. Each goes through `load_draft`
on the meta device: names, shapes and vocabulary must be what the checkpoint has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.speculative.drafts import loading
from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.drafts.eagle3_config import HeadFlags
from aerie.speculative.drafts.method import DraftModel
from aerie.speculative.drafts.registry import METHODS
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.llama import LlamaConfig, LlamaForCausalLM, read_config, weight_names
from aerie.workers.models.loading import allocate
from aerie.workers.models.weights import CheckpointTensor
from aerie.workers.quantization.table import Unquantized

META = torch.device("meta")


@dataclass(frozen=True)
class Published:
    """config: config.json. target: hidden_size, num_hidden_layers and vocab_size of its target. first: what the
    checkpoint calls its first layer. more: shapes of tensors beside those that all have, by name. capture, flags,
    num_layers: what must be made of it."""

    config: dict[str, Any]
    target: tuple[int, int, int]
    capture: tuple[int, ...]
    flags: HeadFlags = field(default_factory=HeadFlags)
    first: str = "midlayer"
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_layers: int = 1


def layer(hidden: int, mlp: int, heads: int, kv: int, vocab: int, dim: int = 128, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        **more,
    }


def flat(layers: dict[str, Any], draft_vocab: int | None = 32000, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "initializer_range": 0.02,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 48,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.2",
        "use_cache": True,
        "draft_vocab_size": draft_vocab,
        **layers,
        **more,
    }


def speculators(layers: dict[str, Any], draft_vocab: int = 32000, **more: Any) -> dict[str, Any]:
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "someone/model"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.14",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "draft_vocab_size": draft_vocab,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
        "transformer_layer_config": {"model_type": "llama", "attention_bias": False, "mlp_bias": False, **layers},
        **more,
    }


LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
# What transformers wrote into configurations before it left defaults out.
DUMPED = {
    "_name_or_path": "",
    "return_dict": True,
    "chunk_size_feed_forward": 0,
    "do_sample": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "is_encoder_decoder": False,
    "length_penalty": 1.0,
    "num_beams": 1,
    "pruned_heads": {},
    "temperature": 1.0,
    "top_k": 50,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pretraining_tp": 1,
}
LLAMA8B = layer(4096, 14336, 32, 8, 128256, rms_norm_eps=1e-5)
LLAMA8B_TARGET, LLAMA70B_TARGET = (4096, 32, 128256), (8192, 80, 128256)
QWEN8B = layer(4096, 12288, 32, 8, 151936)
NORMED = HeadFlags(norm_before_residual=True)
NVIDIA = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}

HEADS = {
    "SafeAILab Llama-3.1-8B": Published(
        flat(LLAMA8B, architectures=["LlamaForCausalLM"], torch_dtype="float16", max_position_embeddings=2048),
        LLAMA8B_TARGET,
        (2, 16, 29),
    ),
    "SafeAILab Vicuna-13B, its target's layer count, no vocabulary of its own": Published(
        flat(layer(5120, 13824, 40, 40, 32000, num_hidden_layers=40), 32000, pretraining_tp=1, pad_token_id=0),
        (5120, 40, 32000),
        (2, 20, 37),
        more={"embed_tokens.weight": (32000, 5120)},
    ),
    "SafeAILab Llama-3.3-70B, narrower than its target": Published(
        flat(layer(6144, 16384, 48, 8, 128256), target_hidden_size=8192, **LLAMA3),
        LLAMA70B_TARGET,
        (2, 40, 77),
        more={"embed_tokens.weight": (128256, 6144)},
    ),
    "SpecForge Llama-3.1-8B": Published(
        flat(LLAMA8B, attention_bias=False, mlp_bias=False, **LLAMA3), LLAMA8B_TARGET, (2, 16, 29)
    ),
    "SpecForge Qwen3-235B-A22B, ids of outputs": Published(
        flat(
            layer(4096, 24576, 64, 4, 151936),
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True},
        ),
        (4096, 94, 151936),
        (2, 47, 91),
    ),
    "SpecForge Kimi-K2, Llama's layers, ids of inputs": Published(
        flat(
            layer(7168, 18432, 64, 64, 163840),
            model_type="kimi_k2",
            eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
        ),
        (7168, 61, 163840),
        (2, 30, 58),
    ),
    "SpecForge Qwen3-30B-A3B, EAGLE-3.1": Published(
        flat(layer(2048, 12288, 32, 4, 151936), fc_norm=True, norm_output=True),
        (2048, 48, 151936),
        (2, 24, 45),
        HeadFlags(fc_norm=True, norm_output=True),
        more={f"fc_norm.{i}.weight": (2048,) for i in range(3)},
    ),
    "AngelSlim Qwen3-8B": Published(
        flat(QWEN8B, modal_type="LLM", target_model_type="qwen3"), (4096, 36, 151936), (2, 18, 33)
    ),
    "RedHat Llama-3.1-8B": Published(
        speculators({**LLAMA8B, **LLAMA3, **DUMPED}), LLAMA8B_TARGET, (2, 16, 29), NORMED, "layers.0"
    ),
    "RedHat Qwen3-8B, with its target's embedding": Published(
        speculators({**QWEN8B, "rope_theta": 1000000}),
        (4096, 36, 151936),
        (2, 18, 33),
        NORMED,
        "layers.0",
        {"embed_tokens.weight": (151936, 4096)},
    ),
    "RedHat Gemma-4-31B": Published(
        speculators(
            layer(5376, 21504, 32, 16, 262144, 256, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}),
            architectures=["Eagle3DraftModel"],
            eagle_aux_hidden_state_layer_ids=[2, 30, 57],
            embed_requires_grad=False,
            norm_before_fc=False,
        ),
        (5376, 60, 262144),
        (2, 30, 57),
        NORMED,
        "layers.0",
        {"embed_tokens.weight": (262144, 5376)},
    ),
    "RedHat gpt-oss-20b, one norm over all captured layers": Published(
        speculators(layer(2880, 2880, 64, 8, 201088, 64), 64000, norm_before_fc=True),
        (2880, 24, 201088),
        (2, 12, 21),
        HeadFlags(norm_before_residual=True, norm_before_fc=True),
        "layers.0",
        {"input_norm.weight": (3 * 2880,)},
    ),
    "speculators, layers of Qwen3": Published(
        speculators({**QWEN8B, "model_type": "qwen3", "layer_types": ["full_attention"]}, norm_output=True),
        (4096, 36, 151936),
        (2, 18, 33),
        HeadFlags(norm_before_residual=True, norm_output=True),
        "layers.0",
        {f"layers.0.self_attn.{name}_norm.weight": (128,) for name in "qk"},
    ),
    "speculators Llama-3.1-8B of two layers": Published(
        speculators({**LLAMA8B, **LLAMA3, "num_hidden_layers": 2}),
        LLAMA8B_TARGET,
        (2, 16, 29),
        NORMED,
        "layers.0",
        num_layers=2,
    ),
    "NVIDIA Llama-4-Maverick, the final hidden state": Published(
        flat(
            layer(5120, 32768, 40, 8, 202048),
            None,
            eagle_config=NVIDIA | {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []},
            num_eagle_features=1,
        ),
        (5120, 48, 202048),
        (),
    ),
    "NVIDIA gpt-oss-120b, flags in eagle_config, the last layer's output": Published(
        flat(
            layer(2880, 17280, 64, 8, 201088, 64),
            eagle_config=NVIDIA | {"eagle_aux_hidden_state_layer_ids": [24, 30, 36], "norm_before_fc": True},
        ),
        (2880, 36, 201088),
        (24, 30, 36),
        HeadFlags(norm_before_fc=True),
        more={"input_norm.weight": (3 * 2880,)},
    ),
}


def target_of(head: Published) -> LlamaConfig:
    hidden, layers, vocab = head.target
    return read_config(layer(hidden, 4 * hidden, 8, 8, vocab, num_hidden_layers=layers), "target")


def tensors_of(head: Published) -> dict[str, Tensor]:
    """Return the tensors of its checkpoint, on the meta device except the vocabulary."""
    layers = head.config.get("transformer_layer_config", head.config)
    hidden, mlp, dim = layers["hidden_size"], layers["intermediate_size"], layers["head_dim"]
    q, kv = layers["num_attention_heads"] * dim, layers["num_key_value_heads"] * dim
    draft_vocab = head.config["draft_vocab_size"] or layers["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden)}
    if head.capture:
        shapes["fc.weight"] = (hidden, 3 * head.target[0])
    for i in range(head.num_layers):
        name, width = (head.first, 2 * hidden) if i == 0 else (f"layers.{i}", hidden)
        for part, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{name}.self_attn.{part}.weight"] = (size, width)
        shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, q)
        shapes[f"{name}.mlp.gate_proj.weight"] = shapes[f"{name}.mlp.up_proj.weight"] = (mlp, hidden)
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, mlp)
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if i == 0 else ()))
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in norms}
    tensors = {name: torch.empty(shape, device=META) for name, shape in (shapes | dict(head.more)).items()}
    if draft_vocab != layers["vocab_size"]:
        members = torch.arange(draft_vocab) * (layers["vocab_size"] // draft_vocab)
        tensors["d2t"] = members - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(layers["vocab_size"], dtype=torch.bool).index_fill(0, members, True)
    return tensors


def loaded(head: Published, method: Eagle3, monkeypatch: pytest.MonkeyPatch) -> DraftModel:
    """On the meta device, from the checkpoint's tensors; raises ValueError as `load_draft` does."""
    config = target_of(head)
    target = allocate(
        lambda: LlamaForCausalLM(config, SOLO, 4, torch.device("cpu")),
        weight_names(config),
        Unquantized(),
        torch.bfloat16,
        META,
    )
    tensors = [CheckpointTensor(name, tensor, "model.safetensors") for name, tensor in tensors_of(head).items()]
    monkeypatch.setattr(loading, "draft_tensors", lambda path, device: tensors)
    return loading.load_draft(method, ModelSource(path="target"), target, SOLO, META, max_position=4)


@pytest.mark.parametrize("name", HEADS)
def test_published_heads_load_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HEADS[name]
    assert [name for name, methods in METHODS.items() if any(each.recognises(head.config) for each in methods)] == [
        "eagle3"
    ]
    monkeypatch.setattr("aerie.speculative.drafts.eagle3.tensor_names", lambda path: list(tensors_of(head)))
    method = Eagle3.read(str(tmp_path), head.config, target_of(head))
    assert (method.capture, method.flags, method.model.num_layers) == (head.capture, head.flags, head.num_layers)
    assert method.model.qk_norm == any("q_norm" in tensor for tensor in head.more)
    model = loaded(head, method, monkeypatch)
    layers = head.config.get("transformer_layer_config", head.config)
    theta = layers.get("rope_theta") or layers.get("rope_parameters", {}).get("rope_theta", 10000.0)
    assert method.model.rope.theta == theta
    assert model.reads_last_layer == (not head.capture or head.target[1] in head.capture)
    assert (model.target_ids is None) == (method.vocab_size == method.model.vocab_size)
