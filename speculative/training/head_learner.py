"""A served head that is trained further, a few steps at a time, on texts that its target has written. Used by
`aerie.cluster.learning.draft_learning`.

The moving average of the weights is what is measured and saved, because single steps on few texts are noisy.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aerie.speculative.config import BLOCK_METHODS
from aerie.speculative.training.block_kinds import load_block_head
from aerie.speculative.training.blocks import BlockHead
from aerie.speculative.training.commands import load_model
from aerie.speculative.training.draft import DraftVocabulary, TrainedDraft, Unrolling, write_checkpoint
from aerie.speculative.training.eagle3 import Eagle3Head, load_draft, save_draft
from aerie.speculative.training.losses import measure_acceptance
from aerie.speculative.training.samples import Batch, Sample, collate, plan_steps

_AVERAGE = 0.98  # weight of the old value in the moving average, per step
_MAX_KNOWN_TEXTS = 1024  # texts whose rounds with the served weights are kept
_WARMUP_STEPS = 10  # without them, AdamW's first steps move every weight by the whole rate
_MAX_CHAIN_STEPS, _CHAIN_DECAY = 5, 0.8  # EAGLE-3's training-time test, arXiv 2503.01840
_GAMMA, _MAX_ANCHORS = 4.0, 256  # for block heads: as in `aerie train-draft`, but fewer blocks per step
Pair = tuple[Sequence[int], Sequence[int]]  # a prompt and its answer


class HeadLearner:
    """A head in training, beside the weights that are served.

    num_steps: depth to which an EAGLE-3 head drafts: it is trained and measured to that depth, at most 5.
    wait: called before each operation of training and measuring, and returns when the operation may run; an operation
        takes some milliseconds. None: they run at once.
    Raises `TrainingError` for a target or a draft that cannot be trained.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        method: str,
        rate: float,
        batch_tokens: int,
        num_steps: int,
        wait: Callable[[], None] | None = None,
    ) -> None:
        assert method in ("eagle3", *BLOCK_METHODS), "the configuration was checked"
        self._method, self._batch_tokens, self._wait = method, batch_tokens, wait
        self._chain_steps = min(num_steps, _MAX_CHAIN_STEPS)
        self._target = load_model(target, torch.device("cpu"), torch.float32).requires_grad_(False)
        self._config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        self.rate = rate
        self._num_steps = 0
        self.reset(draft)

    def reset(self, draft: Path) -> None:
        """Start again from the weights in a folder, which are served."""
        self.compare_with(draft)
        self._head, self._average = copy.deepcopy(self._served), copy.deepcopy(self._served)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._since_reset = 0

    def compare_with(self, draft: Path) -> None:
        """Train on, and compare with the weights in a folder from now on, which are served."""
        self._served, self._vocabulary = self._load(draft)
        self._served_rounds = dict[Sample, tuple[int, int]]()
        self._since_served = 0

    def train(self, texts: Sequence[Pair], num_steps: int) -> float:
        """Take steps over prompts and answers in random order, and return the mean loss."""
        samples = [_sample(text) for text in texts]
        lengths = [len(sample.tokens) for sample in samples]
        plan = plan_steps(lengths, self._batch_tokens, self._num_steps, epochs=1, steps=num_steps)
        with self._pauses():
            losses = [self._step(collate([samples[index] for index in batch])) for batch in plan]
        return sum(losses) / len(losses)

    def _step(self, batch: Batch) -> float:
        """Train on one batch, and return its loss."""
        loss = self._head.batch_loss(self._head, self._target, self._vocabulary, batch, self._unrolling)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self._since_reset + 1) / _WARMUP_STEPS)
        self._optimizer.step()
        self._num_steps += 1
        self._since_reset += 1
        self._since_served += 1
        self._update_average()
        return float(loss.detach())

    def rounds(self, texts: Sequence[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return rounds and accepted tokens of each answer, with the served weights and with the trained ones. Greedy
        chains over the answers' own texts."""
        samples = [_sample(text) for text in texts]
        for sample in samples:
            if sample not in self._served_rounds:
                self._served_rounds[sample] = self._rounds(self._served, sample)
        served = [self._served_rounds[sample] for sample in samples]
        while len(self._served_rounds) > _MAX_KNOWN_TEXTS:
            self._served_rounds.pop(next(iter(self._served_rounds)))  # the oldest
        return served, [self._rounds(self._average, sample) for sample in samples]

    def save(self, folder: Path) -> None:
        """Write the trained weights as a folder that the engine loads."""
        if isinstance(self._average, Eagle3Head):
            save_draft(self._average, self._vocabulary, self._config, folder)
        else:
            write_checkpoint(folder, self._config, dict(self._average.named_parameters()))

    def _rounds(self, head: TrainedDraft, sample: Sample) -> tuple[int, int]:
        with self._pauses():
            tally = measure_acceptance(head, self._target, self._vocabulary, [sample], self._depth, self._batch_tokens)
        return tally.num_rounds, sum(tally.accepted)

    def _pauses(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._wait is None else _Pauses(self._wait)

    def _update_average(self) -> None:
        decay = min(_AVERAGE, (1 + self._since_served) / (10 + self._since_served))
        with torch.no_grad():
            for average, current in zip(self._average.parameters(), self._head.parameters(), strict=True):
                average.lerp_(current, 1 - decay)

    def _load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        if self._method == "eagle3":
            return load_draft(folder, self._target)
        return load_block_head(folder, self._method, self._target)

    @property
    def _depth(self) -> int:
        return self._head.method.form.max_depth if isinstance(self._head, BlockHead) else self._chain_steps

    @property
    def _unrolling(self) -> Unrolling:
        if isinstance(self._head, BlockHead):
            return Unrolling(self._depth, math.exp(-1 / _GAMMA), _MAX_ANCHORS)
        return Unrolling(self._chain_steps, _CHAIN_DECAY)


class _Pauses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `wait` before each operation, also those of a backward pass, which runs in the calling thread on a CPU."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wait = wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._wait()
        return func(*args, **(kwargs or {}))


def _sample(text: Pair) -> Sample:
    return Sample((*text[0], *text[1]), len(text[0]))
