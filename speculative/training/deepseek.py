"""Trains a small model of DeepSeek-V3's shape and its module for multi-token prediction together, from scratch.

Called by `aerie train-deepseek`. Latent attention with low-rank queries, a dense first layer, then experts in groups
behind a sigmoid router whose bias keeps them evenly used, and a shared expert: what DeepSeek-V3 has, in a size that
can be trained in minutes and kept beside tests. Paper: arXiv 2412.19437, sections 2.1, 2.2 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from speculative.draft_models.mtp import ARCHITECTURES, Mtp
from speculative.training.checkpoint import Checkpoint
from speculative.training.deepseek_files import layer_tensors, module_tensors, write_checkpoint, write_generation_config
from speculative.training.deepseek_layers import DeepseekLayer, initialise, routers
from speculative.training.draft_model import BranchCache, RMSNorm
from speculative.training.errors import TrainingError
from speculative.training.mtp_model import MtpHead
from speculative.training.rows import Conversation
from speculative.training.samples import Batch, Sample, collate, plan_steps
from speculative.training.target import TargetOptions, answer_loss, fit_target
from workers.layers.rotary import frequencies
from workers.models.deepseek import DeepseekConfig, read_config


@dataclass(frozen=True)
class DeepseekShape:
    """The model's dimensions, named as in a `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    max_position_embeddings: int = 2048


# small: 31 MB in bf16. tiny: 1 MB, for tests on a CPU.
SIZES = {
    "small": DeepseekShape(),
    "tiny": DeepseekShape(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=192,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
    ),
}


@dataclass(frozen=True, kw_only=True)
class DeepseekOptions(TargetOptions):
    """How it is trained.

    mtp_steps: that the module is unrolled. mtp_weight: of its loss beside the target's. bias_speed: what a step changes
    a router's bias by.
    """

    mtp_steps: int
    mtp_weight: float
    bias_speed: float


def deepseek_config(shape: DeepseekShape, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The config.json of a model of this shape."""
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "deepseek_v3",
        **asdict(shape),
        "num_key_value_heads": shape.num_attention_heads,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


class DeepseekTarget(nn.Module):
    """The target over whole sequences, with gradients, and its module."""

    frequencies: Tensor

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        super().__init__()
        self.config: DeepseekConfig = read_config(raw, source)
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DeepseekLayer(config, layer) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MtpHead(Mtp.read(source, raw, config))
        self.mtp.use_head(self.lm_head)
        self.register_buffer("frequencies", frequencies(config.rope, config.rotated_dim), persistent=False)

    def forward(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        """[B, T] tokens -> the final hidden states [B, T, H]. live: [B, T] bool, rows that are no padding."""
        positions = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)[:, None]
        angles, magnitude = positions * self.frequencies, self.config.rope.magnitude
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, BranchCache([], []), live)
        final: Tensor = self.norm(hidden)
        return final

    def tensors(self) -> dict[str, Tensor]:
        """All of target and module, by their published names."""
        named = {"model.embed_tokens": self.embed_tokens, "model.norm": self.norm, "lm_head": self.lm_head}
        tensors = {f"{name}.weight": module.get_parameter("weight").data for name, module in named.items()}
        for number, layer in enumerate(self.layers):
            tensors |= layer_tensors(layer, f"model.layers.{number}")
        return tensors | module_tensors(self.mtp)


def build_deepseek(shape: DeepseekShape, tokenizer: PreTrainedTokenizerBase, seed: int) -> DeepseekTarget:
    """A freshly initialised float32 model on the CPU. Raises `TrainingError` for a tokenizer with more tokens."""
    if len(tokenizer) > shape.vocab_size:
        raise TrainingError(
            f"tokenizer: has {len(tokenizer)} tokens, the model {shape.vocab_size}; give another, or a larger --size"
        )
    torch.manual_seed(seed)
    model = DeepseekTarget(deepseek_config(shape, tokenizer), "the new model")
    initialise(model)
    return model


def joint_loss(model: DeepseekTarget, batch: Batch, options: DeepseekOptions) -> Tensor:
    """Mean next-token cross-entropy, and `mtp_weight` times the mean over the module's steps of theirs, prompt tokens
    weighted; a float32 scalar."""
    tokens, places = batch.tokens, torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    live = places < batch.lengths[:, None]
    weights = torch.where(places >= batch.num_prompt[:, None], 1.0, options.prompt_weight) * live
    with torch.autocast(tokens.device.type, dtype=options.dtype, enabled=options.dtype != torch.float32):
        hidden = model(tokens, live)
        total = _cross_entropy(model.lm_head(hidden), tokens, weights, 1)
        if options.mtp_weight > 0:
            steps = model.mtp(model.embed_tokens(tokens), hidden, options.mtp_steps, live)
            share = options.mtp_weight / len(steps)
            for step, state in enumerate(steps):
                total = total + share * _cross_entropy(model.lm_head(state), tokens, weights, step + 2)
    return total


def _cross_entropy(logits: Tensor, tokens: Tensor, weights: Tensor, ahead: int) -> Tensor:
    """Of logits [B, T, vocabulary] for the token `ahead` places later, weighted as that one is."""
    flat, weights = logits[:, :-ahead].float().flatten(0, 1), weights[:, ahead:].flatten()
    losses = functional.cross_entropy(flat, tokens[:, ahead:].flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1)


@torch.no_grad()
def expert_shares(
    model: DeepseekTarget, samples: Sequence[Sample], options: DeepseekOptions, device: torch.device
) -> tuple[float, float]:
    """The least and the most rows of any expert, as a multiple of an even share; of all routers, over the samples."""
    model.train()
    for router in routers(model):
        router.counts.zero_()
    for indices in plan_steps([len(s.tokens) for s in samples], options.batch_tokens, 0, epochs=1, steps=None):
        joint_loss(model, collate([samples[i] for i in indices], 0, device), options)
    shares = torch.stack([router.counts / router.counts.mean() for router in routers(model)])
    for router in routers(model):
        router.counts.zero_()
    model.eval()
    return float(shares.min()), float(shares.max())


def train_deepseek(
    train: Sequence[Conversation],
    held: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    model: DeepseekTarget,
    options: DeepseekOptions,
    device: torch.device,
    *,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[float]:
    """Trains the model in place on the device and returns the loss of every step; `held` is only measured."""
    alone = replace(options, prompt_weight=0.0, mtp_weight=0.0)

    def evaluate(samples: Sequence[Sample]) -> dict[str, float]:
        least, most = expert_shares(model, samples, options, device)
        loss = answer_loss(samples, options.batch_tokens, device, lambda batch: joint_loss(model, batch, alone))
        return {"validation_loss": loss, "least_used_expert": least, "most_used_expert": most}

    def balance() -> None:
        for router in routers(model):
            router.balance(options.bias_speed)

    return fit_target(
        model,
        train,
        held,
        tokenizer,
        options,
        device,
        lambda batch: joint_loss(model, batch, options),
        evaluate,
        title="deepseek",
        after_step=balance,
        checkpoint=checkpoint,
        resume=resume,
        progress=progress,
    )


def save_deepseek(
    model: DeepseekTarget, shape: DeepseekShape, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Writes config, bf16 weights of target and module, generation config and tokenizer as a Hugging Face folder."""
    write_checkpoint(folder, deepseek_config(shape, tokenizer), model.tensors())
    write_generation_config(folder, tokenizer)
    tokenizer.save_pretrained(folder)
