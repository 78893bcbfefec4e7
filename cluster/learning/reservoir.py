"""The texts that a draft learns from. Pure; in memory only."""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

_CANDIDATES = 3  # texts drawn when one must go; the oldest of them goes, so that newer texts stay for longer


class Text(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer. key: name of its API key, "" without one."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    key: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


class Parts(NamedTuple):
    """Texts to train on, and those held out."""

    train: list[Text]
    held_out: list[Text]


@dataclass
class Reservoir:
    """A sample of the newest texts.

    max_tokens: maximum tokens of all texts together.
    key_share: most of them that are of one key, once there are several keys.
    held_out: share of the prompts whose texts are held out. A prompt's hash decides, so that no answer to a held-out
        prompt is trained on.
    """

    max_tokens: int
    key_share: float
    held_out: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._texts: list[Text] = []  # by age, oldest first
        self._by_key: Counter[str] = Counter()
        self._random = random.Random(self.seed)
        self.num_added = 0

    @property
    def num_tokens(self) -> int:
        return self._by_key.total()

    def add(self, text: Text) -> None:
        """Add a text, and forget others if there are too many tokens."""
        if not 0 < text.num_tokens <= self.max_tokens:
            return
        self._texts.append(text)
        self._by_key[text.key] += text.num_tokens
        self.num_added += 1
        limit = self.key_share * self.max_tokens
        while len(+self._by_key) > 1 and self._by_key[text.key] > limit:
            self._forget([index for index, known in enumerate(self._texts) if known.key == text.key])
        while self.num_tokens > self.max_tokens:
            self._forget(range(len(self._texts) - 1))

    def split(self, num_recent: int) -> tuple[Parts, Parts]:
        """Return the newest `num_recent` texts and the older ones."""
        at = max(0, len(self._texts) - num_recent)
        return self._parts(self._texts[at:]), self._parts(self._texts[:at])

    def _parts(self, texts: Sequence[Text]) -> Parts:
        parts = Parts([], [])
        for text in texts:
            parts[is_held_out(text.prompt, self.held_out)].append(text)
        return parts

    def _forget(self, indices: Sequence[int]) -> None:
        index = min(self._random.choice(indices) for _ in range(_CANDIDATES))
        gone = self._texts.pop(index)
        self._by_key[gone.key] -= gone.num_tokens


def is_held_out(prompt: Sequence[int], share: float) -> bool:
    """Return whether the texts of a prompt are held out."""
    digest = hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) < share * 2**32
