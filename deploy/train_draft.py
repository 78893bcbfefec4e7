"""Adds `train-draft` to the `aerie` command. Imports no torch before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from aerie.attention.distribution import install_command
from aerie.deploy.config.files import gguf_folder, is_gguf_path
from aerie.kernels.lazy_import import load
from aerie.speculative.config import BLOCK_METHODS
from aerie.speculative.training import TrainingError

# The fields of `aerie.speculative.drafts.eagle3_config.HeadFlags`; a test compares them.
HEAD_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def run(arguments: argparse.Namespace) -> int:
    """Train a draft. Raises TrainingError."""
    if find_spec("accelerate") is None:
        raise TrainingError(f"training needs accelerate, which is not installed: {install_command('train')}")
    if is_gguf_path(str(arguments.target)):
        arguments.target = gguf_folder(arguments.target)
    return int(load("aerie.speculative.training.commands:run_train_draft")(arguments))


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return an argparse type for numbers not below `least`."""

    def parsed(text: str) -> float:
        number = kind(text)
        if not number >= least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return number

    parsed.__name__ = getattr(kind, "__name__", "number")  # argparse names it in its errors
    return parsed


def _above_zero(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return float(text)


def _share(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0 and under 1, such as 0.03")
    return float(text)


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command. It sets `run`: the "module:function" that takes the arguments and returns the exit code."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a draft for a target model",
        description="Trains an EAGLE-3 head or a block head for a Llama, Qwen2 or Qwen3 model, a block head for a "
        "dense Qwen3.5, or continues to train the MTP module of a DeepSeek-V3, GLM-4.5, Qwen3.5 or Qwen3-Next. "
        "Saves the published layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model, or a GGUF file")
    parser.add_argument("--method", choices=("eagle3", *BLOCK_METHODS, "mtp"), default="eagle3", help="kind of draft")
    add_common(parser, lr=3e-4, epochs=4.0, batch_tokens=8192)
    _add_head(parser)
    _add_block(parser)
    _add_text(parser)
    parser.set_defaults(run="aerie.deploy.train_draft:run")


def _add_head(parser: argparse.ArgumentParser) -> None:
    draft = parser.add_argument_group("head")
    draft.add_argument("--draft-vocab", type=at_least(1), help="tokens the draft may propose; default: 32000")
    draft.add_argument("--intermediate-size", type=at_least(1), help="width of the MLP; default: the target's")
    draft.add_argument("--head-flags", nargs="+", choices=HEAD_FLAGS, help="differences from EAGLE-3's paper")
    draft.add_argument("--ttt-length", type=at_least(1), default=7, help="steps unrolled on the draft's own outputs")
    draft.add_argument("--ttt-decay", type=at_least(0, float), default=0.8, help="step s of the loss weighs decay**s")
    adapted = parser.add_argument_group("LoRA adapter of the target")
    adapted.add_argument(
        "--adapter",
        type=Path,
        help="folder of a LoRA adapter: train an adapter of --draft for the target with it; --output ADAPTER/draft "
        "serves it with the adapter",
    )
    adapted.add_argument("--draft", type=Path, help="folder of the EAGLE-3 head that serves the target without adapter")
    adapted.add_argument("--lora-rank", type=at_least(1), default=16, help="rank of the draft's adapter")


def _add_block(parser: argparse.ArgumentParser) -> None:
    block = parser.add_argument_group(f"block, with --method {', '.join(BLOCK_METHODS)}")
    block.add_argument("--block-size", type=at_least(2), default=8, help="rows of a block, including the newest token")
    block.add_argument(
        "--causal", action="store_true", help="a row sees the block up to itself, as in JetSpec; for wide trees"
    )
    block.add_argument("--draft-layers", type=at_least(1), default=2)
    block.add_argument("--mask-token", type=at_least(0), help="token id; default: the target's padding token")
    block.add_argument("--anchors", type=at_least(1), default=2048, help="blocks of a step, drawn at random")
    block.add_argument(
        "--head-rank", type=at_least(1), default=256, help="rank of the Markov head, selector or path bias"
    )
    block.add_argument(
        "--tv-weight", type=_share, help="weight of total variation in the loss; default: 0.9 for DSpark, else 0"
    )
    block.add_argument(
        "--gamma", type=_above_zero, default=4.0, help="depth k of the loss weighs exp(-(k - 1) / gamma)"
    )
    block.add_argument(
        "--random-depths", action="store_true", help="also train shorter blocks: each block's depth is drawn at random"
    )


def _add_text(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("training text")
    text.add_argument("--regenerate", action="store_true", help="train on the target's own answers to the prompts")
    text.add_argument("--regenerated", type=Path, help="an earlier regenerated.jsonl, instead of --regenerate")
    text.add_argument(
        "--temperatures",
        type=at_least(0, float),
        nargs="+",
        default=[0.0, 1.0],
        help="regenerate one answer per temperature; 0 is greedy",
    )
    text.add_argument("--max-new-tokens", type=at_least(1), default=512)
    text.add_argument("--generate-batch", type=at_least(1), default=64, help="prompts answered at once")
    measure = parser.add_argument_group("measurement")
    measure.add_argument("--measure", nargs="*", default=[], metavar="ROWS", help="rows to measure acceptance on")
    measure.add_argument("--measure-rows", type=at_least(0), default=100, help="maximum number of rows per measurement")
    measure.add_argument(
        "--measure-depths", type=at_least(1), nargs="+", default=[3, 5], help="chain lengths to measure"
    )


def add_common(parser: argparse.ArgumentParser, *, lr: float, epochs: float, batch_tokens: int) -> None:
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="ROWS",
        help=".json or .jsonl files or folders of them (question/answer, instruction/input/response, messages, "
        "prompt/response); FILE@3 takes its rows three times",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--epochs", type=_above_zero, default=epochs)
    parser.add_argument("--steps", type=at_least(1), help="optimizer steps; overrides --epochs")
    parser.add_argument(
        "--minutes",
        type=_above_zero,
        help="time of training and measuring after the answers are there; the learning rate decays within it",
    )
    parser.add_argument("--lr", type=_above_zero, default=lr, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=at_least(0), default=100)
    parser.add_argument("--weight-decay", type=at_least(0, float), default=0.1)
    parser.add_argument(  # at least `samples.LENGTH_STEP`
        "--batch-tokens", type=at_least(64), default=batch_tokens, help="tokens per step, including padding"
    )
    parser.add_argument("--max-length", type=at_least(2), default=1024, help="longer rows are left out")
    parser.add_argument("--val-fraction", type=_share, default=0.03, help="share of the rows held out")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of matrix products")
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="replay steps from CUDA graphs on a GPU"
    )
    parser.add_argument("--checkpoint-every", type=at_least(1), default=500, help="steps")
    parser.add_argument("--eval-every", type=at_least(1), default=500, help="steps")
    parser.add_argument(
        "--keep-checkpoint",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the state after the last step, for --resume with more steps",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in the output folder, after its end with more --steps or --epochs",
    )
