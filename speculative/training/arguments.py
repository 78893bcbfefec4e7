"""What the arguments of the training commands must be, and what follows from them: device, dtype, loop, checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch

from speculative.training.checkpoint import Checkpoint
from speculative.training.errors import TrainingError
from speculative.training.loop import LoopOptions
from speculative.training.samples import LENGTH_STEP

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_LEAST = {
    **{"batch_tokens": LENGTH_STEP, "max_length": 2, "steps": 1, "warmup_steps": 0, "weight_decay": 0},
    **{"checkpoint_every": 1, "eval_every": 1},
}
# These change nothing of what a step computes, or how many there are, so a resume may differ in them.
_FREE_OPTIONS = (
    *("run", "resume", "output", "device", "graphs", "generate_batch", "steps", "epochs", "keep_checkpoint"),
    *("checkpoint_every", "eval_every", "preview", "measure", "measure_rows", "measure_depths"),
)


def check_arguments(arguments: argparse.Namespace, least: dict[str, int]) -> None:
    """Raises `TrainingError` for a number under its least value, or a share that is none."""
    given = vars(arguments)
    least = _LEAST | least
    for name, value in least.items():
        if given[name] is not None and given[name] < value:
            raise TrainingError(f"{name}={given[name]}: must be at least {value}")
    for name in ("epochs", "lr"):
        if not given[name] > 0:
            raise TrainingError(f"{name}={given[name]}: must be above 0")
    for name, example in (("val_fraction", 0.03), ("dropout", 0.1)):
        if not 0 <= given.get(name, 0) < 1:
            raise TrainingError(f"{name}={given[name]}: must be at least 0 and under 1; try {example}")


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU when there is one. Raises `TrainingError` for an absent GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"device={name}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"device={name}: no CUDA device here; use --device cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; `auto` is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def loop_options(arguments: argparse.Namespace, device: torch.device) -> LoopOptions:
    """The arguments that the shared loop takes."""
    return LoopOptions(
        lr=arguments.lr,
        warmup_steps=arguments.warmup_steps,
        weight_decay=arguments.weight_decay,
        max_grad_norm=1.0,
        checkpoint_every=arguments.checkpoint_every,
        eval_every=arguments.eval_every,
        graphs=arguments.graphs and device.type == "cuda",
    )


def open_checkpoint(arguments: argparse.Namespace) -> Checkpoint:
    """The output folder's checkpoint. Raises `TrainingError` for an output that is no folder, for a checkpoint there
    without `--resume`, and for `--resume` without a checkpoint."""
    places = (arguments.output, *arguments.output.absolute().parents)
    existing = next(place for place in places if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise TrainingError(f"output={arguments.output}: {existing} is no folder that can be written; choose another")
    given: dict[str, Any] = {k: v for k, v in vars(arguments).items() if k not in _FREE_OPTIONS}
    options = json.loads(json.dumps(given, default=str))
    checkpoint = Checkpoint(arguments.output / "checkpoint.pt", options)
    if checkpoint.path.exists() and not arguments.resume:
        raise TrainingError(
            f"output={arguments.output}: holds a training's checkpoint; add --resume to go on with it (after its end "
            "with more --steps or --epochs), delete checkpoint.pt, or choose another folder"
        )
    if arguments.resume and not checkpoint.path.exists():
        raise TrainingError(f"resume: {checkpoint.path} does not exist; start without --resume")
    return checkpoint
