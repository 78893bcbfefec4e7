"""`ScoreRule`: how one attention layer turns q . k into weights. A model's configuration declares it, and layers pass
it to backends. Also the rule in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634  # kernels compute powers of two


@dataclass(frozen=True)
class ScoreRule:
    """A row's weights are the softmax of soft_cap * tanh(scale * q . k / soft_cap) over the keys that it sees.

    scale: positive.
    window: maximum keys that a row sees, including itself: those at positions above its own minus `window`. In a tree,
        positions are counted along the row's path. None: no limit.
    soft_cap: None: scores are scale * q . k.
    has_sinks: each query head has one more score without a value, which takes a part of the softmax's sum
        (arXiv 2309.17453, section 3.2). Its tensor is a separate argument.
    within_images: a row of an image in a prompt chunk also sees the image's later rows (`RowInputs.reach`).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    within_images: bool = False

    @property
    def features(self) -> dict[str, str]:
        """Return the features that a backend needs besides a plain softmax: names in
        `aerie.attention.registry.BackendFacts.scores`, with their texts for refusals."""
        asked = {
            "window": None if self.window is None else f"sliding_window={self.window}",
            "soft_cap": None if self.soft_cap is None else f"attn_logit_softcapping={self.soft_cap:g}",
            "sinks": "attention sinks" if self.has_sinks else None,
        }
        return {name: text for name, text in asked.items() if text is not None}


def row_weights(scores: Tensor, hidden: Tensor, rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Return the weights of each row's keys, in the shape of `scores`; float64 if the scores are, else float32.

    scores: [..., rows, keys], scale * q . k.
    hidden: bool, broadcast to `scores`; True for masked keys.
    sinks: broadcast to [..., rows, 1], if the rule has them.
    """
    assert rule.has_sinks == (sinks is not None)
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    scores = scores.masked_fill(hidden, float("-inf"))
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
