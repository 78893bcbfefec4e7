"""Finds the complete checkpoints of a training, and checks the one that a resume continues."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from speculative.training import TrainingError


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints in `output`, oldest first. The state file is written last, so a folder without
    one was left by a killed process."""
    found = {path.parent.name.partition("-")[2]: path.parent for path in output.glob("checkpoint-*/trainer_state.json")}
    return [found[step] for step in sorted(filter(str.isdigit, found), key=int)]


def check_output(output: Path, resume: bool) -> None:
    """Raise `TrainingError` if the output is not a writable folder, has a checkpoint without `resume`, or has none with
    it."""
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise TrainingError(f"output={output}: {existing} is not a writable folder; choose another")
    found = checkpoints(output)
    if found and not resume:
        raise TrainingError(
            f"output={output}: holds a training's checkpoint; add --resume to continue it (after its end with more "
            f"--steps or --epochs), delete {found[-1].name}, or choose another folder"
        )
    if resume and not found:
        raise TrainingError(f"resume: {output} holds no checkpoint; start without --resume")


def checkpoint_to_resume(output: Path, settings: Mapping[str, Any], max_steps: int, callback: str) -> Path:
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
            f"steps={max_steps}: the training in {checkpoint.parent} has done {done}; give more --steps or --epochs"
        )
    return checkpoint


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
