"""Finds tool calls between marks (`aerie.cluster.http.parsers.families` says which family has which), and converts
values that models write without quotes by the types of the tool's schema. A call that is none after all is content,
with its marks. White space beside marks is no content."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aerie.cluster.http.parsers.json_calls import CallPart, Parsed, read_arguments, read_calls
from aerie.cluster.http.parsers.literal_calls import literal_json
from aerie.cluster.http.parsers.source import SPACES, Marks, Reading, Running, Source
from aerie.cluster.http.text.json_text import parsed, repaired
from aerie.workers.structured_output.schema_keywords import KEYWORDS_OF_TYPE, UNIONS, is_of

PYTHON_TAG = "<|python_tag|>"
MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?")
KIMI_HEAD = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*")
DEEPSEEK_HEAD = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([^\s<`{]+?)(?:<｜tool▁sep｜>|\n```json)\s*")
_MAX_HEAD = 512  # characters; a name has up to 64
_HEAD_PART = re.compile(r"[^{\"'<\[]*")
_FENCE = "```"

# Reads the calls after an opening mark. The result is None, or the position of text that is no call, which is last.
CallBody = Callable[[Source, Parsed], Reading[int | None]]


class StreamedCalls:
    """Finds the calls of one answer. read: reads a whole answer."""

    def __init__(self, read: Callable[[Source, Parsed], Reading[None]]) -> None:
        source, self._parsed = Source(), Parsed()
        self._running = Running(source, read(source, self._parsed))

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within the arguments of the last call."""
        return self._parsed.is_cut

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._parsed.num_calls

    def take(self, text: str, end: bool) -> tuple[str, list[CallPart]]:
        """Return content and parts of calls in further text. Text may be held back except at the end."""
        self._running.push(text, end)
        if self._running.is_done:
            self._parsed.text(self._running.source.rest())
        return self._parsed.taken()


class MarkedCalls:
    """Calls after marks. bodies: the reader of the text after each mark; None: the mark is dropped."""

    def __init__(self, bodies: Mapping[str, CallBody | None]) -> None:
        self.bodies = bodies
        self._marks = Marks(bodies)

    def read(self, source: Source, parsed: Parsed) -> Reading[None]:
        """Read an answer: text outside of marks is content; text after a mark that is no call is content, too."""
        spaces: list[str] = []
        has_failed = False  # the mark after a call that is none is content, too
        while True:
            text, mark = yield from self._marks.find(source)
            if mark is None:
                break
            shown = text.rstrip()
            if shown:
                parsed.text("".join(spaces) + shown)
                spaces = []
            spaces.append(text[len(shown) :])
            if not mark:
                continue
            body = self.bodies[mark]
            num_before = parsed.num_calls
            no_call = (
                (mark if has_failed else "") if body is None else (yield from _no_call(body, mark, source, parsed))
            )
            if no_call:
                parsed.text("".join(spaces) + no_call)
            has_failed, spaces = body is not None and bool(no_call) and parsed.num_calls == num_before, []
        if not parsed.num_calls:
            parsed.text("".join(spaces))

    def read_only_calls(self, source: Source, parsed: Parsed) -> Reading[None]:
        """Read calls one after another, and stop at other text. Marks in that text begin no calls."""
        while True:
            yield from source.run(SPACES)
            mark = yield from self._marks.take(source)
            body = self.bodies[mark] if mark else None
            if not mark:
                return
            position_of_text = None if body is None else (yield from body(source, parsed))
            if position_of_text is not None:
                return


def _no_call(body: CallBody, mark: str, source: Source, parsed: Parsed) -> Reading[str]:
    """Read the calls after `mark`. Return the text after them that is no call; without any call, with the mark."""
    num_before = parsed.num_calls
    source.record()
    position = yield from body(source, parsed)
    text = source.recorded(position or 0)
    return "" if position is None else (text if parsed.num_calls > num_before else mark + text)


def named_call(head: re.Pattern[str], tail: str, mark: str) -> CallBody:
    """Return a reader of a name, and then its arguments.

    head: matches up to the arguments; group 1 is the name.
    tail: the mark that ends the call; "": none.
    mark: the opening mark, which no head has.

    See `CallBody` for the reader's result. It is the start if this is no call.
    """

    def read(source: Source, parsed: Parsed) -> Reading[int | None]:
        """Read a head of at most `_MAX_HEAD` characters, then the arguments and the tail."""
        start = source.position
        text = ""
        while len(text) <= _MAX_HEAD:
            part = yield from source.run(_HEAD_PART)
            text += part[: _MAX_HEAD + 1]
            character = yield from source.peek()
            has_ended = bool(tail) and (yield from source.take(tail))
            if has_ended or character not in ("<", "["):
                break
            if (yield from source.take(mark)):
                source.back(mark)
                return start
            source.skip()
            text += character
        name = head.fullmatch(text)
        if name is None:
            return start
        if has_ended:
            parsed.call(name[1])
            parsed.arguments("{}")
        elif not (yield from read_arguments(source, parsed, name[1])):
            return start
        elif tail:
            yield from source.run(SPACES)
            yield from source.take(_FENCE)
            yield from source.run(SPACES)
            yield from source.take(tail)
        return None

    return read


_mistral_call = named_call(_MISTRAL_HEAD, "", MISTRAL_MARK)


def read_mistral_calls(source: Source, parsed: Parsed) -> Reading[int | None]:
    """Read a list of calls, or (tokenizers from version 11 on) one call's name and arguments."""
    start = source.position
    yield from source.run(SPACES)
    is_list = (yield from source.peek()) in ("[", "{")
    position = yield from (read_calls if is_list else _mistral_call)(source, parsed)
    return position if position is None or parsed.num_calls else start


def read_llama3_calls(source: Source, parsed: Parsed) -> Reading[None]:
    """Read an answer of Llama 3.x, which is either calls from its start, or content."""
    source.record()
    yield from source.run(SPACES)
    is_tagged = yield from source.take(PYTHON_TAG)
    yield from source.run(SPACES)
    first = yield from source.peek()
    position: int | None = 0
    if first == "{" or (first == "[" and is_tagged):
        position = yield from read_calls(source, parsed)
    text = source.recorded(position if position and parsed.num_calls else 0)
    if position is not None:
        parsed.text(text)


_SCALARS = {"True": "true", "False": "false", "None": "null"}  # Python's names, which some chat templates write
_MAX_REFERENCES = 16  # a schema may refer to itself


@dataclass(frozen=True)
class ArgumentTypes:
    """The types of a tool's arguments, by its schema.

    by_name: types of each argument that the schema names.
    others: types of all other arguments. Empty: unknown.
    """

    by_name: Mapping[str, frozenset[str]]
    others: frozenset[str]

    @classmethod
    def unknown(cls) -> "ArgumentTypes":
        """Return the types for a function without a schema: all unknown."""
        return cls({}, frozenset())

    @classmethod
    def from_schema(cls, schema: Any) -> "ArgumentTypes":
        """Return the types of a function. schema: schema of its arguments, an object."""
        if not isinstance(schema, Mapping):
            return cls.unknown()
        named = schema.get("properties")
        properties = named if isinstance(named, Mapping) else {}
        by_name = {name: _types(value, schema, _MAX_REFERENCES) for name, value in properties.items()}
        return cls(by_name, _types(schema.get("additionalProperties"), schema, _MAX_REFERENCES))

    def of(self, name: str) -> frozenset[str]:
        """Return the JSON types of argument `name`; empty if unknown."""
        return self.by_name.get(name, self.others)


def _types(schema: Any, root: Mapping[str, Any], references: int) -> frozenset[str]:
    """Return the types that `schema` allows; empty if unknown. references: maximum number of references to follow."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(root, reference), root, references - 1) if references else frozenset()
    if isinstance(named := schema.get("type"), str | list):
        return frozenset([named] if isinstance(named, str) else map(str, named)) & KEYWORDS_OF_TYPE.keys()
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema.get("enum", [schema.get("const")])
        return frozenset(next(kind for kind in KEYWORDS_OF_TYPE if is_of(value, kind)) for value in values)
    for key in UNIONS:
        branches = schema.get(key)
        if isinstance(branches, list) and references:
            per_branch = [_types(branch, root, references - 1) for branch in branches]
            if key == "allOf":
                return next((types for types in per_branch if types), frozenset())
            return frozenset().union(*per_branch) if all(per_branch) else frozenset()
    return frozenset()


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of `root` at a JSON pointer, None without one."""
    target: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument written as `text`, of one of `types`. A text that fits no other type is a string,
    so that nothing is lost.

    types: empty: any. If strings are allowed beside other types, a text that is JSON of another type is of that type.
    """
    stripped = text.strip()
    try:
        written = _written(stripped, types)
        value = json.loads(written)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if not types or any(is_of(value, kind) for kind in types):
        # quotation marks belong to a string, unless its type is unknown
        is_text = isinstance(value, str) and "string" in types
        return json.dumps(text, ensure_ascii=False) if is_text else written
    return json.dumps(text, ensure_ascii=False) if "string" in types else written


def _written(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text that is JSON, or an object or a list in Python. Raises ValueError."""
    written = _SCALARS.get(text, repaired(text))
    try:
        parsed(written)
    except ValueError:
        if not text.startswith(("{", "[")) and not (text.startswith("(") and "array" in types):
            raise
        return literal_json(text)
    return written
