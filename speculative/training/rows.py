"""Reads conversations from JSON and JSONL files in several common formats. Needs no tokenizer. A row in another format
raises an error that names file and line.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.speculative.training import TrainingError

ROLES = ("system", "user", "assistant")
# Keys of a question and its answer. An instruction may have an `input`.
_PAIRS = (
    ("question", "answer"),
    *(("instruction", "response"), ("instruction", "output")),
    *(("prompt", "response"), ("prompt", "completion")),
)


class RowError(TrainingError):
    """A row that cannot be used; the text names file, line and remedy."""


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns in order; the assistant's are trained. The last turn may be the user's."""

    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the turns as a chat template takes them."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]


def read_conversations(sources: Sequence[str]) -> list[Conversation]:
    """Return all conversations of the sources, in order.

    A source is a `.json` or `.jsonl` file, or a folder whose such files are read in the order of their names;
    `source@3` repeats it three times. Raises `RowError` for a row in an unknown format, `TrainingError` for a source
    without files.
    """
    conversations: list[Conversation] = []
    for source in sources:
        name, _, repeat = source.rpartition("@") if re.search(r"@\d+$", source) else (source, "", "1")
        rows = [row for path in _files(Path(name)) for row in _read_file(path)]
        conversations += rows * int(repeat)
    if not conversations:
        raise TrainingError(f"{', '.join(sources)}: holds no rows; name a .json or .jsonl file with at least one")
    return conversations


def split_validation(
    conversations: Sequence[Conversation], fraction: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Return training and validation conversations: a seeded share of those that occur only once is held out.

    Repeated rows (`source@3`) stay in the training set.
    """
    counts = Counter(conversations)
    single = [conversation for conversation in conversations if counts[conversation] == 1]
    held = random.Random(seed).sample(single, round(len(single) * fraction))
    chosen = set(held)
    return [conversation for conversation in conversations if conversation not in chosen], held


def _files(path: Path) -> list[Path]:
    """Return the files of rows at a path. Raises TrainingError."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".json", ".jsonl"))
        if not files:
            raise TrainingError(f"{path}: the folder holds no .json or .jsonl file")
        return files
    if not path.is_file():
        raise TrainingError(f"{path}: no such file or folder; give a .json or .jsonl file, or a folder of them")
    if path.suffix not in (".json", ".jsonl"):
        raise TrainingError(f"{path}: unknown ending {path.suffix!r}; use .json (a list) or .jsonl (one row per line)")
    return [path]


def _read_file(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a file. Raises RowError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"{path}: is not UTF-8 (byte {error.start}); convert it") from None
    except OSError as error:
        raise RowError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                source = f"{path}:{number}"
                yield _conversation(_parse(line, source), source)
        return
    rows = _parse(text, str(path))
    if not isinstance(rows, list):
        raise RowError(f"{path}: holds one {type(rows).__name__}; a .json file must hold a list of rows")
    for number, row in enumerate(rows, start=1):
        source = f"{path}: row {number}"
        yield _conversation(row, source)


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(
            f"{source}: not valid JSON ({error.msg}, column {error.colno}); one JSON object a row"
        ) from error


def _conversation(row: Any, source: str) -> Conversation:
    """Return a row as a conversation, from any of the known formats. source: file and row, for errors."""
    if not isinstance(row, dict):
        raise RowError(f"{source}: a row must be a JSON object, not {type(row).__name__}")
    if "messages" in row:
        return _messages(row["messages"], source)
    if "turns" in row:  # questions of a benchmark such as Spec-Bench and MT-bench; the file has no answers
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise RowError(f"{source}: 'turns' must be a list of questions")
        return Conversation((Turn("user", turns[0]),))
    for question, answer in _PAIRS:
        if question in row and answer in row:
            prompt, answer_text = _text(row, question, source), _text(row, answer, source)
            if question == "instruction" and "input" in row:
                prompt = f"{prompt}\n{_text(row, 'input', source).strip()}".removesuffix("\n")
            if not prompt.strip() or not answer_text.strip():
                raise RowError(f"{source}: {question!r} and {answer!r} must not be empty")
            return Conversation((Turn("user", prompt), Turn("assistant", answer_text)))
    known = "; ".join(["messages", "turns", *map("+".join, _PAIRS)])
    raise RowError(f"{source}: keys {sorted(row)} fit no known format; use one of: {known}")


def _messages(messages: Any, source: str) -> Conversation:
    """Return a list of chat messages as a conversation."""
    turns = []
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{source}: 'messages' must be a list of at least one turn")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise RowError(f"{source}: each of 'messages' needs 'role' and 'content'")
        role = _text(message, "role", source)
        if role not in ROLES:
            raise RowError(f"{source}: role={role!r} is unknown; use one of {', '.join(ROLES)}")
        turns.append(Turn(role, _text(message, "content", source)))
    return Conversation(tuple(turns))


def _text(row: dict[str, Any], key: str, source: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise RowError(f"{source}: {key!r} must be a string, not {type(value).__name__}")
    return value
