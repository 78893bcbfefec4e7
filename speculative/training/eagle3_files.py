"""Builds, saves and loads EAGLE-3 heads, in the published folder layout that SafeAILab's code, SGLang and vLLM read.

`speculative.drafts.eagle3` reads the config.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from speculative.drafts.eagle3 import Eagle3
from speculative.drafts.eagle3_checkpoint import (
    ARCHITECTURE,
    MIN_TARGET_LAYERS,
    default_capture,
    layer_ids,
    target_ids,
)
from speculative.training import TrainingError
from speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft
from speculative.training.eagle3 import Eagle3Head
from speculative.training.samples import Sample
from workers.models.llama import read_config

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_DRAFT_VOCAB = 32000


def draft_config(
    target: PreTrainedModel, vocab_size: int, intermediate_size: int | None = None, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the config.json of a head that captures the default layers of the target.

    vocab_size: the head's own vocabulary. intermediate_size: width of its MLP, the target's if None. flags: the
    `HeadFlags` that are true.
    Raises `TrainingError` for a target of an architecture or depth that is not supported.
    """
    config = target.config
    if config.model_type not in MODEL_TYPES:
        raise TrainingError(f"target: model_type={config.model_type!r} is not supported; use {', '.join(MODEL_TYPES)}")
    if config.num_hidden_layers < MIN_TARGET_LAYERS:
        raise TrainingError(
            f"target: has {config.num_hidden_layers} layers; EAGLE-3 captures three of at least {MIN_TARGET_LAYERS}"
        )
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if rope["rope_type"] != "default" else None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
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
    try:
        method = Eagle3.read(str(folder), config, read_config(target.config.to_dict(), "target"))
    except ValueError as error:
        raise TrainingError(str(error)) from None
    model = method.model
    untrained = {
        f"num_hidden_layers={model.num_layers}": model.num_layers > 1,
        f"hidden_size={model.hidden_size} beside its target's {method.target_hidden_size}": model.hidden_size
        != method.target_hidden_size,
        "use_aux_hidden_state=false": not method.capture,
        "the output of the target's last layer among those captured": method.reads_last_layer and bool(method.capture),
        "attention_bias=true": model.qkv_bias or model.o_bias,
        "norms on the heads of its attention": model.qk_norm,
    }
    for what, found in untrained.items():
        if found:
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


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], float32: tuple[str, ...] = ()
) -> None:
    """Write `config.json` and `model.safetensors`, in bfloat16; tensors whose name ends with one of `float32` stay
    float32."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if name.endswith(float32) else torch.bfloat16
        cpu = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        saved[name] = cpu.contiguous().clone()  # safetensors refuses tensors that share memory
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    make_readable(folder)


def token_ids(owner: PreTrainedTokenizerBase | GenerationConfig) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text, by their names in config.json."""
    return {name: getattr(owner, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def make_readable(folder: Path) -> None:
    """Give the weights the permissions of config.json, because safetensors (0.8) writes files that only their owner can
    read."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


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
