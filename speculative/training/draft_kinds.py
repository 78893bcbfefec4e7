"""The kinds of drafts that `aerie train-draft` makes: how each is begun, saved and loaded again. How they are trained
and measured is the same (`draft`)."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from speculative.training.deepseek_files import read_module, save_module
from speculative.training.draft import build_head
from speculative.training.draft_files import draft_config, load_draft, read_draft_config, save_draft
from speculative.training.draft_model import Eagle3Head, TrainedDraft
from speculative.training.errors import TrainingError
from speculative.training.mtp_model import MtpHead
from speculative.training.samples import Sample
from speculative.training.vocabulary import DraftVocabulary, choose_vocabulary

_DRAFT_VOCAB = 32000


class DraftKind(ABC):
    """Of the parsed arguments, for a loaded target. Raises `TrainingError` when it is made for a target or for
    arguments that do not fit."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        self.arguments = arguments
        self.target = target

    @abstractmethod
    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        """In float32 on the target's device, with the tokens that it may propose."""

    @abstractmethod
    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        """As the engine loads it."""

    @abstractmethod
    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        """What was saved there, as `build` gives it."""


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
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        token_ids = {name: getattr(self.target.generation_config, name) for name in names}
        save_draft(head, vocabulary, self.config | token_ids, folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        return load_draft(folder, self.target)


class MtpKind(DraftKind):
    """The target's own module for multi-token prediction, trained further."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        for name in ("draft_vocab", "intermediate_size", "head_flags"):
            value = vars(arguments)[name]
            if value is not None:
                raise TrainingError(f"{name}={value}: is of EAGLE-3 heads; leave it out with --method mtp")
        self.head = self._on_device(read_module(arguments.target))

    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        return self.head, self._all_tokens()

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        assert isinstance(head, MtpHead)
        save_module(head, folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        return self._on_device(read_module(folder)), self._all_tokens()

    def _on_device(self, head: MtpHead) -> MtpHead:
        head.use_head(self.target.get_output_embeddings())
        return head.to(self.target.device)

    def _all_tokens(self) -> DraftVocabulary:
        size = self.head.method.model.vocab_size
        return DraftVocabulary.of(torch.arange(size), size).to(self.target.device)


DRAFTS: dict[str, type[DraftKind]] = {"eagle3": Eagle3Kind, "mtp": MtpKind}
