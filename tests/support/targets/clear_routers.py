"""Random mixtures of experts without near ties, and a check of greedy answers in bfloat16 against them.

A router of random weights nearly ties now and then; rounding then swaps experts, and the rest of an answer is another
one. Here the experts of a row depend on its token alone, by a wide margin. What is left of rounding is small and known:
a wrong token shows."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.target_answers import eager_model

_SIGNAL = 8.0  # in the embedding; other values have a standard deviation of 0.2, and of about 5 after four layers
_SECOND = 0.8  # share of the signal that the second expert of a token has
_STEEP = 4.0  # logits of a router by its input, which a norm brings to about 1
_INTO_STREAM = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "w2.weight", "down_proj", "down_proj_bias")
_ROUTERS = ("mlp.gate.weight", "router.weight", "block_sparse_moe.gate.weight")
_MAX_ERRORS = 12  # of mean absolute errors of a logit: ten standard deviations of it, seven of a difference of two


def clear_routers(folder: Path) -> Path:
    """Change a checkpoint in place so that each token has two experts of its own in all layers. The first dimensions of
    the hidden states, one per expert, hold what the embedding puts there: no layer adds to them, and routers read
    nothing else."""
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    num_experts = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_ROUTERS))
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, :num_experts] = _signals(tensor.shape[0], num_experts, generator)
        elif name.endswith(_ROUTERS):
            tensor.copy_(_STEEP * torch.eye(*tensor.shape))
        elif name.endswith(("router.bias", "e_score_correction_bias")):
            tensor.zero_()
        elif "post_attention_layernorm" in name:
            tensor[:num_experts] = 1.0
        elif name.endswith(_INTO_STREAM):
            by_row = tensor.dim() == 2 and name.endswith(".weight")
            (tensor[:num_experts] if by_row else tensor[..., :num_experts]).zero_()
    save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


def _signals(num_tokens: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Return [tokens, experts] float32, two of a row not 0."""
    signals = torch.zeros(num_tokens, num_experts)
    for row in signals:
        first, second = torch.randperm(num_experts, generator=generator)[:2].tolist()
        row[first], row[second] = _SIGNAL, _SECOND * _SIGNAL
    return signals


def check_greedy_in_bfloat16(prompts: Sequence[list[int]], answers: Sequence[Sequence[int]], target: Path) -> None:
    """Check that each token of the answers is the most likely one after the text before it, by transformers' model in
    float32, but for what rounding to bfloat16 may change: a multiple of the mean error of transformers' logits in
    bfloat16."""
    exact, rounded = eager_model(target), eager_model(target, torch.bfloat16)
    gaps, errors = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits, coarse = (model(text).logits[0, len(prompt) - 1 : -1].float() for model in (exact, rounded))
        given = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        gaps.append(logits.max(-1).values - given)
        errors.append((coarse - logits).abs().flatten())
    worst, allowed = float(torch.cat(gaps).max()), _MAX_ERRORS * float(torch.cat(errors).mean())
    assert worst <= allowed, f"a logit is {worst:.3f} below the largest, beyond what rounding may change: {allowed:.3f}"
