"""Lets the target answer the training prompts: the text that a draft will have to predict is the target's own.

Batches of prompts of similar length run through transformers' `generate`, greedily or sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculative.training.rows import Conversation, RowError
from speculative.training.samples import Sample, prompt_tokens, require_chat_template


def answer_prompts(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompt of every assistant turn, and of a last turn of the user's; repeats are given once."""
    require_chat_template(tokenizer)
    prompts: dict[tuple[int, ...], None] = {}
    for conversation in conversations:
        turns = conversation.turns
        for place in range(len(turns) + 1):
            asked = place < len(turns) and turns[place].role == "assistant"
            if asked or (place == len(turns) and turns[-1].role == "user"):
                prompts[tuple(prompt_tokens(Conversation(turns[:place]), tokenizer))] = None
    return [list(prompt) for prompt in prompts]


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    progress: bool = True,
) -> list[Sample]:
    """The model's answer to each prompt, in the prompts' order, with its end-of-turn token when it came to it.

    `temperature` 0 is greedy. The global RNG is seeded: `generate` takes no generator (transformers 5.17).
    """
    torch.manual_seed(seed)
    stops = stop_tokens(model, tokenizer)
    pad = stops[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Sample] = {}
    bar = tqdm(total=len(prompts), desc=f"regenerate at {temperature:g}", disable=not progress, mininterval=2.0)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        longest = max(len(prompts[i]) for i in chosen)
        rows = [[*[pad] * (longest - len(prompts[i])), *prompts[i]] for i in chosen]
        mask = [[*[0] * (longest - len(prompts[i])), *[1] * len(prompts[i])] for i in chosen]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
        output = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=stops,
            pad_token_id=pad,
            **({"do_sample": False} | sampling),
        )
        for index, said in zip(chosen, output[:, longest:].tolist(), strict=True):
            answer = until_stop(said, stops)
            answers[index] = Sample((*prompts[index], *answer), len(prompts[index]))
        bar.update(len(chosen))
    bar.close()
    return [answers[i] for i in range(len(prompts))]


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer, from the generation config, else the tokenizer's end of turn."""
    stops = model.generation_config.eos_token_id
    stops = tokenizer.eos_token_id if stops is None else stops
    return [stops] if isinstance(stops, int) else list(stops)


def until_stop(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token, or all."""
    for place, token in enumerate(tokens):
        if token in stops:
            return list(tokens[: place + 1])
    return list(tokens)


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """One JSON line a sample: `prompt_tokens` and `answer_tokens`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for sample in samples:
            prompt, answer = sample.tokens[: sample.num_prompt], sample.tokens[sample.num_prompt :]
            file.write(json.dumps({"prompt_tokens": prompt, "answer_tokens": answer}) + "\n")
    partial.replace(path)


def read_samples(path: Path) -> list[Sample]:
    """What `write_samples` wrote. Raises `RowError` for a line of another form."""
    return list(_read_lines(path))


def _read_lines(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                prompt, answer = row["prompt_tokens"], row["answer_tokens"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise RowError(f"{path}:{number}: not a regenerated row; delete the file to generate anew") from error
            yield Sample((*prompt, *answer), len(prompt))
