"""A small model of DeepSeek-V3's architecture with its MTP module: shape, training, and the published folder layout.

transformers' model and the module are trained together: latent attention with low-rank queries, a dense first layer,
then a shared expert and experts in groups behind a sigmoid router whose bias keeps them evenly used. Paper: arXiv
2412.19437, sections 2.1, 2.2 and 4.2.

In a checkpoint the module is one more layer after the target's, without its copies of embedding and vocabulary head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from aerie.speculative.drafts.mtp import DeepseekMtp, Mtp
from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import token_ids, write_checkpoint
from aerie.speculative.training.mtp import FLOAT32, MtpHead, module_tensors, named_experts
from aerie.speculative.training.samples import Batch, Sample, attention_masks, collate, plan_batches
from aerie.speculative.training.trainer import FitArguments
from aerie.workers.models.registry import family_of
from tests.support.targets.llama import ChatData, answer_loss, fit_target

# Dimensions by their names in config.json. small: 31 MB in bf16.
_SMALL: dict[str, int] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 2048,
}
# tiny: 1 MB, for tests on a CPU.
_TINY = _SMALL | {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
SIZES = {"small": _SMALL, "tiny": _TINY}


def deepseek_config(shape: Mapping[str, int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The config.json of a model with these dimensions."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **shape,
        "num_key_value_heads": shape["num_attention_heads"],
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
        **token_ids(tokenizer),
    }


class Balance:
    """Keeps the experts of each router evenly used.

    live: [N] bool, false for padding, of the rows that the routers get; None: all are live.
    counts: for each router [experts] float32, choices of live rows in training mode since the last `step`.
    """

    def __init__(self, routers: Sequence[DeepseekV3TopkRouter]) -> None:
        self.live: Tensor | None = None
        self.counts = [torch.zeros(len(router.weight)) for router in routers]
        self._routers = routers
        for index, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, index))

    def _count(self, index: int, router: nn.Module, _: object, output: tuple[Tensor, ...]) -> None:
        if router.training:
            _, weight, chosen = output
            ones = (
                torch.ones_like(weight) if self.live is None else self.live.to(weight.dtype)[:, None].expand_as(weight)
            )
            counts = self.counts[index] = self.counts[index].to(chosen.device)
            counts.index_add_(0, chosen.flatten(), ones.detach().flatten())

    def shares(self) -> Tensor:
        """Choices of each expert as multiples of an even share [routers, experts]."""
        return torch.stack([counts / counts.mean() for counts in self.counts])

    @torch.no_grad()
    def step(self, speed: float) -> None:
        """Lower the bias of experts with more than an even share and raise the others', by a fixed step (arXiv
        2412.19437, section 2.1.2)."""
        for router, counts in zip(self._routers, self.counts, strict=True):
            router.e_score_correction_bias += speed * torch.sign(counts.mean() - counts)
            counts.zero_()


class ModuleTarget(nn.Module):
    """transformers' target over whole sequences, and its module, which uses its embedding and vocabulary head.

    raw: what its config.json is to hold.
    """

    def __init__(self, model: PreTrainedModel, method: type[Mtp], raw: dict[str, Any]) -> None:
        super().__init__()
        self.raw, self.model, source = raw, model, "the new model"
        target = family_of(raw["architectures"][0], source).read_config(raw, source)
        self.mtp = MtpHead(method.read(source, raw, target), model.config)
        self.mtp.use_target(model)
        self.balance = Balance([part for part in self.modules() if isinstance(part, DeepseekV3TopkRouter)])

    def hidden(self, tokens: Tensor) -> Tensor:
        """The final hidden states [B, T, H] of tokens [B, T], padded at their ends."""
        masks = attention_masks(self.model.config, tokens.shape[1], tokens.device)
        output = self.model.base_model(input_ids=tokens, attention_mask=masks, use_cache=False)
        final: Tensor = output.last_hidden_state
        return final

    def unroll(self, tokens: Tensor, hidden: Tensor, num_steps: int) -> list[Tensor]:
        """The module's states after tokens [B, T] with the target's states `hidden`."""
        return self.mtp.unroll(self.model.get_input_embeddings()(tokens), hidden, num_steps)

    def forward(self, tokens: Tensor, live: Tensor, mtp_steps: int) -> list[Tensor]:
        """Logits [B, T, vocabulary]: the target's for the next token, then each module step's for one token later."""
        self.balance.live = live.flatten()
        hidden = self.hidden(tokens)
        steps = self.unroll(tokens, hidden, mtp_steps) if mtp_steps else []
        return [self.model.get_output_embeddings()(states) for states in (hidden, *steps)]


def build_deepseek(shape: Mapping[str, int], tokenizer: PreTrainedTokenizerBase, seed: int) -> ModuleTarget:
    """A freshly initialised float32 model on the CPU. Raises `TrainingError` for a tokenizer with more tokens."""
    if len(tokenizer) > shape["vocab_size"]:
        raise TrainingError(
            f"tokenizer: has {len(tokenizer)} tokens, the model {shape['vocab_size']}; give another, or a larger --size"
        )
    torch.manual_seed(seed)
    raw = deepseek_config(shape, tokenizer)
    target = DeepseekV3ForCausalLM(DeepseekV3Config.from_dict(raw))
    target.set_experts_implementation("dense_experts")
    model = ModuleTarget(target, DeepseekMtp, raw)
    initialise(model)
    return model


def initialise(module: nn.Module) -> None:
    """Draw matrices with a standard deviation of 0.02 from the global RNG, set norms to ones."""
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            assert "norm" in name, f"{name} is no norm"
            nn.init.ones_(parameter)


def joint_loss(
    model: nn.Module, batch: Batch, prompt_weight: float, mtp_steps: int = 0, mtp_weight: float = 0.0
) -> Tensor:
    """Mean next-token cross-entropy, plus `mtp_weight` times the mean of the module steps' losses; prompt tokens weigh
    `prompt_weight`. A float32 scalar."""
    index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    live = index < batch.lengths[:, None]
    weights = torch.where(index >= batch.num_prompt[:, None], 1.0, prompt_weight) * live
    losses = [
        _cross_entropy(logits, batch.tokens, weights, ahead)
        for ahead, logits in enumerate(model(batch.tokens, live, mtp_steps), start=1)
    ]
    return losses[0] + mtp_weight * torch.stack(losses[1:]).mean() if mtp_steps else losses[0]


def _cross_entropy(logits: Tensor, tokens: Tensor, weights: Tensor, ahead: int) -> Tensor:
    """Mean loss of logits [B, T, vocabulary] for the token `ahead` positions later, by that token's weight."""
    flat, weights = logits[:, :-ahead].float().flatten(0, 1), weights[:, ahead:].flatten()
    losses = functional.cross_entropy(flat, tokens[:, ahead:].flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1)


@torch.no_grad()
def expert_shares(
    model: ModuleTarget, samples: Sequence[Sample], batch_tokens: int, mtp_steps: int, device: torch.device
) -> tuple[float, float]:
    """The least and the most used expert's rows over the samples, as a multiple of an even share, of all routers."""
    model.train()  # rows are counted in training mode only
    model.balance.step(0)  # resets the counts
    for indices in plan_batches([len(s.tokens) for s in samples], batch_tokens, 0):
        joint_loss(model, collate([samples[i] for i in indices]).to(device), 0.0, mtp_steps)
    shares = model.balance.shares()
    model.balance.step(0)
    model.eval()
    return float(shares.min()), float(shares.max())


def train_deepseek(
    data: ChatData, model: ModuleTarget, options: FitArguments, arguments: argparse.Namespace
) -> list[float]:
    """Train the model in place and return the logged losses."""
    steps = arguments.mtp_steps if arguments.mtp_weight > 0 else 0

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return joint_loss(model, batch, arguments.prompt_weight, steps, arguments.mtp_weight)

    def evaluate(held: Sequence[Sample]) -> dict[str, float]:
        least, most = expert_shares(model, held, options.batch_tokens, steps, options.device)
        loss = answer_loss(held, options, lambda batch: joint_loss(model, batch, 0.0))
        return {"validation_loss": loss, "least_used_expert": least, "most_used_expert": most}

    after_step = register_optimizer_step_post_hook(lambda *_: model.balance.step(arguments.router_bias_speed))
    try:
        return fit_target(model, data, options, loss_of, evaluate, dropout=arguments.dropout, title="deepseek")
    finally:
        after_step.remove()


def save_module_target(model: ModuleTarget, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, bf16 weights of target and module, generation config and tokenizer as a Hugging Face folder whose
    model answers greedily."""
    tensors = named_experts(model.model.state_dict()) | module_tensors(model.mtp)
    write_checkpoint(folder, model.raw, tensors, FLOAT32)
    settings = token_ids(tokenizer) | {"do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
