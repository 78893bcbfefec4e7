"""What a chat template supports and in which form, found once by rendering trial conversations in a sandbox. Used by
`aerie.cluster.http.text.chat_template`.

Searching the template's text decides wrongly: `content is none` also stands in `reasoning_content is none`, and a
variable may occur without an effect. A template is code of a checkpoint that runs on data of requests. So the sandbox
checks its time at every iteration of a loop and every call, and the size of every joined or repeated text.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2.nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
# Arguments: messages, tools, variables, whether the answer begins. None: the template refuses them.
Rendering = Callable[[Sequence[Message], Sequence[Message], Mapping[str, Any], bool], str | None]
Efforts = Mapping[str, Mapping[str, Any]]  # by `reasoning_effort`: the template's variables and their values

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
# Variables by which published templates switch reasoning: name, value for on, for off.
_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_mode", "enabled", "disabled"),  # MiniMax-M3
    ("thinking_option", "on", "off"),  # Ling 3
    ("thinking_budget", -1, 0),  # Seed-OSS
    ("reasoning", True, False),  # Command A
)
_LEVEL_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_LEVELS = ("none", "no_think")  # levels for no reasoning
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Fields of a tool's function, with the values that `filled` gives to tools without them.
_FILLS: Mapping[str, Any] = {"description": "", "parameters": NO_PARAMETERS}
_CALL_VALUE = "aerie1argument"  # nothing else in a trial's prompt contains these texts
_TOOL_NAME = "aerie_look_up"
_CALL_ID = "aerie0001"  # Mistral's templates want nine letters and digits
HELLO: Message = {"role": "user", "content": "Hello"}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "What to look up."}}}
TOOL = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "Looks it up.", "parameters": _PARAMETERS},
}


@dataclass(frozen=True)
class CallTurns:
    """Form of an assistant's turns with calls.

    empty_content: content of a turn without text.
    as_text: arguments are JSON texts, not objects.
    """

    empty_content: str | None = ""
    as_text: bool = False

    def of(self, turn: Message) -> dict[str, Any]:
        """Return a turn in this form. Arguments of `turn` are objects."""
        calls = turn["tool_calls"]
        if self.as_text:
            calls = [call | {"function": call["function"] | {"arguments": _text(call)}} for call in calls]
        return {**turn, "tool_calls": calls, "content": turn["content"] or self.empty_content}


def call_turns(rendered: Rendering) -> CallTurns:
    """Return the first form in which the template shows a call, with and without tools: objects before texts, and ""
    before None. Some templates omit a call beside a content; others fail on None or on one kind of arguments."""
    forms = [CallTurns(content, as_text) for content in ("", None) for as_text in (False, True)]
    return max(forms, key=lambda form: _num_shown(form, rendered))  # the first one of equal ones


def _num_shown(form: CallTurns, rendered: Rendering) -> int:
    messages = [HELLO, form.of(call_turn(""))]
    prompts = [rendered(messages, tools, {}, False) for tools in ((), (TOOL,))]
    # Arguments that are shown as Python writes them are not what the model was trained with.
    return sum(prompt is not None and _CALL_VALUE in prompt and "{'key': " not in prompt for prompt in prompts)


def call_turn(content: str) -> dict[str, Any]:
    """Return an assistant's turn with a call."""
    function = {"name": _TOOL_NAME, "arguments": {"key": _CALL_VALUE}}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def shows_tools(rendered: Rendering) -> bool:
    """Return whether tools reach the prompt."""
    return any(_TOOL_NAME in (rendered(turns, (TOOL,), {}, True) or "") for turns in _starts())


def needed_fields(rendered: Rendering) -> frozenset[str]:
    """Return the fields without which the template refuses a tool: `description`, `parameters`, and `properties` of the
    parameters. All other tools are shown as they were sent, as transformers does."""

    def is_refused(function: Mapping[str, Any]) -> bool:
        tool = {"type": "function", "function": function}
        return all(rendered(turns, (tool,), {}, True) is None for turns in _starts())

    whole: Mapping[str, Any] = TOOL["function"]  # type: ignore[assignment]
    if is_refused(whole):
        return frozenset()
    without = {name: {key: whole[key] for key in whole if key != name} for name in _FILLS}
    without["properties"] = {**whole, "parameters": {"type": "object"}}
    return frozenset(name for name, function in without.items() if is_refused(function))


def filled(tool: Message, needed: frozenset[str]) -> dict[str, Any]:
    """Return a tool with the fields that the template needs."""
    function = dict(tool["function"])
    for name in _FILLS:
        if name in needed:
            function.setdefault(name, _FILLS[name])
    if "properties" in needed and "parameters" in function:
        function["parameters"] = {**function["parameters"]}
        function["parameters"].setdefault("properties", {})
    return {**tool, "function": function}


def reasoning_efforts(rendered: Rendering) -> Efforts:
    """Return the template's variables for each `reasoning_effort`: "none" and `LEVELS`. Efforts without effect on the
    prompt are absent. A level that the template refuses has the variables of the nearest one."""

    def prompt(variables: Mapping[str, Any]) -> str | None:
        return rendered((HELLO,), (), variables, True)

    on: dict[str, Any] = {}
    off: dict[str, Any] = {}
    for name, value_on, value_off in _SWITCHES:
        shown = prompt({name: value_on}), prompt({name: value_off})
        if None not in shown and shown[0] != shown[1]:
            on, off = {name: value_on}, {name: value_off}
            break
    by_level: dict[str, dict[str, Any]] = dict.fromkeys(LEVELS, on) if on else {}
    if off:
        by_level["none"] = off
    for name in _LEVEL_NAMES:
        levels = {level: text for level in LEVELS if (text := prompt({**on, name: level})) is not None}
        if len({*levels.values(), prompt(on)}) > 1 and levels:
            by_level |= {level: {**on, name: _nearest(level, levels)} for level in LEVELS}
            others = (None, *levels.values())
            no_level = next((value for value in _NO_LEVELS if prompt({name: value}) not in others), None)
            if not off and no_level is not None:
                by_level["none"] = {name: no_level}
            break
    return by_level


def _nearest(level: str, accepted: Mapping[str, str]) -> str:
    rank = LEVELS.index
    return min(accepted, key=lambda candidate: (abs(rank(candidate) - rank(level)), -rank(candidate)))


def _starts() -> tuple[tuple[Message, ...], ...]:
    """Return beginnings of conversations: some templates show tools only beside a system prompt."""
    return (HELLO,), ({"role": "system", "content": "Help."}, HELLO)


def _text(call: Message) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


MAX_CHARS = 2**25  # characters of a rendered chat and of any intermediate text: four times the largest body


class TemplateLimitError(Exception):
    """A template exceeded a limit. The message may be shown to the client."""


class TemplateTimeError(TemplateLimitError):
    """The template exceeded its time limit."""


@dataclass(frozen=True)
class _Limit:
    seconds: float
    deadline_s: float


_limit: ContextVar[_Limit] = ContextVar("limit of the chat template that is rendered in this context")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the time of templates rendered within the context, which raise TemplateTimeError."""
    token = _limit.set(_Limit(seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Templates must be rendered within `time_limit`."""

    intercepted_binops = frozenset(("+", "*"))
    concat = staticmethod(lambda pieces: _joined(pieces))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {"_watched": _Watched, "_sized": _sized}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parse a template, and add filters to its loops and concatenations that check time and size."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = self._filtered(loop.iter, "_watched")
        for concat in list(tree.find_all(jinja2.nodes.Concat)):
            inner = jinja2.nodes.Concat(concat.nodes, lineno=concat.lineno, environment=self)
            concat.nodes = [self._filtered(inner, "_sized")]
        return tree

    def _filtered(self, node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
        return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also allow what Kimi-K2's template does with its own lists: to append and to take out entries."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` as the sandbox does, within the time limit."""
        _check_time()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute as Python does, up to `MAX_CHARS`."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    _check_size(len(sequence) * times)
        return _sized(super().call_binop(context, operator, left, right))


def _joined(pieces: Iterable[str]) -> str:
    """Join the output of a template, a macro or a block."""
    joined, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        _check_size(num_chars)
        joined.append(piece)
    return "".join(joined)


class _Watched:
    """The iterable of a template's loop, which counts its steps."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _check_time()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a loop asks, and counts by itself after a TypeError


def _sized(value: Any) -> Any:
    if isinstance(value, str):
        _check_size(len(value))
    return value


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateLimitError(
            f"the model's chat template makes more than {MAX_CHARS} characters of these messages; send fewer or "
            "shorter ones"
        )


def _check_time() -> None:
    limit = _limit.get()
    if time.monotonic() > limit.deadline_s:
        raise TemplateTimeError(
            f"the model's chat template takes more than {limit.seconds:g} s for these messages; send fewer or shorter "
            "ones"
        )
