"""What `aerie train-target` and `aerie train-draft` do, from parsed arguments to a saved model folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from speculative.training.arguments import check_arguments, choose_device, choose_dtype, loop_options, open_checkpoint
from speculative.training.draft import DraftOptions, measure_acceptance, report, train_draft
from speculative.training.draft_kinds import DRAFTS, DraftKind
from speculative.training.errors import TrainingError
from speculative.training.regenerate import (
    answer_prompts,
    generate_answers,
    read_samples,
    stop_tokens,
    write_samples,
)
from speculative.training.rows import (
    Conversation,
    Turn,
    read_conversations,
    split_validation,
    without_calc_marks,
)
from speculative.training.samples import Sample, encode_answers
from speculative.training.target import (
    TargetOptions,
    TargetShape,
    build_target,
    build_tokenizer,
    save_target,
    train_target,
)
from speculative.training.vocabulary import coverage


def run_train_target(arguments: argparse.Namespace) -> int:
    """Trains tokenizer and model and saves them; prints losses and the answers to `--preview`. Returns 0."""
    check_arguments(arguments, {"heads": 1, "kv_heads": 1, "layers": 1, "hidden_size": 1, "intermediate_size": 1})
    device = choose_device(arguments.device)
    checkpoint = open_checkpoint(arguments)
    conversations = read_conversations(arguments.data)
    if arguments.strip_calc_marks:
        conversations = [without_calc_marks(conversation) for conversation in conversations]
    train, held = split_validation(conversations, arguments.val_fraction, arguments.seed)
    shape = TargetShape(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.max_positions,
    )
    tokenizer = build_tokenizer(train, shape)
    model = build_target(shape, tokenizer, arguments.seed)
    options = TargetOptions(
        epochs=arguments.epochs,
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        max_length=min(arguments.max_length, shape.max_position_embeddings),
        dropout=arguments.dropout,
        prompt_weight=arguments.prompt_weight,
        seed=arguments.seed,
        dtype=choose_dtype(arguments.dtype, device),
        loop=loop_options(arguments, device),
    )
    print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train)} rows, {len(held)} held out")
    losses = train_target(
        train, held, tokenizer, model, options, device, checkpoint=checkpoint, resume=arguments.resume
    )
    save_target(model, tokenizer, arguments.output)
    if not arguments.keep_checkpoint:
        checkpoint.discard()
    print(f"target: loss {mean_tail(losses):.4f} over the last steps; saved to {arguments.output}")
    preview(arguments.output, arguments.preview, device)
    return 0


def run_train_draft(arguments: argparse.Namespace) -> int:
    """Trains and saves a draft for `--target`; prints its loss and its acceptance by depth. Returns 0."""
    check_arguments(
        arguments,
        {
            "ttt_length": 1,
            "max_new_tokens": 1,
            "generate_batch": 1,
            "draft_vocab": 1,
            "ttt_decay": 0,
            "measure_rows": 0,
        },
    )
    for name, least in (("temperatures", 0), ("measure_depths", 1)):
        if min(vars(arguments)[name]) < least:
            raise TrainingError(f"{name}={min(vars(arguments)[name])}: must be at least {least}")
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    checkpoint = open_checkpoint(arguments)
    train, held = split_validation(read_conversations(arguments.data), arguments.val_fraction, arguments.seed)
    tokenizer, target = load_target(arguments.target, device, dtype)
    draft = DRAFTS[arguments.method](arguments, target)
    samples = training_samples(arguments, target, tokenizer, train)
    held_samples = greedy_answers(arguments, target, tokenizer, held)
    head, vocabulary = draft.build(samples, sorted(stop_tokens(target, tokenizer)))
    print(f"draft: {len(samples)} answers; its vocabulary covers {coverage(samples, vocabulary):.2%} of their tokens")
    options = DraftOptions(
        epochs=arguments.epochs,
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        num_steps=arguments.ttt_length,
        step_decay=arguments.ttt_decay,
        seed=arguments.seed,
        dtype=dtype,
        loop=loop_options(arguments, device),
    )
    losses = train_draft(
        head, target, vocabulary, samples, held_samples, options, checkpoint=checkpoint, resume=arguments.resume
    )
    draft.save(head, vocabulary, arguments.output)
    if not arguments.keep_checkpoint:
        checkpoint.discard()
    print(f"draft: loss {mean_tail(losses):.4f} over the last steps; saved to {arguments.output}")
    measure_saved(arguments, draft, target, tokenizer, {"validation": held_samples})
    return 0


def training_samples(
    arguments: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Conversation],
) -> list[Sample]:
    """What the head is trained on: the rows' answers, or the target's own, kept in the output folder for a resume."""
    max_length = min(arguments.max_length, target.config.max_position_embeddings)
    if not arguments.regenerate:
        return encode_answers(train, tokenizer, max_length)
    path = arguments.output / "regenerated.jsonl"
    if arguments.resume and path.is_file():
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


def greedy_answers(
    arguments: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
) -> list[Sample]:
    """The target's greedy answers to the first `--measure-rows` prompts, the text that acceptance is judged on."""
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
    """Prints the saved draft's acceptance on the sets and on each of `--measure`."""
    head, vocabulary = draft.load(arguments.output)
    for source in arguments.measure:
        sets[source] = greedy_answers(arguments, target, tokenizer, read_conversations([source]))
    for name, samples in sets.items():
        for depth in arguments.measure_depths if samples else ():
            tally = measure_acceptance(head, target, vocabulary, samples, depth, arguments.batch_tokens)
            figures = " ".join(f"{key} {value:.3f}" for key, value in report(tally).items())
            print(f"draft: {name}, {len(samples)} prompts, greedy chain of {depth}: {figures}")


def load_target(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and frozen model of a Hugging Face folder. Raises `TrainingError` when there is no such folder, or its
    weights are not those of its config.json, for which transformers would make up random ones."""
    if not (folder / "config.json").is_file():
        raise TrainingError(f"target={folder}: holds no config.json; give the folder of a Hugging Face model")
    transformers_logging.set_verbosity_error()  # what does not fit is said below, in a line instead of a table
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise TrainingError(f"target={folder}: cannot be loaded ({cause}); download it again") from None
    unfit = sorted(loading["missing_keys"]) + [name for name, *_ in sorted(loading["mismatched_keys"])]
    if unfit:
        raise TrainingError(
            f"target={folder}: its weights lack {unfit[0]} and {len(unfit) - 1} more of what its config.json "
            "describes; download it again"
        )
    return tokenizer, model.to(device).eval()


def preview(folder: Path, prompts: Sequence[str], device: torch.device) -> None:
    """Prints the saved model's greedy answer to each prompt."""
    if not prompts:
        return
    tokenizer, model = load_target(folder, device, torch.bfloat16)
    asked = answer_prompts([Conversation((Turn("user", prompt),)) for prompt in prompts], tokenizer)
    answers = generate_answers(
        model, tokenizer, asked, temperature=0.0, max_new_tokens=300, batch_size=16, seed=0, progress=False
    )
    for answer in answers:
        print("---", tokenizer.decode(answer.tokens), sep="\n")


def mean_tail(losses: Sequence[float]) -> float:
    """The mean of the last fifty losses."""
    last = losses[-50:]
    return sum(last) / max(len(last), 1)
