"""Trains a model with transformers' `Trainer`: AdamW, warm-up and cosine, clipping, mixed precision, checkpoints and
resume, and several GPUs under `torchrun`.

Batches have similar numbers of tokens, not of samples, so the data set's items are whole batches
(`samples.plan_steps`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback

from aerie.kernels.capability import Capability
from aerie.speculative.training import TrainingError, TrainingInterrupted
from aerie.speculative.training.draft import checkpoint_to_resume, checkpoints, reading
from aerie.speculative.training.layers import GraphedStep
from aerie.speculative.training.samples import Batch, Sample, collate, plan_steps
from aerie.workers.interrupt import interrupts_between_steps

LossOf = Callable[[nn.Module, Batch], Tensor]
_FINAL_RATE = 0.01  # learning rate at the end, as a fraction of the peak


@dataclass
class FitArguments(TrainingArguments):  # type: ignore[misc]
    """transformers' arguments with defaults for drafts, for one process on one device.

    own_device: the device; under `torchrun` each GPU process has its own.
    batch_tokens: tokens of a process's batch, including padding.
    graphs: replay each batch shape from a CUDA graph; one process on a GPU only.
    resume: continue the newest checkpoint of `output_dir`.
    max_seconds: time limit of optimisation and measuring; the optimisation then ends as after the last step. None: no
        limit.
    num_measurements: times that the caller evaluates afterwards, which `max_seconds` covers too.
    settings: options that a resume must repeat; saved in the checkpoint.

    `max_steps` overrides `num_train_epochs`. `learning_rate` is the peak; it falls to a hundredth at the end.
    """

    own_device: torch.device = torch.device("cpu")
    batch_tokens: int = 8192
    graphs: bool = False
    resume: bool = False
    max_seconds: float | None = None
    num_measurements: int = 0
    progress: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    per_device_train_batch_size: int = 1
    train_sampling_strategy: str = "sequential"
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    save_total_limit: int = 1
    logging_steps: int = 20  # reading a loss waits for the device
    logging_first_step: bool = True
    logging_nan_inf_filter: bool = False
    log_level: str = "error"
    disable_tqdm: bool = True  # for `_Session`, which shows the loss in the bar
    use_cache: bool = True  # else the config.json of a saved target would say false
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        self.use_cpu = Capability.of(self.own_device).shares_host_memory
        self.dataloader_pin_memory = not self.use_cpu
        self.accelerator_config = {"non_blocking": not self.use_cpu}  # else each copy would wait for the steps before
        super().__post_init__()
        self.settings = self.settings | {"processes": self.world_size}  # each process has its share of the batches
        if not self.use_cpu:
            torch.cuda.set_device(self.device)

    @property
    def device(self) -> torch.device:
        by_rank: torch.device = self._setup_devices
        return self.own_device if self.world_size == 1 else by_rank

    @property
    def n_gpu(self) -> int:
        """Return 1; the base class would use every visible GPU."""
        return 1


def fit(
    model: nn.Module,
    samples: Sequence[Sample],
    loss_of: LossOf,
    arguments: FitArguments,
    *,
    title: str,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> list[float]:
    """Train the model in place on the samples. Return the logged losses, including those before a resume.

    loss_of: scalar loss of a batch; the first argument is the model, wrapped if there are several processes.
    evaluate: figures to print every `eval_steps` steps and at the end.

    A checkpoint is saved every `save_steps` steps, at the end, and at Ctrl-C. A resume with more steps follows the
    learning rate of the longer training.
    Raises `TrainingError` for a loss that is not finite and for a checkpoint that does not fit, `TrainingInterrupted`
    after Ctrl-C.
    """
    steps = arguments.max_steps * arguments.world_size if arguments.max_steps > 0 else None
    lengths = [len(sample.tokens) for sample in samples]
    plan = plan_steps(lengths, arguments.batch_tokens, arguments.seed, epochs=arguments.num_train_epochs, steps=steps)
    arguments.max_steps = -(-len(plan) // arguments.world_size)
    arguments.warmup_steps = min(arguments.warmup_steps, arguments.max_steps - 1)
    arguments.eval_strategy = "no" if evaluate is None else "steps"
    graphs = arguments.graphs and Capability.of(arguments.device).captures_graphs and arguments.world_size == 1
    full_tokens = arguments.batch_tokens if graphs else None
    output = Path(arguments.output_dir)
    checkpoint = None
    if arguments.resume:
        checkpoint = checkpoint_to_resume(output, arguments.settings, arguments.max_steps, _Session.__name__)
    with interrupts_between_steps() as is_interrupted, contextlib.closing(_Session(title, arguments)) as session:
        session.is_interrupted = is_interrupted
        trainer = _StepTrainer(
            loss_of,
            evaluate,
            session.limit,
            model=model,
            args=arguments,
            train_dataset=plan,
            eval_dataset=[],
            data_collator=lambda items: vars(collate([samples[i] for i in items[0]], full_tokens=full_tokens)),
            callbacks=[session],
        )
        trainer.remove_callback(PrinterCallback)
        if evaluate is not None:
            session.reserve(evaluate)
        trainer.graphs = GraphedStep(model, trainer.compute_loss) if graphs else None
        trainer.train(resume_from_checkpoint=checkpoint)
    done = trainer.state.global_step
    if done < arguments.max_steps and session.limit.share() < 1:
        raise TrainingInterrupted(
            f"{title}: stopped after step {done} of {arguments.max_steps}; {checkpoints(output)[-1]} is its "
            "checkpoint: repeat the command with --resume to continue"
        )
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class _StepTrainer(Trainer):  # type: ignore[misc]
    """A Trainer with our loss, our evaluation, and steps replayed from CUDA graphs."""

    control: Any
    graphs: GraphedStep | None

    def __init__(
        self, loss_of: LossOf, figures: Callable[[], dict[str, float]] | None, limit: TimeLimit, **others: Any
    ) -> None:
        self.loss_of, self.figures, self.limit = loss_of, figures, limit
        super().__init__(**others)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        return self.loss_of(model, Batch(**inputs))

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        if self.graphs is None:
            loss: Tensor = super().training_step(model, inputs, *others)
            return loss
        model.train()
        return self.graphs(inputs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        warmup = self.args.warmup_steps
        self.lr_scheduler = LambdaLR(optimizer, lambda step: self.limit.learning_rate(step, warmup, num_training_steps))
        return self.lr_scheduler

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self.figures is not None
        self.model.eval()
        figures = self.figures()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the matrices; norms and biases have no weight decay."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)


@dataclass(eq=False)
class _Session(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Progress bar, Ctrl-C, the check of the loss, and the settings in the checkpoint."""

    title: str
    arguments: FitArguments
    is_interrupted: Callable[[], bool] = bool
    bar: Any = None

    def __post_init__(self) -> None:
        self.limit = TimeLimit(self.arguments.max_seconds)
        self.shown: dict[str, str] = {}  # beside the bar

    def reserve(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Evaluate the untrained draft, and keep as much time as the caller's measurements will take."""
        if self.limit.seconds is None:
            return
        started = self.limit.clock()
        evaluate()
        self.limit.reserved = self.arguments.num_measurements * (self.limit.clock() - started)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"settings": self.arguments.settings}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # otherwise a resume keeps the intervals of its checkpoint
        hidden = not (args.progress and state.is_world_process_zero)
        shown = {"desc": self.title, "disable": hidden, "mininterval": 2.0}
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, **shown)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()
        if (left_s := self.limit.left_s()) is not None:
            self.shown["left"] = f"{left_s:.0f} s"
            self.bar.set_postfix(self.shown, refresh=False)
        if self.limit.share() >= 1:
            control.should_log = control.should_training_stop = True
        if self.is_interrupted():
            control.should_save = control.should_training_stop = True
        if control.should_save:
            control.should_log = True  # a checkpoint after a loss that is not finite would be useless

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        loss = logs.get("loss", 0.0)
        if not math.isfinite(loss):
            raise TrainingError(f"loss: not finite near step {state.global_step}; lower --lr or use --dtype float32")
        if "loss" in logs:
            self.shown["loss"] = f"{loss:.4f}"
            self.bar.set_postfix(self.shown, refresh=False)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.shown |= {name: f"{value:.2f}" for name, value in metrics.items() if name == "acceptance_length"}
        if state.is_world_process_zero:
            figures = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            tqdm.write(f"{self.title}: step {state.global_step}/{state.max_steps} {figures}")

    def close(self) -> None:
        """End the bar's line, also after an error."""
        if self.bar is not None:
            self.bar.close()


@dataclass
class TimeLimit:
    """A time limit, and the learning rate under it. seconds: None for no limit. clock: returns seconds. reserved:
    seconds at the end for something else."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    reserved: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock()

    def share(self) -> float:
        """Return the fraction of the time that has passed, 0 without a limit."""
        if self.seconds is None:
            return 0.0
        return (self.clock() - self.started) / max(self.seconds - self.reserved, 1e-9)

    def left_s(self) -> float | None:
        """Return the seconds that remain, None without a limit."""
        if self.seconds is None:
            return None
        return max(0.0, self.seconds - self.reserved - (self.clock() - self.started))

    def learning_rate(self, step: int, warmup_steps: int, max_steps: int) -> float:
        """Return the learning rate of a step as a fraction of the peak: linear warm-up, then a cosine over steps or
        time, whichever ends first."""
        if step < warmup_steps:
            return step / warmup_steps
        done = max((step - warmup_steps) / max(1, max_steps - warmup_steps), self.share())
        return _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2
