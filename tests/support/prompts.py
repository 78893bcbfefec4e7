"""Prompts that the embedded pair was never trained on: written here from a seed, of mixed lengths and kinds."""

import json
import random
from functools import cache
from pathlib import Path

from tests.support import MODELS

_NAMES = ("Ines", "Tomas", "Wanjiru", "Kofi", "Leila", "Bjorn", "Mei", "Ravi", "Oksana", "Diego")
_THINGS = ("lanterns", "kites", "jars of honey", "bicycle bells", "maps", "clay pots", "tulips", "postcards")
_PLACES = ("the harbour", "a night market", "her uncle's workshop", "the mountain hut", "a school fair")
_TASKS = (
    "Write a Python function that returns the {n} largest values of a list.",
    "Imagine you are a lighthouse keeper. Describe the evening when {n} ships came home at once.",
    "Write a C++ program that prints every multiple of {n} below {m}.",
    "Pretend to be a tour guide and describe {place} to a group of {n} visitors.",
    "Hello! How are you?",
    "Name {n} things that one may find at {place}.",
)


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` user messages: word problems of one to six sentences, and every fourth one another kind of task."""
    rng = random.Random(seed)
    return [_task(rng) if i % 4 == 3 else _problem(rng) for i in range(count)]


def _task(rng: random.Random) -> str:
    n = rng.randint(2, 9)
    return rng.choice(_TASKS).format(n=n, m=n * rng.randint(4, 12), place=rng.choice(_PLACES))


def _problem(rng: random.Random) -> str:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    sentences = [f"{name} has {rng.randint(3, 60)} {thing}."]
    for _ in range(rng.randint(0, 4)):
        sentences.append(
            rng.choice(
                (
                    f"At {rng.choice(_PLACES)} {name} buys {rng.randint(2, 20)} more for ${rng.randint(1, 9)} each.",
                    f"Then {name} gives {rng.randint(1, 9)} of them to {rng.choice(_NAMES)}.",
                    f"Every week {rng.randint(2, 12)} of the {thing} are lost.",
                    f"{rng.choice(_NAMES)} has {rng.randint(2, 5)} times as many.",
                )
            )
        )
    sentences.append(f"How many {thing} does {name} have in the end?")
    return " ".join(sentences)


@cache
def _tokenizer(model: Path) -> "object":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def tokenized(messages: list[str], model: Path = MODELS / "target") -> list[list[int]]:
    """Chat prompts of the embedded target, or of the model in another folder, as token ids."""
    tokenizer = _tokenizer(model)
    return [
        tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
        )
        for message in messages
    ]


def copying_prompts(count: int, model: Path = MODELS / "target") -> list[list[int]]:
    """`tokenized` prompts that end in the beginning of a text that they have in full, as the edit of a file or of JSON
    does; then the model goes on with it."""
    records = [json.dumps([{"id": n, "name": f"item {n * k}", "count": n + k} for n in range(8)]) for k in range(count)]
    asked = tokenized([f"{record} Write it again." for record in records], model)
    return [ids + ids[len(ids) // 8 : len(ids) // 2] for ids in asked]
