"""EAGLE-3 heads over whole sequences, unrolled on their own outputs, and their files: the published folder layout that
SafeAILab's code, SGLang and vLLM read.

The engine serves a head from the same description (`aerie.speculative.drafts.eagle3.Eagle3`) and the same files with
`aerie.speculative.drafts.eagle3.Eagle3Model`, which has no gradients and reads KV from pages;
`tests/speculative/training/test_training_serving.py` compares the two. Parameter names are those of the published
heads. Paper: EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from aerie.speculative.drafts.drafter import joined_input, projected
from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.drafts.eagle3_config import (
    ARCHITECTURE,
    MIN_TARGET_LAYERS,
    default_capture,
    layer_ids,
    target_ids,
)
from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import (
    DraftKind,
    DraftVocabulary,
    TrainedDraft,
    head_config,
    read_head,
    token_ids,
    write_checkpoint,
)
from aerie.speculative.training.layers import Branches, ChainDraft, branch_attention, linear, prepared, qwen3_config
from aerie.speculative.training.samples import Sample
from aerie.workers.models.llama import LlamaConfig

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_DRAFT_VOCAB = 32000  # default size of the draft's vocabulary


class DraftLayer(nn.Module):
    """The one decoder layer. It reads the concatenated embedding and feature; its residual stream is the feature.
    norm_before_residual: as in `aerie.speculative.drafts.eagle3_config.HeadFlags`."""

    def __init__(self, model: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        config = qwen3_config(model, branch_attention)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, linear(2 * model.hidden_size, outputs))
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Qwen3RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(3)
        )

    def forward(self, embedding: Tensor, feature: Tensor, angles: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
        """Return the residual stream after the layer, [B, T, H]. embedding, feature: [B, T, H]."""
        normed = self.hidden_norm(feature)
        joined = joined_input(self.input_layernorm(embedding), normed)
        residual = normed if self.norm_before_residual else feature
        attended, _ = self.self_attn(joined, position_embeddings=angles, attention_mask=None, branches=branches)
        hidden: Tensor = residual + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class Eagle3Head(ChainDraft):
    """The trainable head. Its token embedding is the target's, whose results are arguments."""

    def __init__(self, method: Eagle3) -> None:
        super().__init__(method, method.model)
        self.method = method
        model, flags, width = method.model, method.flags, len(method.capture) * method.target_hidden_size
        self.fc = nn.Linear(width, model.hidden_size, bias=method.projection_bias)
        self.input_norm = Qwen3RMSNorm(width, eps=model.rms_eps) if flags.norm_before_fc else None
        per_layer = method.capture if flags.fc_norm else ()
        self.fc_norm = nn.ModuleList([Qwen3RMSNorm(method.target_hidden_size, eps=model.rms_eps) for _ in per_layer])
        self.midlayer = DraftLayer(model, flags.norm_before_residual)
        self.norm = Qwen3RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.lm_head = linear(model.hidden_size, method.vocab_size)
        prepared(self)

    def start(self, captured: Tensor) -> Tensor:
        """Project concatenated captured streams [.., 3H] to [.., H]."""
        return projected(captured, self.input_norm, self.fc_norm, self.fc)

    def step(self, embeddings: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
        """Return the state before the final norm, or after it if the head has norm_output."""
        state: Tensor = self.midlayer(embeddings, hidden, angles, branches)
        return self.norm(state) if self.method.flags.norm_output else state

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.method.flags.norm_output else self.norm(hidden))
        return logits


def draft_config(
    target: PreTrainedModel, vocab_size: int, intermediate_size: int | None = None, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the config.json of a head that captures the default layers of the target.

    vocab_size: the head's own vocabulary.
    intermediate_size: width of its MLP, the target's if None.
    flags: the `HeadFlags` that are true.
    Raises `TrainingError` for a target of an architecture or depth that is not supported.
    """
    shared, config = head_config(target, MODEL_TYPES), target.config
    if config.num_hidden_layers < MIN_TARGET_LAYERS:
        raise TrainingError(
            f"target: has {config.num_hidden_layers} layers; EAGLE-3 captures three of at least {MIN_TARGET_LAYERS}"
        )
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        **shared,
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "target_hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_hidden_layers": 1,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if rope["rope_type"] != "default" else None,
        "draft_vocab_size": vocab_size,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_ids(default_capture(config.num_hidden_layers)),
            "use_aux_hidden_state": True,
        },
        **dict.fromkeys(flags, True),
    }


def read_draft_config(config: Mapping[str, Any], target: PreTrainedModel, folder: Path) -> Eagle3:
    """Return the engine's description of the head with this config.json in `folder`. Raises `TrainingError` for a head
    that the engine or the training does not support."""
    method = read_head(Eagle3, config, target, folder)
    model = method.model
    untrained = {
        f"num_hidden_layers={model.num_layers}": model.num_layers > 1,
        f"hidden_size={model.hidden_size} and its target has {method.target_hidden_size}": model.hidden_size
        != method.target_hidden_size,
        "use_aux_hidden_state=false": not method.capture,
        "the output of the target's last layer among those captured": method.reads_last_layer and bool(method.capture),
        "attention_bias=true": model.qkv_bias or model.o_bias,
        "norms on the heads of its attention": model.qk_norm,
    }
    for what, names in untrained.items():
        if names:
            raise TrainingError(
                f"draft={folder}: has {what}, which can be served but not trained; use a head without it"
            )
    return method


def choose_vocabulary(
    samples: Iterable[Sample], size: int, target_vocab_size: int, always: Sequence[int]
) -> DraftVocabulary:
    """Return the `size` most frequent answer tokens, including all of `always` (the ends of a turn).

    Smaller ids come first among equally frequent tokens, and among those that never occur. Raises `TrainingError` for a
    size outside len(always)..target_vocab_size.
    """
    if not len(always) <= size <= target_vocab_size:
        raise TrainingError(
            f"draft_vocab={size}: must be between {len(always)} and the target's vocabulary of {target_vocab_size}"
        )
    always = sorted(set(always))
    counts = Counter(token for sample in samples for token in sample.tokens[sample.num_prompt :])
    ranked = sorted(set(range(target_vocab_size)).difference(always), key=lambda token: (-counts[token], token))
    chosen = sorted([*always, *ranked[: size - len(always)]])
    return DraftVocabulary.of(torch.tensor(chosen, dtype=torch.int64), target_vocab_size)


def build_head(target: PreTrainedModel, method: Eagle3, vocabulary: DraftVocabulary, seed: int) -> Eagle3Head:
    """Return a new float32 head on the target's device. Its output rows are initialised with the target's."""
    torch.manual_seed(seed)
    head = Eagle3Head(method)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
    rows = target.get_output_embeddings().weight.detach()
    head.lm_head.weight.data.copy_(rows[vocabulary.target_ids].float())
    return head.to(target.device)


def save_draft(head: Eagle3Head, vocabulary: DraftVocabulary, config: Mapping[str, Any], folder: Path) -> None:
    """Write a head and its vocabulary. The files lack the embedding, which is the target's."""
    maps = {"d2t": vocabulary.d2t(), "t2d": vocabulary.t2d}
    write_checkpoint(folder, config, dict(head.named_parameters()) | maps)


def load_draft(folder: Path, target: PreTrainedModel) -> tuple[Eagle3Head, DraftVocabulary]:
    """Return a saved head in float32 on the target's device, and its vocabulary. Raises `TrainingError` for a folder
    without such a head."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not Eagle3.recognises(config):
        raise TrainingError(f"draft={folder}: architectures={config.get('architectures')}; must be [{ARCHITECTURE!r}]")
    tensors = load_file(folder / "model.safetensors")
    vocabulary = DraftVocabulary(target_ids(tensors.pop("d2t")), tensors.pop("t2d"))
    head = Eagle3Head(read_draft_config(config, target, folder))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head.to(target.device), vocabulary.to(target.device)


class Eagle3Kind(DraftKind):
    """A new EAGLE-3 head."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        draft_vocab = min(arguments.draft_vocab or _DRAFT_VOCAB, target.config.vocab_size)
        self.config = draft_config(target, draft_vocab, arguments.intermediate_size, arguments.head_flags or ())
        self.method = read_draft_config(self.config, target, arguments.output)

    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        vocabulary = choose_vocabulary(samples, self.method.vocab_size, self.method.model.vocab_size, stops)
        vocabulary = vocabulary.to(self.target.device)
        return build_head(self.target, self.method, vocabulary, self.arguments.seed), vocabulary

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        assert isinstance(head, Eagle3Head)
        save_draft(head, vocabulary, self.config | token_ids(self.target.generation_config), folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        return load_draft(folder, self.target)
