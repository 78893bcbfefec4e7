"""Prompts of benchmarks with dummy weights."""

import torch

from aerie.workers.config import ModelSource
from aerie.workers.models.config import read_config_json

_FIRST = 10  # smaller ids may be special


def random_prompts(source: ModelSource, count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `num_tokens` tokens each, drawn from the whole vocabulary of the model at `source`. From a few
    tokens alone the hidden states of all prompts would be alike, and routers would choose the same experts for them."""
    raw = read_config_json(source.path)
    vocab_size = raw.get("text_config", raw)["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_FIRST, vocab_size, (count, num_tokens), generator=generator).tolist()
