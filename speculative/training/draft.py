"""`TrainedDraft`, the interface by which a draft is trained; and the folders that drafts and checkpoints of a training
are saved in."""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from aerie.speculative.config import BLOCK_METHODS
from aerie.speculative.drafts.eagle3_config import offsets
from aerie.speculative.drafts.method import DraftMethod
from aerie.speculative.training import TrainingError
from aerie.speculative.training.samples import Batch, Sample
from aerie.workers.layers.rotary import frequencies
from aerie.workers.models.deepseek import DeepseekConfig
from aerie.workers.models.llama import LlamaConfig
from aerie.workers.models.registry import family_of

MethodT = TypeVar("MethodT", bound=DraftMethod)


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
        """Return [.., draft vocabulary] logits of recurrent states [.., H]. A draft without a head uses the target's,
        in that head's dtype."""
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
            raise TrainingError(f"random_depths: is only for {', '.join(BLOCK_METHODS)}; leave it out")
        if arguments.causal and arguments.method not in BLOCK_METHODS:
            raise TrainingError(f"causal: is only for {', '.join(BLOCK_METHODS)}; leave it out")

    def refuse_head_options(self, method: str, allowed: Sequence[str] = ()) -> None:
        """Raise TrainingError for options of EAGLE-3 heads but those allowed. method: this kind's name."""
        for name in sorted({"draft_vocab", "intermediate_size", "head_flags"}.difference(allowed)):
            value = vars(self.arguments)[name]
            if value is not None:
                raise TrainingError(f"{name}={value}: is only for EAGLE-3 heads; leave it out with --method {method}")

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


def head_config(target: PreTrainedModel, model_types: Sequence[str]) -> dict[str, Any]:
    """Return what the config.json of a new head shares with its target's. Raises `TrainingError` for a target whose
    model_type is not among `model_types`."""
    config = target.config
    if config.model_type not in model_types:
        raise TrainingError(f"target: model_type={config.model_type!r} is not supported; use {', '.join(model_types)}")
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    return {
        **{name: getattr(config, name) for name in (*same, "max_position_embeddings", "vocab_size")},
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def read_head(kind: type[MethodT], config: Mapping[str, Any], target: PreTrainedModel, folder: Path) -> MethodT:
    """Return the engine's description of the head with this config.json in `folder`. Raises `TrainingError` if the
    engine refuses it."""
    architecture = type(target).__name__
    raw = {**target.config.to_dict(), "architectures": [architecture]}
    try:
        return kind.read(str(folder), config, family_of(architecture, "target").read_config(raw, "target"))
    except ValueError as error:
        raise TrainingError(str(error)) from None


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], float32: tuple[str, ...] = ()
) -> None:
    """Write `config.json` and `model.safetensors`, in bfloat16; tensors whose name ends with one of `float32` stay
    float32."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if name.endswith(float32) else torch.bfloat16
        cpu = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        saved[name] = cpu.contiguous().clone()  # safetensors refuses tensors that share memory
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    make_readable(folder)


def token_ids(owner: PreTrainedTokenizerBase | GenerationConfig) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text, by their names in config.json."""
    return {name: getattr(owner, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def make_readable(folder: Path) -> None:
    """Give the weights the permissions of the configuration beside them, because safetensors (0.8) writes files that
    only their owner can read."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*config.json")), weights)


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints in `output`, oldest first. The state file is written last, so a folder without
    one was left by a killed process."""
    by_step = {
        path.parent.name.partition("-")[2]: path.parent for path in output.glob("checkpoint-*/trainer_state.json")
    }
    return [by_step[step] for step in sorted(filter(str.isdigit, by_step), key=int)]


def checkpoint_to_resume(output: Path, settings: Mapping[str, Any], max_steps: int, callback: str) -> str:
    """Return the newest checkpoint in `output`. Raises `TrainingError` if it cannot be read, has other settings, or is
    after max_steps. callback: name of the callback that saves the settings."""
    checkpoint = checkpoints(output)[-1]
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        saved, done = state["stateful_callbacks"][callback]["attributes"]["settings"], state["global_step"]
    except (OSError, ValueError, KeyError):
        raise TrainingError(f"resume: {checkpoint} cannot be read; delete it and start without --resume") from None
    for name, value in settings.items():
        if saved.get(name) != value:
            raise TrainingError(
                f"{name}={value}: the checkpoint {checkpoint} was made with {saved.get(name)}; give the same, or "
                "start without --resume in a new output folder"
            )
    if done > max_steps:
        raise TrainingError(
            f"steps={max_steps}: the training in {output} has done {done}; give more --steps or --epochs"
        )
    return str(checkpoint)


@contextlib.contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Raise `TrainingError` instead of transformers' exceptions about a checkpoint that does not fit."""
    try:
        yield
    except (EOFError, KeyError, OSError, RuntimeError, ValueError, pickle.UnpicklingError, SafetensorError):
        raise TrainingError(
            f"resume: {checkpoint} cannot be read or holds a model of other dimensions; give the rows that it was "
            "trained on, or start without --resume in a new output folder"
        ) from None
