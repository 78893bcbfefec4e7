"""Random calls of every family, as models write them, well-formed and malformed, for `tests.fuzz_calls`."""

import json
import random
from typing import Any

from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES


class Words:
    """Words that occur once."""

    def __init__(self) -> None:
        self._num = 0

    def word(self) -> str:
        """Return a word that was not returned before; no word is part of another."""
        self._num += 1
        return f"w{self._num}z"


def _json_value(rng: random.Random, words: Words, depth: int = 2) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind < 2:
        return words.word() + rng.choice(["", "\n", '"', "\\", "é", "}", "</tool_call>", " <b>", "'", "\U0001f600"])
    if kind < 4:
        return rng.choice([None, True, False, 0, -1.5, 10**6, ""])
    if kind < 6:
        return {words.word(): _json_value(rng, words, depth - 1) for _ in range(rng.randrange(3))}
    return [_json_value(rng, words, depth - 1) for _ in range(rng.randrange(3))]


def _arguments(rng: random.Random, words: Words) -> dict[str, Any]:
    return {
        rng.choice(["text", "count", "rows", words.word()]): _json_value(rng, words) for _ in range(rng.randrange(3))
    }


def _as_json(rng: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.3, indent=rng.choice([None, None, None, 1]))


def _object(rng: random.Random, words: Words, key: str = "arguments") -> str:
    """A call object, as models write it."""
    name, arguments = rng.choice(["look_up", "stop"]), _arguments(rng, words)
    written = _as_json(rng, arguments)
    form = rng.randrange(12)
    if form == 0:
        written = json.dumps(written)
    elif form == 1:
        written = repr(arguments)
    elif form == 2:
        written = "null"
    members = [f'"name": "{name}"', f'"{key}": {written}']
    if form in (3, 4):
        members.insert(rng.randrange(3), f'"{words.word()}": {_as_json(rng, _json_value(rng, words))}')
    elif form == 5:
        members.reverse()
    elif form == 6:
        return f'{{"type": "function", "function": {{{", ".join(members)}}}}}'
    return "{" + ", ".join(members) + "}"


def _xml(rng: random.Random, words: Words, form: str) -> str:
    arguments = _arguments(rng, words)
    values = {
        key: value if isinstance(value, str) else rng.choice([json.dumps, repr])(value)
        for key, value in arguments.items()
    }
    values = {key: value.replace("</tool_call>", "") for key, value in values.items()}
    name = rng.choice(["look_up", "stop"])
    gap = rng.choice(["", "\n"])
    if form == "glm45":
        parts = [f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>" for key, value in values.items()]
        return f"<tool_call>{name}\n{gap.join(parts)}{gap}</tool_call>"
    if form == "minimax_m2":
        parts = [f'<parameter name="{key}">{value}</parameter>' for key, value in values.items()]
        return f'<minimax:tool_call>{gap}<invoke name="{name}">{gap.join(parts)}</invoke>{gap}</minimax:tool_call>'
    parts = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
    mark = "seed:tool_call" if form == "seed_oss" else "tool_call"
    return f"<{mark}>{gap}<function={name}>{gap}{gap.join(parts)}</function>{gap}</{mark}>"


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


def call(rng: random.Random, words: Words, name: OutputParserName) -> str:
    """A well-formed call in the family's syntax."""
    arguments = _as_json(rng, _arguments(rng, words))
    function = rng.choice(["look_up", "stop"])
    match name:
        case "hermes":
            inner = [_object(rng, words) for _ in range(rng.choice([1, 1, 1, 2]))]
            listed = rng.choice(["\n".join(inner), f"[{', '.join(inner)}]"])
            return f"<tool_call>\n{listed}\n</tool_call>"
        case "granite" | "phi4_mini":
            inner = [_object(rng, words) for _ in range(rng.choice([1, 2]))]
            return f"<|tool_call|>[{', '.join(inner)}]" + ("<|/tool_call|>" if name == "phi4_mini" else "")
        case "llama3":
            return _object(rng, words, "parameters") + rng.choice(["", "; "])
        case "mistral":
            return rng.choice([f"[TOOL_CALLS]{function}[ARGS]{arguments}", f"[TOOL_CALLS][{_object(rng, words)}]"])
        case "kimi_k2":
            one = f"<|tool_call_begin|>functions.{function}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|>{one}<|tool_calls_section_end|>"
        case "deepseek_v3":
            inner = [
                f"{function}<｜tool▁sep｜>{arguments}",
                f"function<｜tool▁sep｜>{function}\n```json\n{arguments}\n```",
            ]
            one = f"<｜tool▁call▁begin｜>{rng.choice(inner)}<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜>{one}<｜tool▁calls▁end｜>"
        case "gemma4":
            return f"<|tool_call>call:{function}{_gemma(_arguments(rng, words))}<tool_call|>"
        case "pythonic":
            keywords = ", ".join(f"{key}={value!r}" for key, value in _arguments(rng, words).items())
            return f"[{function}({keywords}), stop()]"
        case "harmony":
            return f"<|start|>assistant<|channel|>commentary to=functions.{function}<|message|>{arguments}<|call|>"
        case "qwen3_coder" | "seed_oss" | "minimax_m2" | "glm45":
            return _xml(rng, words, name)
    return words.word()


_NOISE = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    ",",
    ":",
    "<",
    ">",
    "</",
    "\n",
    " ",
    "\x00",
    "null",
    "True",
    "1",
    "é",
    "|",
]


def marks_of(name: OutputParserName) -> list[str]:
    """The marks of a family."""
    return list(FAMILIES[name].marks or ())


def malformed(rng: random.Random, words: Words, name: OutputParserName, text: str) -> str:
    """Change a call at a few places: characters lost, doubled or added, marks lost or added, cut."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(text) + 1)
        change = rng.randrange(6)
        if change == 0:
            text = text[:at] + text[at + rng.randrange(1, 4) :]
        elif change == 1:
            text = text[:at] + rng.choice(_NOISE) * rng.randrange(1, 4) + text[at:]
        elif change == 2:
            text = text[:at] + rng.choice([*marks_of(name), *_NOISE]) + text[at:]
        elif change == 3:
            text = text[:at]
        elif change == 4 and (present := [mark for mark in marks_of(name) if mark in text]):
            text = text.replace(rng.choice(present), "", 1)
        else:
            text = text[:at] + f" {words.word()} " + text[at:]
    return text
