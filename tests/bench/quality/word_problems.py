"""Word problems in GSM8K's form, made from a seed: for trying `gsm8k` where its data is not at hand.

What a model scores on them says nothing about GSM8K.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("Amara", "Bruno", "Chen", "Dalia", "Emeka", "Freya", "Goran", "Hana")
_THINGS = ("candles", "stickers", "apples", "marbles", "buttons", "seashells", "cookies", "stamps")


@dataclass(frozen=True)
class Problem:
    """answer: the steps, then `#### ` and the result, as GSM8K has it."""

    question: str
    answer: str

    @property
    def result(self) -> float:
        """Return what stands behind the last ####. Raises ValueError."""
        return float(self.answer.rpartition("####")[2].strip().replace(",", ""))


def read_problems(path: Path) -> list[Problem]:
    """GSM8K's JSONL: one object with `question` and `answer` a line. Raises ValueError with the line's number."""
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = Problem(str(row["question"]), str(row["answer"]))
            _ = problem.result
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: want an object with question and answer, the answer with a number "
                f"behind #### ({type(error).__name__}: {error})"
            ) from None
        problems.append(problem)
    return problems


def word_problems(count: int, seed: int = 0) -> list[Problem]:
    """`count` problems of two steps each."""
    rng = random.Random(seed)
    return [rng.choice(_KINDS)(rng) for _ in range(count)]


def _boxes(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each = rng.randint(2, 9), rng.randint(3, 12)
    gone = rng.randint(1, boxes * each - 1)
    total = boxes * each
    return Problem(
        f"{name} has {boxes} boxes with {each} {thing} each and gives {gone} {thing} away. How many {thing} are left?",
        f"{name} has {boxes}*{each} = <<{boxes}*{each}={total}>>{total} {thing}.\n"
        f"{total}-{gone} = <<{total}-{gone}={total - gone}>>{total - gone} are left.\n#### {total - gone}",
    )


def _shopping(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    count, price, extra = rng.randint(2, 12), rng.randint(2, 9), rng.randint(1, 30)
    cost = count * price
    return Problem(
        f"{name} buys {count} {thing} for ${price} each and a bag for ${extra}. How much does {name} pay in dollars?",
        f"The {thing} cost {count}*{price} = $<<{count}*{price}={cost}>>{cost}.\n"
        f"With the bag {name} pays {cost}+{extra} = $<<{cost}+{extra}={cost + extra}>>{cost + extra}.\n"
        f"#### {cost + extra}",
    )


def _weeks(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    start, daily, weeks = rng.randint(5, 40), rng.randint(1, 6), rng.randint(1, 4)
    found = daily * 7 * weeks
    return Problem(
        f"{name} has {start} {thing} and finds {daily} more every day. How many {thing} does {name} have after {weeks} "
        "weeks?",
        f"In {weeks} weeks {name} finds {daily}*7*{weeks} = <<{daily}*7*{weeks}={found}>>{found} {thing}.\n"
        f"So {name} has {start}+{found} = <<{start}+{found}={start + found}>>{start + found}.\n#### {start + found}",
    )


_KINDS: tuple[Callable[[random.Random], Problem], ...] = (_boxes, _shopping, _weeks)
