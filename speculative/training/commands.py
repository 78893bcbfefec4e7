"""`aerie train-draft`: from parsed arguments to a saved draft. Under `torchrun` each process trains on its share of the
batches; the first one regenerates, saves, measures and prints. A target in a GGUF file is dequantised to transformers'
module (`gguf_target`)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from aerie.kernels.capability import Capability
from aerie.speculative.training import TrainingError, TrainingInterrupted
from aerie.speculative.training.adapters import AdapterKind, merge_adapter
from aerie.speculative.training.block_kinds import KINDS, BlockKind
from aerie.speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft, Unrolling, checkpoints
from aerie.speculative.training.eagle3 import Eagle3Kind
from aerie.speculative.training.generation import generate_answers, stop_tokens
from aerie.speculative.training.losses import measure_acceptance
from aerie.speculative.training.mtp import MtpKind
from aerie.speculative.training.rows import Conversation, read_conversations, split_validation
from aerie.speculative.training.samples import (
    Batch,
    Sample,
    answer_prompts,
    encode_answers,
    read_samples,
    write_samples,
)
from aerie.speculative.training.trainer import FitArguments, fit
from aerie.workers.models.gguf.tensors import gguf_tensors, is_gguf_folder


def gguf_target(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return the tokenizer and the model of a folder that stands for a GGUF file
    (`aerie.workers.models.gguf.folder`), its weights dequantised to `dtype`. Raises `TrainingError` for an
    architecture that transformers lacks, and for missing tensors."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    kind = getattr(transformers, raw["architectures"][0], None)
    if kind is None:
        raise TrainingError(f"target={folder}: {raw['architectures'][0]} is unknown to transformers; use another model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    raw.setdefault("pad_token_id", tokenizer.pad_token_id)
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(raw))
    tensors = {name: tensor for name, tensor, _ in gguf_tensors(folder, torch.device("cpu"), dense=True)}
    tensors = {name: tensor.to(device, dtype).contiguous() for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    _fill_buffers(model, device)
    tied = set(model.all_tied_weights_keys) if raw.get("tie_word_embeddings") else set()
    if lacking := sorted(set(missing) - tied) or sorted(unexpected):
        raise TrainingError(f"target={folder}: transformers' module and the file differ in {lacking[0]}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.requires_grad_(False)
    return tokenizer, model.to(device).eval()


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what no checkpoint has, the frequencies of rotations: modules with such buffers are built anew."""
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, type(module)(model.config).to(device))


DRAFTS: dict[str, type[DraftKind]] = {"eagle3": Eagle3Kind, "mtp": MtpKind, **dict.fromkeys(KINDS, BlockKind)}

_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)

# Options that a resume may change, because they change only the number of steps.
_FREE_OPTIONS = (
    *("run", "resume", "output", "device", "graphs", "generate_batch", "steps", "epochs", "keep_checkpoint"),
    *("checkpoint_every", "eval_every", "minutes", "measure", "measure_rows", "measure_depths"),
)


def run_train_draft(arguments: argparse.Namespace) -> int:
    """Train and save a draft for `--target`; print its loss and its acceptance by depth. Returns 0."""
    options = fit_arguments(arguments)
    options.num_measurements = len(arguments.measure_depths)
    train, held = split_validation(read_conversations(arguments.data), arguments.val_fraction, arguments.seed)
    tokenizer, target = load_target(arguments.target, options.device, torch.bfloat16 if options.bf16 else torch.float32)
    if arguments.adapter is None and arguments.draft is not None:
        raise TrainingError(f"draft={arguments.draft}: is only for --adapter; leave it out")
    if arguments.adapter is not None:
        merge_adapter(target, arguments.adapter)
    draft = (DRAFTS[arguments.method] if arguments.adapter is None else AdapterKind)(arguments, target)
    with options.main_process_first():
        reuse = arguments.resume or not options.should_save
        samples = training_samples(arguments, target, tokenizer, train, reuse)
    held_samples = greedy_answers(arguments, target, tokenizer, held)
    head, vocabulary = draft.build(samples, sorted(stop_tokens(target, tokenizer)))
    if options.should_save:
        covered = vocabulary.coverage(samples)
        print(f"draft: {len(samples)} answers; its vocabulary covers {covered:.2%} of their tokens")
    try:
        losses = train_draft(head, target, vocabulary, samples, held_samples, options, draft.unrolling())
    except TrainingInterrupted:
        if options.should_save:
            draft.save(head, vocabulary, arguments.output)
        raise
    if options.should_save:
        draft.save(head, vocabulary, arguments.output)
        finish("draft", arguments, losses)
        measure_saved(arguments, draft, target, tokenizer, {"validation": held_samples})
    return 0


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


def finish(title: str, arguments: argparse.Namespace, losses: Sequence[float]) -> None:
    """Remove the checkpoints unless `--keep-checkpoint`; print the last logged loss and the folder."""
    for checkpoint in () if arguments.keep_checkpoint else checkpoints(arguments.output):
        shutil.rmtree(checkpoint)
    print(f"{title}: loss {losses[-1]:.4f} over the last steps; saved to {arguments.output}")


def training_samples(
    arguments: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Conversation],
    reuse: bool,
) -> list[Sample]:
    """Return samples with the rows' own answers or the target's. The target's are saved in the output folder. reuse:
    read them from there, for a resume and for processes after the first."""
    max_length = min(arguments.max_length, target.config.max_position_embeddings)
    if arguments.regenerated is not None:
        return read_regenerated(arguments, max_length)
    if not arguments.regenerate:
        return encode_answers(train, tokenizer, max_length)
    path = arguments.output / "regenerated.jsonl"
    if reuse and path.is_file():
        return read_samples(path)
    prompts = answer_prompts(train, tokenizer)
    samples: list[Sample] = []
    for index, temperature in enumerate(arguments.temperatures):
        samples += generate_answers(
            target,
            tokenizer,
            [prompt for prompt in prompts if len(prompt) + arguments.max_new_tokens <= max_length],
            temperature=temperature,
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.generate_batch,
            seed=arguments.seed + index,
        )
    write_samples(samples, path)
    return samples


def read_regenerated(arguments: argparse.Namespace, max_length: int) -> list[Sample]:
    """Return the samples of `--regenerated`. Raises TrainingError for a missing file, or one without samples that
    fit."""
    path: Path = arguments.regenerated
    if arguments.regenerate or not path.is_file():
        why = "give it or --regenerate, not both" if arguments.regenerate else "no such file; use --regenerate first"
        raise TrainingError(f"regenerated={path}: {why}")
    samples = [sample for sample in read_samples(path) if len(sample.tokens) <= max_length]
    if not samples:
        raise TrainingError(f"regenerated={path}: has no answer of at most max_length={max_length} tokens; raise it")
    return samples


def greedy_answers(
    arguments: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
) -> list[Sample]:
    """Return the target's greedy answers to the first `--measure-rows` prompts. Acceptance is measured on them."""
    return generate_answers(
        target,
        tokenizer,
        answer_prompts(conversations, tokenizer)[: arguments.measure_rows],
        temperature=0.0,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.generate_batch,
        seed=arguments.seed,
    )


def measure_saved(
    arguments: argparse.Namespace,
    draft: DraftKind,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: dict[str, list[Sample]],
) -> None:
    """Print the saved draft's acceptance on the sets and on each of `--measure`."""
    head, vocabulary = draft.load(arguments.output)
    for source in arguments.measure:
        sets[source] = greedy_answers(arguments, target, tokenizer, read_conversations([source]))
    for name, samples in sets.items():
        max_depth = draft.unrolling().num_steps if arguments.method in KINDS else max(arguments.measure_depths)
        for depth in sorted({min(depth, max_depth) for depth in arguments.measure_depths}) if samples else ():
            tally = measure_acceptance(head, target, vocabulary, samples, depth, arguments.batch_tokens)
            figures = " ".join(f"{key} {value:.3f}" for key, value in tally.report().items())
            print(f"draft: {name}, {len(samples)} prompts, greedy chain of {depth}: {figures}")


def load_target(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return the tokenizer and model of a Hugging Face folder, or of one that stands for a GGUF file. Raises what
    `load_model` raises."""
    if is_gguf_folder(folder):
        return gguf_target(folder, device, dtype)
    model = load_model(folder, device, dtype)
    try:
        return AutoTokenizer.from_pretrained(folder), model
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from None


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a Hugging Face folder. Raises `TrainingError` if there is no such folder, or if weights that
    its config.json describes are missing, which transformers would initialise at random."""
    if not (folder / "config.json").is_file():
        raise TrainingError(f"target={folder}: holds no config.json; give the folder of a Hugging Face model")
    transformers_logging.set_verbosity_error()  # unfit weights are reported below in one line instead of a table
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from None
    unfit = sorted(loading["missing_keys"]) + [name for name, *_ in sorted(loading["mismatched_keys"])]
    if unfit:
        raise TrainingError(
            f"target={folder}: its weights lack {unfit[0]} and {len(unfit) - 1} more of what its config.json "
            "describes; download it again"
        )
    return model.to(device).eval()


def _unreadable(folder: Path, error: Exception) -> TrainingError:
    cause = str(error).strip().partition("\n")[0]
    return TrainingError(f"target={folder}: cannot be loaded ({cause}); download it again")


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


def check_output(output: Path, resume: bool) -> None:
    """Raise `TrainingError` if the output is not a writable folder, has a checkpoint without `resume`, or has none with
    it."""
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise TrainingError(f"output={output}: {existing} is not a writable folder; choose another")
    saved = checkpoints(output)
    if saved and not resume:
        raise TrainingError(
            f"output={output}: holds a training's checkpoint; add --resume to continue it (after its end with more "
            f"--steps or --epochs), delete {saved[-1].name}, or choose another folder"
        )
    if resume and not saved:
        raise TrainingError(f"resume: {output} holds no checkpoint; start without --resume")
