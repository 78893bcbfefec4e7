"""Adds `train-target`, `train-deepseek` and `train-draft` to the `aerie` command. Imports no torch before one runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the commands; each sets `run`, a function of the parsed arguments that returns the exit code."""
    _add_target(subparsers)
    _add_deepseek(subparsers)
    _add_draft(subparsers)


def _run_target(arguments: argparse.Namespace) -> int:
    from speculative.training.commands import run_train_target

    return run_train_target(arguments)


def _run_deepseek(arguments: argparse.Namespace) -> int:
    from speculative.training.deepseek_command import run_train_deepseek

    return run_train_deepseek(arguments)


# The fields of `speculative.draft_models.eagle3_config.HeadFlags`; a test compares them.
HEAD_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _run_draft(arguments: argparse.Namespace) -> int:
    from speculative.training.commands import run_train_draft

    return run_train_draft(arguments)


def _add_target(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train-target",
        help="train a small chat model from scratch",
        description="Trains a tokenizer and a small Llama-architecture chat model on your rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_common(parser, lr=1e-3, epochs=12.0, batch_tokens=16384)
    shape = parser.add_argument_group("model")
    shape.add_argument("--vocab-size", type=int, default=4096, help="tokens of the tokenizer")
    shape.add_argument("--hidden-size", type=int, default=512)
    shape.add_argument("--intermediate-size", type=int, default=896)
    shape.add_argument("--layers", type=int, default=8)
    shape.add_argument("--heads", type=int, default=8)
    shape.add_argument("--kv-heads", type=int, default=2)
    shape.add_argument("--max-positions", type=int, default=2048)
    training = parser.add_argument_group("target training")
    training.add_argument("--dropout", type=float, default=0.1, help="on what attention and MLP add")
    training.add_argument("--prompt-weight", type=float, default=0.3, help="weight of prompt tokens in the loss")
    training.add_argument("--strip-calc-marks", action="store_true", help="take GSM8K's <<48/2=24>> marks out")
    training.add_argument("--preview", nargs="*", default=[], metavar="PROMPT", help="prompts to answer at the end")
    parser.set_defaults(run=_run_target)


def _add_deepseek(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train-deepseek",
        help="train a small chat model of DeepSeek-V3's shape",
        description="Trains a small model of DeepSeek-V3's architecture (latent attention, experts) and its module for "
        "multi-token prediction together on your rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_common(parser, lr=2e-3, epochs=12.0, batch_tokens=16384)
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="31 MB, or 1 MB for tests on a CPU")
    parser.add_argument("--tokenizer", type=Path, help="folder of a model whose tokenizer it gets, instead of its own")
    training = parser.add_argument_group("training of target and module")
    training.add_argument("--dropout", type=float, default=0.1, help="on what attention and experts add")
    training.add_argument("--prompt-weight", type=float, default=0.3, help="weight of prompt tokens in the loss")
    training.add_argument("--mtp-steps", type=int, default=3, help="steps the module is unrolled on its own outputs")
    training.add_argument("--mtp-weight", type=float, default=0.3, help="weight of its loss beside the target's")
    training.add_argument("--router-bias-speed", type=float, default=1e-3, help="what a step changes a bias by")
    training.add_argument("--preview", nargs="*", default=[], metavar="PROMPT", help="prompts to answer at the end")
    parser.set_defaults(run=_run_deepseek)


def _add_draft(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train-draft",
        help="train a draft for a target model",
        description="Trains an EAGLE-3 head for a Llama, Qwen2 or Qwen3 model, or a DeepSeek-V3's own module for "
        "multi-token prediction further; saved in the published layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--method", choices=("eagle3", "mtp"), default="eagle3", help="a head, or the target's module")
    _add_common(parser, lr=3e-4, epochs=4.0, batch_tokens=8192)
    draft = parser.add_argument_group("head")
    draft.add_argument("--draft-vocab", type=int, help="tokens the draft may propose; 32000 when not given")
    draft.add_argument("--intermediate-size", type=int, help="width of its MLP; the target's when not given")
    draft.add_argument("--head-flags", nargs="+", choices=HEAD_FLAGS, help="how it differs from EAGLE-3's paper")
    draft.add_argument("--ttt-length", type=int, default=7, help="steps it is unrolled on its own outputs")
    draft.add_argument("--ttt-decay", type=float, default=0.8, help="step s of the loss weighs decay**s")
    text = parser.add_argument_group("training text")
    text.add_argument("--regenerate", action="store_true", help="train on the target's own answers to the prompts")
    text.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="one regenerated answer for each; 0 is greedy"
    )
    text.add_argument("--max-new-tokens", type=int, default=512)
    text.add_argument("--generate-batch", type=int, default=64, help="prompts answered at once")
    measure = parser.add_argument_group("measurement")
    measure.add_argument("--measure", nargs="*", default=[], metavar="ROWS", help="rows to measure acceptance on")
    measure.add_argument("--measure-rows", type=int, default=100, help="at most so many of them, and of validation")
    measure.add_argument("--measure-depths", type=int, nargs="+", default=[3, 5], help="chain lengths to measure")
    parser.set_defaults(run=_run_draft)


def _add_common(parser: argparse.ArgumentParser, *, lr: float, epochs: float, batch_tokens: int) -> None:
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="ROWS",
        help=".json or .jsonl files or folders of them (question/answer, instruction/input/response, messages, "
        "prompt/response); FILE@3 takes its rows three times",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--epochs", type=float, default=epochs)
    parser.add_argument("--steps", type=int, help="optimiser steps; goes before --epochs")
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--batch-tokens", type=int, default=batch_tokens, help="tokens of a step, padding included")
    parser.add_argument("--max-length", type=int, default=1024, help="longer rows are left out")
    parser.add_argument("--val-fraction", type=float, default=0.03, help="share of the rows held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the arithmetic")
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="replay steps from CUDA graphs on a GPU"
    )
    parser.add_argument("--checkpoint-every", type=int, default=500, help="steps")
    parser.add_argument("--eval-every", type=int, default=500, help="steps")
    parser.add_argument(
        "--keep-checkpoint",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the state after the last step, for --resume with more steps",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in the output folder, after its end with more --steps or --epochs",
    )
