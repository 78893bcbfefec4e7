"""Chooses the tokens that a draft may propose, and maps them to the target's (EAGLE-3's `d2t` and `t2d`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.training.errors import TrainingError
from speculative.training.samples import Sample


@dataclass(frozen=True)
class DraftVocabulary:
    """`target_ids` [draft_vocab] int64, ascending: entry i is the target token that draft token i stands for.

    `t2d` [target_vocab] bool tells which target tokens those are.
    """

    target_ids: Tensor
    t2d: Tensor

    @classmethod
    def of(cls, target_ids: Tensor, target_vocab_size: int) -> DraftVocabulary:
        """The vocabulary of these target tokens."""
        t2d = torch.zeros(target_vocab_size, dtype=torch.bool)
        t2d[target_ids] = True
        return cls(target_ids, t2d)

    def d2t(self) -> Tensor:
        """Offsets [draft_vocab] int64: target_id = i + d2t[i]."""
        return self.target_ids - torch.arange(len(self.target_ids), device=self.target_ids.device)

    def to(self, device: torch.device) -> DraftVocabulary:
        """The same with its tensors on the device."""
        return DraftVocabulary(self.target_ids.to(device), self.t2d.to(device))


def choose_vocabulary(
    samples: Iterable[Sample], size: int, target_vocab_size: int, always: Sequence[int]
) -> DraftVocabulary:
    """The `size` most frequent answer tokens, with those of `always` (the ends of a turn) in any case.

    Ties go to the smaller id; when fewer tokens occur, the smallest unused ids fill up. Raises `TrainingError` for a
    size outside 1..target_vocab_size.
    """
    if not len(always) <= size <= target_vocab_size:
        raise TrainingError(
            f"draft_vocab={size}: must be between {len(always)} and the target's vocabulary of {target_vocab_size}"
        )
    counts = Counter(token for sample in samples for token in sample.tokens[sample.num_prompt :])
    kept = set(always)
    ranked = sorted(range(target_vocab_size), key=lambda token: (-counts[token], token))
    for token in ranked:
        if len(kept) >= size:
            break
        kept.add(token)
    return DraftVocabulary.of(torch.tensor(sorted(kept), dtype=torch.int64), target_vocab_size)


def coverage(samples: Iterable[Sample], vocabulary: DraftVocabulary) -> float:
    """The share of answer tokens that the draft vocabulary holds."""
    answers = [torch.tensor(sample.tokens[sample.num_prompt :], dtype=torch.int64) for sample in samples]
    return float(vocabulary.t2d.cpu()[torch.cat(answers)].float().mean())
