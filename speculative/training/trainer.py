"""Trains a model with transformers' `Trainer`: AdamW, warm-up and cosine, clipping, mixed precision, checkpoints and
resume, and several GPUs under `torchrun`.

The target and draft trainings call `fit`. A batch holds about the same number of tokens, not of samples, so the data
set's items are whole batches (`samples.plan_steps`).
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback

from speculative.training import TrainingError, TrainingInterrupted
from speculative.training.graphs import GraphedStep
from speculative.training.samples import Batch, Sample, collate, plan_steps
from workers.interrupt import interrupts_between_steps

LossOf = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How `fit` trains.

    output: folder for the checkpoints.
    steps: optimizer steps; None takes `epochs` passes over the samples.
    batch_tokens: tokens of one process's batch, padding included.
    lr: peak learning rate, after `warmup_steps`; it falls on a cosine to a hundredth of itself.
    dtype: bfloat16 runs the model's forward under autocast; weights and optimizer stay float32.
    graphs: replay each batch shape from a CUDA graph; one process only.
    log_every: steps per logged loss, which is their mean. Reading a loss waits for the device.
    resume: continue the newest checkpoint of `output`.
    settings: what a resume must repeat; kept in the checkpoint.
    """

    output: Path
    device: torch.device
    dtype: torch.dtype = torch.float32
    epochs: float = 1.0
    steps: int | None = None
    batch_tokens: int
    lr: float
    warmup_steps: int
    weight_decay: float = 0.1
    seed: int = 0
    graphs: bool = False
    checkpoint_every: int = 500
    eval_every: int = 500
    log_every: int = 20
    resume: bool = False
    progress: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


def checkpoints(output: Path) -> list[Path]:
    """The whole checkpoints in `output`, oldest first. The state file is written last, so a folder without one is the
    remainder of a killed process."""
    found = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    numbered = {int(path.name.partition("-")[2]): path for path in found if path.name.partition("-")[2].isdigit()}
    return [numbered[step] for step in sorted(numbered)]


def check_output(output: Path, resume: bool) -> None:
    """Raises `TrainingError` for an output that is no writable folder, a checkpoint in it without `resume`, and
    `resume` without a checkpoint."""
    existing = next(place for place in (output, *output.absolute().parents) if place.exists())
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


def fit(
    model: nn.Module,
    samples: Sequence[Sample],
    loss_of: LossOf,
    options: FitOptions,
    *,
    title: str,
    evaluate: Callable[[], dict[str, float]] | None = None,
    after_step: Callable[[], None] | None = None,
) -> list[float]:
    """Train the model in place on the samples and return the logged losses, those before a resume included.

    loss_of: scalar loss of a batch; the first argument is the model, wrapped if there are several processes.
    evaluate: figures to print every `eval_every` steps and at the end.
    after_step: called after each optimizer step, for state without a gradient.

    A checkpoint is kept every `checkpoint_every` steps, at the end, and at Ctrl-C. A resume with more steps follows the
    learning rate of the longer training.
    Raises `TrainingError` for a loss that is not finite and for a checkpoint that does not fit, `TrainingInterrupted`
    after Ctrl-C.
    """
    num_processes = PartialState(cpu=options.device.type == "cpu").num_processes
    lengths = [len(sample.tokens) for sample in samples]
    steps = None if options.steps is None else options.steps * num_processes
    plan = plan_steps(lengths, options.batch_tokens, options.seed, epochs=options.epochs, steps=steps)
    num_steps = -(-len(plan) // num_processes)
    checkpoint = _checkpoint_to_resume(options, num_steps) if options.resume else None
    graphs = options.graphs and options.device.type == "cuda" and num_processes == 1
    full_tokens = options.batch_tokens if graphs else None
    with interrupts_between_steps() as is_interrupted:
        trainer = _StepTrainer(
            loss_of,
            evaluate,
            model=model,
            args=_arguments(options, num_steps, evaluates=evaluate is not None),
            train_dataset=_Batches(samples, plan, full_tokens),
            eval_dataset=[],
            data_collator=operator.itemgetter(0),
            callbacks=[_Session(title, options, is_interrupted, after_step)],
        )
        if graphs:
            trainer.graphs = GraphedStep(model, trainer.compute_loss)
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    done = trainer.state.global_step
    if done < num_steps:
        raise TrainingInterrupted(
            f"{title}: stopped after step {done} of {num_steps}; {checkpoints(options.output)[-1]} keeps it: the same "
            "command with --resume continues"
        )
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _arguments(options: FitOptions, num_steps: int, evaluates: bool) -> TrainingArguments:
    on_gpu = options.device.type == "cuda"
    arguments = _Arguments(
        output_dir=str(options.output),
        max_steps=num_steps,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        learning_rate=options.lr,
        warmup_steps=min(options.warmup_steps, num_steps - 1),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.01},
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=options.dtype == torch.bfloat16,
        seed=options.seed,
        use_cpu=not on_gpu,
        logging_steps=options.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=options.eval_every,
        save_steps=options.checkpoint_every,
        save_total_limit=1,
        report_to="none",
        log_level="error",
        disable_tqdm=True,  # for `_Session`, which shows the loss in the bar
        use_cache=True,  # else the saved config.json of a target would say false
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=False,
        accelerator_config={"non_blocking": on_gpu},  # else each batch's copy would wait for the steps before it
    )
    arguments.chosen = options.device
    if on_gpu:
        torch.cuda.set_device(options.device)
    return arguments


class _Arguments(TrainingArguments):  # type: ignore[misc]
    """Arguments of one process on one device; the base class takes every visible GPU and starts at the first."""

    chosen = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        _ = self._setup_devices  # starts the process group
        return self.chosen

    @property
    def n_gpu(self) -> int:
        return 1


class _Batches(Dataset[dict[str, Tensor]]):
    """The batches of a plan, collated when they are read."""

    def __init__(self, samples: Sequence[Sample], plan: Sequence[list[int]], full_tokens: int | None) -> None:
        self.samples, self.plan, self.full_tokens = samples, plan, full_tokens

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return vars(collate([self.samples[i] for i in self.plan[index]], full_tokens=self.full_tokens))


class _StepTrainer(Trainer):  # type: ignore[misc]
    """A Trainer with our loss, our evaluation, and steps replayed from CUDA graphs."""

    control: Any

    def __init__(self, loss_of: LossOf, figures: Callable[[], dict[str, float]] | None, **others: Any) -> None:
        self.loss_of, self.figures = loss_of, figures
        self.graphs: GraphedStep | None = None
        super().__init__(**others)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        return self.loss_of(model, Batch(**inputs))

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        if self.graphs is None:
            loss: Tensor = super().training_step(model, inputs, *others)
            return loss
        model.train()
        return self.graphs(inputs)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self.figures is not None
        self.model.eval()
        figures = self.figures()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay, norms and biases do not."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        return 0  # unused, and counting them takes time in every step

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except (OSError, RuntimeError, ValueError, SafetensorError):
            raise TrainingError(
                f"resume: {resume_from_checkpoint} cannot be read or holds a model of other dimensions; give the rows "
                "that it was trained on, or start without --resume in a new output folder"
            ) from None


class _Session(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Progress bar, Ctrl-C, the check of the loss, and the settings in the checkpoint."""

    def __init__(
        self,
        title: str,
        options: FitOptions,
        is_interrupted: Callable[[], bool],
        after_step: Callable[[], None] | None,
    ) -> None:
        self.title, self.options = title, options
        self.is_interrupted, self.after_step = is_interrupted, after_step

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"settings": dict(self.options.settings)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # else a resume keeps the intervals of its checkpoint
        shown = self.options.progress and state.is_world_process_zero
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, desc=self.title, disable=not shown, mininterval=2.0
        )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.after_step is not None:
            self.after_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()
        if self.is_interrupted():
            control.should_save = control.should_training_stop = True
        if control.should_save:
            control.should_log = True  # a checkpoint after a loss that is not finite would be useless

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise TrainingError(f"loss: not finite near step {state.global_step}; lower --lr or use --dtype float32")
        self.bar.set_postfix(loss=f"{logs['loss']:.4f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero:
            figures = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            tqdm.write(f"{self.title}: step {state.global_step}/{state.max_steps} {figures}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()


def _checkpoint_to_resume(options: FitOptions, num_steps: int) -> Path:
    check_output(options.output, resume=True)
    checkpoint = checkpoints(options.output)[-1]
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        settings, done = state["stateful_callbacks"][_Session.__name__]["attributes"]["settings"], state["global_step"]
    except (OSError, ValueError, KeyError):
        raise TrainingError(f"resume: {checkpoint} cannot be read; delete it and start without --resume") from None
    for name, value in options.settings.items():
        if settings.get(name) != value:
            raise TrainingError(
                f"{name}={value}: the checkpoint {checkpoint} was made with {settings.get(name)}; give the same, or "
                "start without --resume in a new output folder"
            )
    if done > num_steps:
        raise TrainingError(
            f"steps={num_steps}: the training in {options.output} has done {done}; give more with --steps or --epochs"
        )
    return checkpoint
