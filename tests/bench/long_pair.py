"""Makes a pair for long contexts: the embedded target, stretched and trained on long chats, and an EAGLE-3 head that
has read short ones only, as published heads have. For `tests.bench.window`.

    python -m tests.bench.long_pair --output DIR --data gsm8k/train.jsonl codegen.json roleplay.json

The target's rotary base is raised from 10,000 to 500,000 before it reads chats of up to 16,384 tokens, many short
conversations one after the other; the head reads chats of up to 2,048. On one GPU minutes; on a CPU try --longest 2048
--short 256 --target-steps 20 --head-steps 20.
"""

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from speculative.training.draft import DraftOptions, build_head, train_draft
from speculative.training.draft_files import draft_config, read_draft_config, save_draft
from speculative.training.loop import LoopOptions, fit
from speculative.training.rows import Conversation, read_conversations
from speculative.training.samples import Batch, Sample, collate, prompt_tokens
from speculative.training.target import save_target
from speculative.training.vocabulary import choose_vocabulary
from tests.support.prompts import MODELS

ROPE_THETA = 500_000.0
CHAIN_STEPS = 4  # that the head is unrolled; it is served with three
DRAFT_VOCAB = 2048
LOSS_ROWS = 2048  # whose logits are there at once


def pieces(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Each conversation as the part of a chat that it is, without the mark that a chat begins with."""
    found = []
    for conversation in conversations:
        *before, last = conversation.turns
        tokens = prompt_tokens(Conversation(tuple(before)), tokenizer)[1:]
        assert tokenizer.eos_token_id is not None
        found.append([*tokens, *tokenizer(last.content, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    return found


def chats(parts: Sequence[list[int]], begin: int, length: int, count: int, seed: int) -> list[Sample]:
    """`count` chats of `length` tokens: `begin`, then parts in random order, all of them judged."""
    order = _endless(parts, random.Random(seed))
    stream = itertools.chain.from_iterable(order)
    return [Sample((begin, *itertools.islice(stream, length - 1)), 1) for _ in range(count)]


def _endless(parts: Sequence[list[int]], rng: random.Random) -> Iterator[list[int]]:
    while True:
        yield from rng.sample(parts, len(parts))


def stretched_target(folder: Path, positions: int, rope_theta: float | None) -> PreTrainedModel:
    """A target in float32 for so many positions, with a rotary base in place of its own if one is given."""
    config = AutoConfig.from_pretrained(folder)
    if rope_theta is not None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta}
    config.max_position_embeddings = positions
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def chat_loss(model: PreTrainedModel, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy of all next tokens of full batches; without a mask, so that attention is a flash kernel's."""
    with torch.autocast(batch.tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        hidden = model.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        head = model.get_output_embeddings()
        wanted = batch.tokens[:, 1:].flatten().split(LOSS_ROWS)
        rows = hidden[:, :-1].flatten(0, 1).split(LOSS_ROWS)
        parts = [
            functional.cross_entropy(head(part).float(), own, reduction="sum")
            for part, own in zip(rows, wanted, strict=True)
        ]
    return torch.stack(parts).sum() / (batch.tokens.numel() - batch.tokens.shape[0])


def train_target(arguments: argparse.Namespace, parts: list[list[int]], begin: int, device: torch.device) -> None:
    """Into `target`: steps of one long chat each, or of as many tokens in short ones, in turns."""
    folder, longest, short = arguments.output / "target", arguments.longest, arguments.short
    model = stretched_target(MODELS / "target", longest + 1024, ROPE_THETA).to(device)
    steps = arguments.target_steps
    per_batch = max(1, longest // short)
    samples = chats(parts, begin, longest, -(-steps // 2), 1) + chats(parts, begin, short, steps // 2 * per_batch, 2)
    first_short = -(-steps // 2)
    plan = [
        [step // 2] if step % 2 == 0 else [first_short + step // 2 * per_batch + i for i in range(per_batch)]
        for step in range(steps)
    ]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fit(
        model,
        plan,
        lambda indices: collate([samples[i] for i in indices], 0, device),
        lambda batch: chat_loss(model, batch, dtype),
        loop_options(5e-4, steps),
        title="target",
    )
    save_target(model, AutoTokenizer.from_pretrained(MODELS / "target"), folder)


def train_head(arguments: argparse.Namespace, parts: list[list[int]], begin: int, device: torch.device) -> None:
    """Into `draft`: a head from nothing, on short chats."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(arguments.output / "target", dtype=dtype).to(device).eval()
    folder = arguments.output / "draft"
    config = draft_config(target, DRAFT_VOCAB)
    method = read_draft_config(config, target, folder)
    per_batch = max(1, arguments.head_tokens // arguments.short)
    samples = chats(parts, begin, arguments.short, arguments.head_steps * per_batch, 3)
    end = target.generation_config.eos_token_id
    vocabulary = choose_vocabulary(samples, DRAFT_VOCAB, method.model.vocab_size, [end]).to(device)
    head = build_head(target, method, vocabulary, seed=0)
    options = DraftOptions(
        epochs=1,
        steps=arguments.head_steps,
        batch_tokens=per_batch * arguments.short,
        num_steps=CHAIN_STEPS,
        step_decay=0.8,
        seed=0,
        dtype=dtype,
        loop=loop_options(1e-3, arguments.head_steps),
    )
    train_draft(head, target, vocabulary, samples, [], options)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    token_ids = {name: getattr(target.generation_config, name) for name in names}
    save_draft(head, vocabulary, config | token_ids, folder)


def loop_options(lr: float, steps: int) -> LoopOptions:
    return LoopOptions(lr, max(1, steps // 20), 0.1, 1.0, checkpoint_every=steps, eval_every=steps, graphs=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for `target` and `draft`")
    parser.add_argument("--data", nargs="+", required=True, help="rows as `aerie train-draft` takes them")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the target's chats")
    parser.add_argument("--short", type=int, default=2048, help="tokens of the head's chats")
    parser.add_argument("--target-steps", type=int, default=500, help="of about --longest tokens")
    parser.add_argument("--head-steps", type=int, default=1200)
    parser.add_argument("--head-tokens", type=int, default=16384, help="of a step of the head")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    parts = pieces(read_conversations(arguments.data), tokenizer)
    begin = tokenizer.bos_token_id
    print(f"{len(parts)} conversations, {sum(map(len, parts)):,} tokens; on {device}", flush=True)
    torch.manual_seed(0)
    if not (arguments.output / "target").exists():
        train_target(arguments, parts, begin, device)
    train_head(arguments, parts, begin, device)


if __name__ == "__main__":
    main()
