"""A draft's loss against a frozen target, its training, and its greedy acceptance. The target runs with the draft in
every step, so no hidden states are stored. Paper: EAGLE-3, arXiv 2503.01840 (training-time test)."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculative.config import BLOCK_METHODS
from speculative.drafts.eagle3_checkpoint import offsets
from speculative.drafts.method import DraftMethod
from speculative.training import TrainingError
from speculative.training.samples import Batch, Sample, attention_masks, collate, plan_batches
from speculative.training.trainer import FitArguments, fit
from workers.layers.rotary import frequencies
from workers.models.deepseek import DeepseekConfig
from workers.models.llama import LlamaConfig


class TrainedDraft(nn.Module, ABC):
    """A draft over whole sequences, unrolled on its own outputs.

    Row n of step 0 reads the embedding of token n+1 and the target's feature of position n, has position n and predicts
    token n+2. Row n of step s reads the embedding of token n+s+1 and its own state of step s-1, has position n+s and
    predicts token n+s+2. It attends to the true prefix (step 0, rows 0..n) and its own branch (steps 1..s, row n).
    """

    frequencies: Tensor

    def __init__(self, method: DraftMethod, model: LlamaConfig | DeepseekConfig) -> None:
        """Create a draft without layers. model: `method.model`."""
        super().__init__()
        self.rope, self._capture = model.rope, method.capture
        self.register_buffer("frequencies", frequencies(model.rope, model.rotated_dim), persistent=False)
        self._target_head: list[nn.Module] = []  # in a list, so that it is not a submodule and not trained

    def use_target(self, target: PreTrainedModel) -> None:
        """Make `logits` use the target's vocabulary head, which is not trained."""
        self._target_head = [target.get_output_embeddings()]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [.., rotated] of positions [..], as transformers' layers take them: the angle of
        each pair twice."""
        angles = positions.unsqueeze(-1) * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.rope.magnitude, angles.sin() * self.rope.magnitude

    def features(self, output: Any) -> Tensor:
        """Return the draft's input, [B, T, F], from transformers' output of the target with all hidden states: the
        captured layers, or else the final states."""
        captured = [output.hidden_states[layer] for layer in self._capture]
        return torch.cat(captured, dim=-1) if captured else output.last_hidden_state

    @abstractmethod
    def unroll(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        """Return the recurrent state of each step, `num_steps` tensors [B, T, H].

        embeddings: [B, T, H], the target's embedding of token n in row n.
        captured: [B, T, F], the target's features of position n.
        Rows n > T - s - 2 of step s read past the sequence and are meaningless.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [.., draft vocabulary] logits of recurrent states [.., H]; the target's, in the dtype of its head, if
        the draft has no head of its own."""
        head = self._target_head[0]
        logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
        return logits

    @abstractmethod
    def batch_loss(
        self,
        model: nn.Module,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary,
        batch: Batch,
        unrolling: Unrolling,
    ) -> Tensor:
        """Return a batch's loss, a float32 scalar. model: this draft, wrapped if there are several processes."""

    def proposals(self, embeddings: Tensor, captured: Tensor, tokens: Tensor, num_steps: int) -> list[Tensor]:
        """Return what each step drafts after the text's own tokens, [B, T] int64 ids of the draft's vocabulary.
        tokens: [B, T] int64; others as for `unroll`."""
        return [self.logits(states).argmax(-1) for states in self.unroll(embeddings, captured, num_steps)]


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a draft may propose.

    target_ids: [draft_vocab] int64, ascending; the target token that each draft token stands for.
    t2d: [target_vocab] bool, true for those target tokens.
    """

    target_ids: Tensor
    t2d: Tensor

    @classmethod
    def of(cls, target_ids: Tensor, target_vocab_size: int) -> DraftVocabulary:
        """Return the vocabulary of these target tokens."""
        t2d = torch.zeros(target_vocab_size, dtype=torch.bool)
        t2d[target_ids] = True
        return cls(target_ids, t2d)

    @classmethod
    def whole(cls, target: PreTrainedModel) -> DraftVocabulary:
        """Return all of the target's tokens, on its device."""
        size = target.config.get_text_config().vocab_size
        return cls.of(torch.arange(size), size).to(target.device)

    def d2t(self) -> Tensor:
        """Return offsets [draft_vocab] int64: target_id = i + d2t[i]."""
        return offsets(self.target_ids)

    def to(self, device: torch.device) -> DraftVocabulary:
        return DraftVocabulary(self.target_ids.to(device), self.t2d.to(device))

    def coverage(self, samples: Sequence[Sample]) -> float:
        """Return the share of the samples' answer tokens that the vocabulary has."""
        answers = [token for sample in samples for token in sample.tokens[sample.num_prompt :]]
        return float(self.t2d.cpu()[torch.tensor(answers)].float().mean())


@dataclass(frozen=True)
class Unrolling:
    """The steps and positions that a draft's loss covers.

    num_steps: steps of the loss; step s has the weight step_decay ** s.
    max_anchors: random positions per batch at which blocks start; None for chains, which start at every one.
    random_depths: draw each block's depth from 1 to num_steps; false: all have num_steps.
    """

    num_steps: int
    step_decay: float
    max_anchors: int | None = None
    random_depths: bool = False


class DraftKind(ABC):
    """Builds, saves and loads drafts of one method. Its constructor raises `TrainingError` for a target or arguments
    that do not fit."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        self.arguments, self.target = arguments, target
        if arguments.random_depths and arguments.method not in BLOCK_METHODS:
            raise TrainingError(f"random_depths: is of {', '.join(BLOCK_METHODS)}; leave it out")

    def refuse_head_options(self, method: str) -> None:
        """Raise TrainingError for options of EAGLE-3 heads. method: this kind's name."""
        for name in ("draft_vocab", "intermediate_size", "head_flags"):
            value = vars(self.arguments)[name]
            if value is not None:
                raise TrainingError(f"{name}={value}: is of EAGLE-3 heads; leave it out with --method {method}")

    def unrolling(self) -> Unrolling:
        """Return the options by which its drafts are trained."""
        return Unrolling(self.arguments.ttt_length, self.arguments.ttt_decay)

    @abstractmethod
    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        """Return a new float32 draft on the target's device, and the tokens that it may propose."""

    @abstractmethod
    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        """Write the folder that the engine loads."""

    @abstractmethod
    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        """Return a saved draft, as `build` does."""


@dataclass(frozen=True)
class TargetView:
    """The result of running a frozen target over a batch.

    embeddings: [B, T, H] and captured: [B, T, F], in the target's dtype.
    probabilities: [A, draft_vocab] float32, the target's distribution at position n+1 of each anchor n, over the draft
        vocabulary. in_vocabulary: [A] bool, whether it has the most likely token.
    """

    embeddings: Tensor
    captured: Tensor
    probabilities: Tensor
    in_vocabulary: Tensor


@torch.no_grad()
def run_target(target: PreTrainedModel, tokens: Tensor) -> Any:
    """Return transformers' output for tokens [B, T] padded at their ends, with all hidden states."""
    mask = attention_masks(target.config, tokens.shape[1], tokens.device)
    return target.base_model(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)


@torch.no_grad()
def view_target(target: PreTrainedModel, batch: Batch, head: TrainedDraft, vocabulary: DraftVocabulary) -> TargetView:
    """Run the frozen target over the batch; return the draft's inputs and training targets."""
    output = run_target(target, batch.tokens)
    next_states = output.last_hidden_state.flatten(0, 1)[batch.anchors + 1]
    logits = target.get_output_embeddings()(next_states).float()
    return TargetView(
        embeddings=target.get_input_embeddings()(batch.tokens),
        captured=head.features(output),
        probabilities=torch.softmax(logits[:, vocabulary.target_ids], dim=-1),
        in_vocabulary=vocabulary.t2d[logits.argmax(-1)],
    )


def train_draft(
    head: TrainedDraft,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary,
    samples: Sequence[Sample],
    held: Sequence[Sample],
    options: FitArguments,
    unrolling: Unrolling,
) -> list[float]:
    """Train the head in place with the loss that `unrolling` describes, and return the logged losses. held: samples to
    measure acceptance on."""
    target.eval().requires_grad_(False)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return head.batch_loss(model, target, vocabulary, batch, unrolling)

    def evaluate() -> dict[str, float]:
        return measure_acceptance(head, target, vocabulary, held, unrolling.num_steps, options.batch_tokens).report()

    return fit(head, samples, loss_of, options, title="draft", evaluate=evaluate if held else None)


@dataclass
class AcceptanceTally:
    """Counts of rounds and, by depth, of verified (`offered`) and accepted draft tokens."""

    offered: list[int]
    accepted: list[int]
    num_rounds: int = 0

    @classmethod
    def empty(cls, depth: int) -> AcceptanceTally:
        return cls([0] * depth, [0] * depth)

    def acceptance_length(self) -> float:
        """Mean tokens per round: 1 + accepted / rounds."""
        return 1 + sum(self.accepted) / max(self.num_rounds, 1)

    def per_depth(self) -> list[float]:
        """Share accepted at each depth among the rounds whose earlier depths were accepted."""
        return [accepted / max(offered, 1) for accepted, offered in zip(self.accepted, self.offered, strict=True)]

    def report(self) -> dict[str, float]:
        """Return the figures by name: acceptance length, then each depth's share."""
        depths = {f"depth_{depth}": share for depth, share in enumerate(self.per_depth(), start=1)}
        return {"acceptance_length": self.acceptance_length(), **depths}


def add_rounds(tally: AcceptanceTally, matches: Sequence[Sequence[bool]], num_prompt: int, length: int) -> None:
    """Simulate the rounds of one sequence and add them to the tally.

    matches: `matches[s][n]` says whether the draft anchored at position n proposes, as its step s, token n + s + 2.

    Greedy verification emits the target's own text. Step s counts only if the steps before it matched, and then its
    inputs are the text's tokens, so teacher forcing gives the exact acceptance. The first round's bonus token is the
    answer's first token. A round accepts consecutive matches, up to the tally's depth and the text's end.
    """
    depth = len(tally.offered)
    anchor = num_prompt - 1
    while anchor + 2 < length:
        run = 0
        while run < depth and anchor + run + 2 < length:
            tally.offered[run] += 1
            if not matches[run][anchor]:
                break
            tally.accepted[run] += 1
            run += 1
        tally.num_rounds += 1
        anchor += run + 1


@torch.no_grad()
def measure_acceptance(
    head: TrainedDraft,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary,
    samples: Sequence[Sample],
    depth: int,
    batch_tokens: int,
) -> AcceptanceTally:
    """Simulate greedy chains of `depth` draft tokens over the target's own greedy answers."""
    tally = AcceptanceTally.empty(depth)
    for indices in plan_batches([len(sample.tokens) for sample in samples], batch_tokens, 0):
        batch = collate([samples[i] for i in indices]).to(target.device)
        view = view_target(target, batch, head, vocabulary)
        matches = []
        proposals = head.proposals(view.embeddings.float(), view.captured.float(), batch.tokens, depth)
        for step, ids in enumerate(proposals):
            matches.append((vocabulary.target_ids[ids] == batch.tokens.roll(-(step + 2), dims=1)).tolist())
        for row, index in enumerate(indices):
            own = [match[row] for match in matches]
            add_rounds(tally, own, samples[index].num_prompt, len(samples[index].tokens))
    return tally
