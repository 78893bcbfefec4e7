"""Saves and restores a training so that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speculative.training.errors import TrainingError


@dataclass(frozen=True)
class Checkpoint:
    """Where one training keeps its state, and `options`: what must be the same for a resume to be the same training."""

    path: Path
    options: dict[str, Any]

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
        """Writes the state after `step` steps; a crash while writing leaves the former file whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": step,
            "options": self.options,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "losses": losses,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[float]]:
        """Loads the state into model, optimizer and the RNGs; returns the steps done and their losses.

        Raises `TrainingError` when there is no checkpoint, it cannot be read, or it belongs to a training with other
        options.
        """
        if not self.path.is_file():
            raise TrainingError(f"resume: {self.path} does not exist; start without --resume")
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):
            raise TrainingError(f"resume: {self.path} cannot be read; delete it and start without --resume") from None
        for name, value in self.options.items():
            if state["options"].get(name) != value:
                was = state["options"].get(name)
                raise TrainingError(
                    f"{name}={value}: the checkpoint {self.path} was made with {was}; "
                    f"give the same, or start without --resume in a new output folder"
                )
        try:
            model.load_state_dict(state["model"])
        except RuntimeError:
            raise TrainingError(
                f"resume: {self.path} holds a model of other dimensions; give the rows that it was trained on, or "
                "start without --resume in a new output folder"
            ) from None
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        return int(state["step"]), list(state["losses"])

    def discard(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)
