"""A small model of Qwen3.5's architecture with its MTP module: shape, training, and the published folder layout.

Target and module are trained together: three layers of the gated delta rule before each one of gated
attention (arXiv 2412.06464). The target is transformers' own model, whose reference of the chunked rule has gradients;
the module is `aerie.speculative.training.mtp`'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from aerie.speculative.drafts.mtp import QwenMtp
from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import token_ids
from aerie.speculative.training.samples import Batch, Sample
from aerie.speculative.training.trainer import FitArguments
from tests.support.targets.deepseek import ModuleTarget, joint_loss
from tests.support.targets.llama import ChatData, answer_loss, fit_target

# Dimensions by their names in config.json. small: 21 MB in bf16.
_SMALL: dict[str, int] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 2048,
}
# tiny: 1 MB, for tests on a CPU.
_TINY = _SMALL | {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}
SIZES = {"small": _SMALL, "tiny": _TINY}


def build_hybrid(shape: Mapping[str, int], tokenizer: PreTrainedTokenizerBase, seed: int) -> ModuleTarget:
    """A freshly initialised float32 model on the CPU. Raises `TrainingError` for a tokenizer with more tokens."""
    if len(tokenizer) > shape["vocab_size"]:
        raise TrainingError(
            f"tokenizer: has {len(tokenizer)} tokens, the model {shape['vocab_size']}; give another, or a larger --size"
        )
    config = Qwen3_5TextConfig(**shape, **token_ids(tokenizer), tie_word_embeddings=False, dtype="bfloat16")
    raw = json.loads(config.to_json_string(use_diff=False))
    raw |= {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1, "transformers_version": None}
    raw = {name: value for name, value in raw.items() if value is not None}
    torch.manual_seed(seed)
    model = ModuleTarget(Qwen3_5ForCausalLM(config), QwenMtp, raw).float()
    for parameter in model.mtp.parameters():
        if parameter.dim() >= 2:  # norms stay zeros, which mean ones
            nn.init.normal_(parameter, std=0.02)
    return model


def train_hybrid(
    data: ChatData, model: ModuleTarget, options: FitArguments, arguments: argparse.Namespace
) -> list[float]:
    """Train the model in place and return the logged losses."""
    steps = arguments.mtp_steps if arguments.mtp_weight > 0 else 0

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return joint_loss(model, batch, arguments.prompt_weight, steps, arguments.mtp_weight)

    def evaluate(held: Sequence[Sample]) -> dict[str, float]:
        return {"validation_loss": answer_loss(held, options, lambda batch: joint_loss(model, batch, 0.0))}

    return fit_target(model, data, options, loss_of, evaluate, dropout=arguments.dropout, title="hybrid")
