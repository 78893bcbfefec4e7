"""Makes a target that copies: `tests/models/retrieval_tiny`, trained further until it goes on with any text that its
prompt has before. Takes half a minute of a CPU."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.support import ROOT
from tests.support.targets.needles import VOCAB

NEEDLES = ROOT / "tests" / "models" / "retrieval_tiny"
MAX_STEPS, ROWS, COPIED = 300, 8, 64
RIGHT = 0.998  # share of right tokens, smoothed over ten steps, at which training ends


def shuffled(length: int, generator: torch.Generator) -> Tensor:
    """Return [length] int64 different tokens: a model of two layers knows a place in a text by one token only."""
    return torch.randperm(VOCAB - 2, generator=generator)[:length] + 2


def copying_target(seed: int = 0) -> torch.nn.Module:
    """Return a LlamaForCausalLM. Raises RuntimeError if it does not learn to copy."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(NEEDLES, dtype=torch.float32)
    generator, right = torch.Generator().manual_seed(seed), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for _ in range(MAX_STEPS):
        length = int(torch.randint(COPIED + 8, VOCAB - 16, (), generator=generator))
        first = int(torch.randint(0, length - COPIED - 1, (), generator=generator))
        text = torch.stack([shuffled(length, generator) for _ in range(ROWS)])
        again = text[:, first : first + COPIED + 1]
        ids = torch.cat((torch.zeros(ROWS, 1, dtype=torch.int64), text, again[:, :-1]), dim=1)
        logits = model.lm_head(model.model(ids).last_hidden_state[:, 1 + length :]).flatten(0, 1)
        targets = again[:, 1:].flatten()
        optimizer.zero_grad()
        cross_entropy(logits, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right += 0.1 * (float((logits.argmax(-1) == targets).float().mean()) - right)
        if right > RIGHT:
            return model.eval()
    raise RuntimeError(f"after {MAX_STEPS} steps {right:.3f} of the tokens are right")
