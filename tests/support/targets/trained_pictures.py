"""A small trained model that reads digits in pictures, so that its answers depend on them.

    python -m tests.support.targets.trained_pictures FOLDER [--steps 500]     # trains it, about a minute on a core

A picture has three digits of 8 x 8 pixels each, a question asks for them forwards or backwards, and the answer spells
them. The architecture is Qwen3-VL's, with DeepStack. `CHECKPOINT` is the result of this command.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Picture
from PIL import ImageDraw

from tests.support.targets.image_models import (
    END_TOKEN,
    IMAGE_TOKEN,
    KINDS,
    PATCH,
    START_TOKEN,
    TEXT,
    TOWER,
    VIDEO_TOKEN,
)

CHECKPOINT = Path(__file__).with_name("trained_pictures_model")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUM_DIGITS = 3
CELL = 2 * PATCH  # pixels of a digit, and of a token
FORWARDS, BACKWARDS, EOS, COMMA = 2, 3, 1, 4
FIRST_LETTER = 5
ANSWER = 6 * NUM_DIGITS  # tokens of the longest answer, with its end
BATCH = 64


def draw(digits: Sequence[int], generator: random.Random) -> Any:
    """Return a picture of digits: light on dark or dark on light, of random colours, a little shifted."""
    picture = Picture.new("RGB", (CELL * len(digits), CELL))
    for i, digit in enumerate(digits):
        dark, light = ([generator.randrange(low, low + 80) for _ in range(3)] for low in (0, 175))
        back, fore = (dark, light) if generator.random() < 0.5 else (light, dark)
        cell = Picture.new("RGB", (CELL, CELL), tuple(back))
        ImageDraw.Draw(cell).text((generator.randrange(1, 3), generator.randrange(-2, 0)), str(digit), fill=tuple(fore))
        picture.paste(cell, (CELL * i, 0))
    return picture


def answer(digits: Sequence[int], question: int) -> list[int]:
    """Return the tokens of an answer: a letter each, and `EOS`."""
    ordered = digits if question == FORWARDS else digits[::-1]
    letters = [[FIRST_LETTER + ord(letter) - ord("a") for letter in WORDS[digit]] for digit in ordered]
    return [*letters[0], *(token for word in letters[1:] for token in (COMMA, *word)), EOS]


def prompt_parts(digits: Sequence[int], question: int, generator: random.Random) -> list[Any]:
    """Return the parts of a prompt, see `ImagePrompts`."""
    return [draw(digits, generator), question]


def model_config() -> Any:
    from transformers import CONFIG_MAPPING

    text, tower = KINDS["qwen3_vl"]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "initializer_range": 0.05}
    seen = {"hidden_size": 48, "intermediate_size": 96, "initializer_range": 0.05, "deepstack_visual_indexes": [0]}
    return CONFIG_MAPPING["qwen3_vl"](
        text_config=TEXT | text | sizes,
        vision_config=TOWER | tower | seen,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START_TOKEN,
        vision_end_token_id=END_TOKEN,
        tie_word_embeddings=False,
    )


def batch_of(processor: Any, generator: random.Random, size: int = BATCH) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the model's inputs, prompts with their answers, and their labels; -100 where none is learned."""
    rows, labels, pictures = [], [], []
    for _ in range(size):
        digits, question = [generator.randrange(10) for _ in range(NUM_DIGITS)], generator.choice((FORWARDS, BACKWARDS))
        pictures.append(draw(digits, generator))
        prompt = [START_TOKEN, *[IMAGE_TOKEN] * NUM_DIGITS, END_TOKEN, question]
        own = answer(digits, question)
        rest = ANSWER - len(own)
        rows.append(prompt + own + [EOS] * rest)
        labels.append([-100] * len(prompt) + own + [-100] * rest)
    ids = torch.tensor(rows)
    given = dict(processor(images=pictures, return_tensors="pt"))
    return given | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE_TOKEN).int()}, torch.tensor(labels)


def train(folder: Path, steps: int, seed: int = 0) -> float:
    """Train and save the model in bfloat16, and its processor. Return the share of right tokens of the last batches."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, min_pixels=CELL**2, max_pixels=1600)
    torch.manual_seed(seed)
    generator = random.Random(seed)
    model = AutoModelForImageTextToText.from_config(model_config(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    right = list[float]()
    for step in range(steps):
        given, labels = batch_of(processor, generator)
        logits = model(**given).logits[:, :-1]
        wanted = labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        asked = wanted != -100
        right.append(float((logits.argmax(-1) == wanted)[asked].float().mean()))
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {np.mean(right[-50:]):.3f} of tokens right", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    return float(np.mean(right[-20:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    print(f"{train(arguments.folder, arguments.steps):.4f} of tokens right")


if __name__ == "__main__":
    main()
