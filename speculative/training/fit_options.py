"""Derives the trainer's arguments from the command's."""

from __future__ import annotations

import argparse
import json

import torch

from attention.capability import Capability
from speculative.training import TrainingError
from speculative.training.checkpoints import check_output
from speculative.training.trainer import FitArguments

# Options that a resume may change, because they change only the number of steps.
_FREE_OPTIONS = (
    *("run", "resume", "output", "device", "graphs", "generate_batch", "steps", "epochs", "keep_checkpoint"),
    *("checkpoint_every", "eval_every", "minutes", "measure", "measure_rows", "measure_depths"),
)


def fit_arguments(arguments: argparse.Namespace) -> FitArguments:
    """Return the trainer's arguments. Raises `TrainingError` for a device or an output that cannot be used."""
    device = choose_device(arguments.device)
    check_output(arguments.output, arguments.resume)
    settings = {name: value for name, value in vars(arguments).items() if name not in _FREE_OPTIONS}
    return FitArguments(
        output_dir=str(arguments.output),
        own_device=device,
        bf16=arguments.dtype == "bfloat16"
        or (arguments.dtype == "auto" and not Capability.of(device).shares_host_memory),
        max_steps=arguments.steps or -1,
        num_train_epochs=arguments.epochs,
        batch_tokens=arguments.batch_tokens,
        learning_rate=arguments.lr,
        warmup_steps=arguments.warmup_steps,
        weight_decay=arguments.weight_decay,
        seed=arguments.seed,
        graphs=arguments.graphs,
        save_steps=arguments.checkpoint_every,
        eval_steps=arguments.eval_every,
        resume=arguments.resume,
        max_seconds=None if arguments.minutes is None else 60 * arguments.minutes,
        settings=json.loads(json.dumps(settings, default=str)),
    )


def choose_device(name: str) -> torch.device:
    """Return the device of that name, with its index; `auto` is the GPU if there is one. Raises `TrainingError` for an
    absent GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"device={name}: {str(error).splitlines()[0]}") from None
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise TrainingError(f"device={name}: no such CUDA device here; use --device cpu")
    return torch.device("cuda", device.index or 0)
