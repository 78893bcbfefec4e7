"""Checks a model's chat template and parser together: renders trial conversations, and reads rendered calls back.

Called at every start and by `aerie plan`. Takes about 0.1 s.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES, detect_family
from aerie.cluster.http.parsers.output_parser import joined_deltas
from aerie.cluster.http.parsers.table import PARSERS, MarkedParser
from aerie.cluster.http.parsers.tool_calls import StreamedCalls
from aerie.cluster.http.text.chat_template import ChatTemplateError
from aerie.cluster.http.text.template_facts import HELLO
from aerie.cluster.http.text.tokenizer import ChatTokenizer

Message = Mapping[str, Any]
Prompt = Callable[..., str | None]
_VALUE, _RESULT, _TEXT = "aerie1argument", "aerie1result", "aerie1text"  # nothing else in a prompt has these texts
_OPENED = re.compile(r"(?:<(?![^<>]*end)[^<>/]*think[^<>/]*>|\[THINK\])\s*$", re.IGNORECASE)  # reasoning has begun


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("get_weather", "Returns the weather.", city="string", days="integer", options="object"),
    _tool("get_time", "Returns the time.", zone="string"),
)
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_weather", {"city": f'{_VALUE} "Zürich"\n<b>', "days": 2, "options": {"a": [1, None, True]}}),
    ("get_time", {"zone": "UTC"}),
)


@dataclass(frozen=True)
class Finding:
    """What does not work. check: a short name. text: for the operator."""

    check: str
    text: str


def findings(tokenizer: ChatTokenizer, parser: OutputParserName) -> list[Finding]:
    """Return what does not work between a model's chat template and a parser."""
    if not tokenizer.template_source:
        return [Finding("template", "chats are refused: the model has no chat template")]

    prompt = _prompt_of(tokenizer)
    results = (
        [] if prompt(HELLO, begins=True) is not None else [Finding("chat", "the chat template refuses a question")]
    )
    if FAMILIES[parser].reads_calls and tokenizer.shows_tools:
        results += [*_history(prompt), *_read_back(prompt, parser)]
    elif FAMILIES[parser].reads_calls:
        results.append(Finding("tools", "tools are refused: the chat template does not show them to the model"))
    elif tokenizer.shows_tools:
        results.append(Finding("parser", "tools are refused: no parser reads the calls of this chat template"))
    return [*results, *_reasoning(tokenizer, prompt, parser)]


def chosen_parser(tokenizer: ChatTokenizer, configured: OutputParserName | Literal["auto"]) -> OutputParserName:
    """Return the configured parser, or for "auto" the one found from the chat template; if that finds none of the calls
    that the template writes, a parser without calls, so that tools are refused."""
    if configured != "auto":
        return configured
    family = detect_family(tokenizer.template_source, tokenizer.response_template is not None)
    if not FAMILIES[family].reads_calls or family in PARSERS:
        return family
    text = rendered_answer(_prompt_of(tokenizer), _turn("", 1))
    if text is not None and _VALUE in text and not _calls_in(text, family):
        return "think" if "</think>" in tokenizer.template_source else "text"
    return family


def chat_lines(tokenizer: ChatTokenizer, configured: OutputParserName | Literal["auto"]) -> list[str]:
    """Return lines about a model's chats: a summary, and what does not work. configured: `ingress.output_parser`."""
    parser = chosen_parser(tokenizer, configured)
    family, efforts = FAMILIES[parser], tokenizer.efforts
    variables = dict.fromkeys(name for values in efforts.values() for name in values)
    uses = "shown and read" if family.reads_calls and tokenizer.shows_tools else "refused"
    levels = f"reasoning_effort sets {', '.join(variables)}" if efforts else "reasoning_effort has no effect"
    return [f"parser {parser}; tools {uses}; {levels}", *(finding.text for finding in findings(tokenizer, parser))]


def check_parser(tokenizer: ChatTokenizer, configured: OutputParserName | Literal["auto"]) -> None:
    """Raise ValueError for a configured parser of calls whose tools do not reach the prompt. The parser that would be
    found is accepted: it may be there for reasoning."""
    family = detect_family(tokenizer.template_source, tokenizer.response_template is not None)
    if configured == "auto" or configured == family or not FAMILIES[configured].reads_calls:
        return
    if tokenizer.template_source and not tokenizer.shows_tools:
        raise ValueError(
            f"ingress.output_parser={configured}: reads tool calls, but the chat template does not show tools to the "
            f"model; leave it auto ({family}), or give a template that shows them (ingress.chat_template)"
        )


def _prompt_of(tokenizer: ChatTokenizer) -> Prompt:
    """Return a function that renders turns with the model's template; it returns None if the template refuses them."""

    def prompt(*turns: Message, begins: bool = False, tools: Sequence[Message] = (), **variables: Any) -> str | None:
        try:
            return tokenizer.render(turns, begins, variables, tools).text
        except ChatTemplateError:
            return None

    return prompt


def _turn(text: str, num_calls: int) -> Message:
    calls = [
        {"id": f"aerie000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(CALLS[:num_calls])
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _history(prompt: Prompt) -> list[Finding]:
    """Check that calls and their results reach the prompt."""

    def shows(text: str, wanted: str, *more: Message) -> bool:
        return wanted in (prompt(HELLO, _turn(text, 1), *more, tools=TOOLS, begins=bool(more)) or "")

    result = {"role": "tool", "tool_call_id": "aerie0000", "name": CALLS[0][0], "content": _RESULT}
    findings = []
    if not shows("", _VALUE):
        findings.append(Finding("call", "tool calls of earlier turns are not shown to the model"))
    elif not shows(_TEXT, _VALUE):
        findings.append(
            Finding("text", "a tool call of an earlier turn is not shown to the model if text stands beside it")
        )
    elif not shows(_TEXT, _TEXT):
        findings.append(
            Finding("text", "text of an earlier turn is not shown to the model if a tool call stands beside it")
        )
    if not shows("", _RESULT, result):
        findings.append(Finding("result", "results of tools are not shown to the model"))
    return findings


def _read_back(prompt: Prompt, parser: OutputParserName) -> list[Finding]:
    """Check that the parser reads calls as the template writes them."""
    if parser in PARSERS:  # its text is not that of the template
        return []
    for num_calls in (1, 2):
        text = rendered_answer(prompt, _turn("", num_calls))
        if text is None or _VALUE not in text:
            continue
        if (read := _calls_in(text, parser)) != list(CALLS[:num_calls]):
            many = "a call" if num_calls == 1 else "two calls"
            return [
                Finding("read", f"the parser does not read {many} as the template writes: {text!r:.300}, read: {read}")
            ]
    return []


def rendered_answer(prompt: Prompt, turn: Message) -> str | None:
    """Return what the template writes for an assistant's turn, without the marks around every turn; None if it refuses
    the turn."""
    plain = prompt(HELLO, {"role": "assistant", "content": _RESULT}, tools=TOOLS)
    whole = prompt(HELLO, turn, tools=TOOLS)
    if plain is None or whole is None:
        return None
    before, _, after = plain.rpartition(_RESULT)
    start = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    text = whole[start:].rstrip()
    return text.removesuffix(after.rstrip())


def _calls_in(text: str, parser: OutputParserName) -> list[tuple[str, Any]]:
    """Return name and arguments of the calls that the parser finds in `text`."""
    family = FAMILIES[parser]
    marked = family.marked_calls(TOOLS)
    read = marked.read if marked is not None else family.reader
    assert read is not None, "the family reads calls"
    reply = MarkedParser(None, StreamedCalls(read), True).push(Piece(text=text, tokens=(), finish="stop"))
    calls = [call.function for call in joined_deltas([reply])[1]]
    return [(call.name, _value(call.arguments)) for call in calls]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reasoning(tokenizer: ChatTokenizer, prompt: Prompt, parser: OutputParserName) -> list[Finding]:
    """Check that the parser reads the reasoning that a prompt opens, and that reasoning can be switched off."""
    thinking = FAMILIES[parser].thinking
    starts = [prompt(HELLO, begins=True, **variables) or "" for variables in ({}, *tokenizer.efforts.values())]
    opened = [found[0].strip() for found in map(_OPENED.search, starts) if found]
    found = []
    if opened and (thinking is None or thinking[0] not in opened):
        found.append(Finding("marks", f"the prompt opens reasoning with {opened[0]}, which the parser does not read"))
    if starts[0] and opened and "none" not in tokenizer.efforts:
        found.append(Finding("switch", "reasoning cannot be switched off: reasoning_effort none has no effect"))
    return found
