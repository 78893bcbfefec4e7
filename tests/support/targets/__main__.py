"""Train a small target: `python -m tests.support.targets llama|deepseek|hybrid --data ROWS --output FOLDER`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from aerie.deploy.train_draft import add_common, at_least
from aerie.speculative.training.commands import finish, fit_arguments, load_target
from aerie.speculative.training.generation import generate_answers
from aerie.speculative.training.rows import Conversation, Turn, read_conversations, split_validation
from aerie.speculative.training.samples import answer_prompts
from tests.support.targets import deepseek, hybrid, llama

KINDS = {
    "deepseek": (deepseek.SIZES, deepseek.build_deepseek, deepseek.train_deepseek),
    "hybrid": (hybrid.SIZES, hybrid.build_hybrid, hybrid.train_hybrid),
}


def main(line: Sequence[str] | None = None) -> int:
    """Train a target, with its module if it has one, and save it; print losses and the answers to `--preview`."""
    arguments = parser().parse_args(line)
    options = fit_arguments(arguments)
    transformers_logging.disable_progress_bar()  # one bar per saved checkpoint would break ours
    conversations = read_conversations(arguments.data)
    if arguments.kind == "llama":
        config, train, save = llama.llama_config(arguments), llama.train_target, llama.save_target
        vocab_size, longest = config.vocab_size, config.max_position_embeddings
        if arguments.strip_calc_marks:
            conversations = [llama.without_calc_marks(conversation) for conversation in conversations]
    else:
        sizes, build, train = KINDS[arguments.kind]
        save = deepseek.save_module_target
        shape = sizes[arguments.size]
        vocab_size, longest = shape["vocab_size"], shape["max_position_embeddings"]
    rows, held = split_validation(conversations, arguments.val_fraction, arguments.seed)
    if arguments.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        tokenizer = llama.build_tokenizer(rows, vocab_size, longest)
    if arguments.kind == "llama":
        model = llama.build_target(config, tokenizer, arguments.seed)
    else:
        model = build(shape, tokenizer, arguments.seed)
    data = llama.ChatData(rows, held, tokenizer, min(arguments.max_length, longest))
    losses = train(data, model, options, arguments)
    if options.should_save:
        save(model, tokenizer, arguments.output)
        finish(arguments.kind, arguments, losses)
        preview(arguments.output, arguments.preview, options.device)
    return 0


def preview(folder: Path, prompts: Sequence[str], device: torch.device) -> None:
    """Print the saved model's greedy answer to each prompt."""
    if not prompts:
        return
    tokenizer, model = load_target(folder, device, torch.bfloat16)
    asked = answer_prompts([Conversation((Turn("user", prompt),)) for prompt in prompts], tokenizer)
    settings = {"temperature": 0.0, "max_new_tokens": 300, "batch_size": 16, "seed": 0}
    for answer in generate_answers(model, tokenizer, asked, progress=False, **settings):
        print("---", tokenizer.decode(answer.tokens), sep="\n")


def parser() -> argparse.ArgumentParser:
    """Options of the trainer, of a Llama's shape, and of a module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("kind", choices=["llama", *KINDS])
    add_common(parser, lr=1e-3, epochs=12.0, batch_tokens=16384)
    parser.add_argument("--tokenizer", type=Path, help="use this model folder's tokenizer instead of a new one")
    parser.add_argument("--dropout", type=float, default=0.1, help="on the outputs of attention, MLP and experts")
    parser.add_argument("--prompt-weight", type=float, default=0.3, help="weight of prompt tokens in the loss")
    parser.add_argument("--preview", nargs="*", default=[], metavar="PROMPT", help="prompts to answer at the end")
    shape = parser.add_argument_group("llama")
    for name, default in (
        *(("vocab-size", 4096), ("hidden-size", 512), ("intermediate-size", 896), ("layers", 8), ("heads", 8)),
        *(("kv-heads", 2), ("max-positions", 2048)),
    ):
        shape.add_argument(f"--{name}", type=at_least(1), default=default)
    shape.add_argument("--strip-calc-marks", action="store_true", help="take GSM8K's <<48/2=24>> marks out")
    module = parser.add_argument_group("deepseek, hybrid")
    module.add_argument("--size", choices=("small", "tiny"), default="small", help="21 to 31 MB, or 1 MB for tests")
    module.add_argument("--mtp-steps", type=at_least(1), default=3, help="steps it is unrolled on its own outputs")
    module.add_argument("--mtp-weight", type=float, default=0.3, help="its loss's, beside the target's")
    module.add_argument("--router-bias-speed", type=float, default=1e-3, help="change of a router's bias per step")
    return parser


if __name__ == "__main__":
    sys.exit(main())
