"""`python -m tests.support.targets deepseek|hybrid --data ROWS --output FOLDER`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from speculative.training.cli import add_chat, add_common, at_least
from speculative.training.commands import finish, preview, split_rows
from speculative.training.fit_options import fit_arguments
from speculative.training.target import ChatData, build_tokenizer
from tests.support.targets import deepseek, hybrid

KINDS = {
    "deepseek": (deepseek.SIZES, deepseek.build_deepseek, deepseek.train_deepseek, deepseek.save_deepseek),
    "hybrid": (hybrid.SIZES, hybrid.build_hybrid, hybrid.train_hybrid, hybrid.save_hybrid),
}


def main(line: Sequence[str] | None = None) -> int:
    """Train a target and its module together, save them, print losses."""
    arguments = parser().parse_args(line)
    options = fit_arguments(arguments)
    sizes, build, train, save = KINDS[arguments.kind]
    rows, held = split_rows(arguments)
    shape = sizes[arguments.size]
    longest = shape["max_position_embeddings"]
    tokenizer = (
        AutoTokenizer.from_pretrained(arguments.tokenizer)
        if arguments.tokenizer
        else build_tokenizer(rows, shape["vocab_size"], longest)
    )
    model = build(shape, tokenizer, arguments.seed)
    data = ChatData(rows, held, tokenizer, min(arguments.max_length, longest))
    losses = train(data, model, options, arguments)
    if options.should_save:
        save(model, tokenizer, arguments.output)
        finish(arguments.kind, arguments, losses)
        preview(arguments.output, arguments.preview, options.device)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options of `aerie train-target`, and those of a module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    add_common(parser, lr=2e-3, epochs=12.0, batch_tokens=16384)
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="21 to 31 MB, or 1 MB for tests")
    parser.add_argument("--tokenizer", type=Path, help="use this model folder's tokenizer instead of a new one")
    add_chat(parser)
    parser.add_argument("--mtp-steps", type=at_least(1), default=3, help="steps it is unrolled on its own outputs")
    parser.add_argument("--mtp-weight", type=at_least(0, float), default=0.3, help="its loss's, beside the target's")
    parser.add_argument("--router-bias-speed", type=float, default=1e-3, help="change of a router's bias per step")
    parser.set_defaults(run="", function="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
