"""gpt-oss's answers: the format's published examples, any split of them, and answers that are none."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.http.answer import Answer
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.parsers.harmony import MARKS, HarmonyParser
from aerie.cluster.http.parsers.output_parser import joined_deltas
from aerie.cluster.transport.messages import TokenDelta
from tests.support.harmony import harmony_chat_tokenizer, harmony_tokenizer

TOKENIZER = harmony_tokenizer()
CHAT = harmony_chat_tokenizer()
IDS = CHAT.added_ids(MARKS)
SHOWN = FAMILIES["harmony"].marks
Read = tuple[str, str, list[tuple[str, str]], str | None]  # content, reasoning, calls, finish


def read(
    tokens: Sequence[int],
    sizes: Sequence[int] = (),
    *,
    by_tokens: bool = True,
    with_calls: bool = True,
    finish: str = "stop",
    prompt: str = "<|start|>assistant",
    stops: Sequence[str] = (),
) -> Read:
    """What a client gets of an answer that comes in pieces of `sizes` tokens, again and again; (): one token each. A
    last stop token is not shown."""
    answer = Answer(CHAT.detokenizer(True, (), SHOWN), stops, eos_token_ids=frozenset(CHAT.eos_token_ids))
    parser = HarmonyParser(with_calls, True, IDS if by_tokens else None, ["get_location"], prompt)
    deltas, at, number = [], 0, 0
    while answer.finish is None:
        size = sizes[number % len(sizes)] if sizes else 1
        part, at, number = tuple(tokens[at : at + size]), at + size, number + 1
        deltas.append(parser.push(answer.push(TokenDelta("", part, finish=finish if at >= len(tokens) else None))))  # type: ignore[arg-type]
    whole, calls = joined_deltas(deltas)
    named = [(call.function.name, call.function.arguments) for call in calls]
    return whole.content, whole.reasoning, named, whole.finish


def tokens_of(text: str) -> list[int]:
    """Marks become their special tokens."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def plain(text: str) -> list[int]:
    """Nothing becomes a special token."""
    return [token for letter in text for token in TOKENIZER.encode(letter, add_special_tokens=False).ids]


SUM = 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.'
THOUGHT = "Need to use function get_weather."
CALLING = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
PLAN = "**Action plan**:\n1. Generate an HTML file\n2. Generate a JavaScript for the Node.js server"
PAGE = '{"template": "basic_html", "path": "index.html"}'
SF = '{"location":"San Francisco"}'
# docs/format.md of openai/harmony, and the other places that it allows for recipient and type.
PUBLISHED: list[tuple[str, Read]] = [
    (
        f"<|channel|>analysis<|message|>{SUM}<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        ("2 + 2 = 4.", SUM, [], "stop"),
    ),
    *(
        (
            CALLING + head + f"<|message|>{SF}<|call|>",
            ("", "Need to use function get_weather.", [("f", SF)], "tool_calls"),
        )
        for head in (
            "<|channel|>commentary to=functions.f <|constrain|>json",
            "<|channel|>commentary to=functions.f<|constrain|>json",
            " to=functions.f<|channel|>commentary <|constrain|>json",
            " to=functions.f<|channel|>commentary json",
            "<|channel|>commentary to=functions.f",
        )
    ),
    (
        f"<|channel|>analysis<|message|>long<|end|><|start|>assistant<|channel|>commentary<|message|>{PLAN}<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>{PAGE}<|call|>",
        (PLAN, "long", [("generate_file", PAGE)], "tool_calls"),
    ),
    ("<|channel|>commentary to=get_location<|message|><|call|>", ("", "", [("get_location", "{}")], "tool_calls")),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("", "1 + 1", [], "stop")),
    ("just text", ("just text", "", [], "stop")),
    ("<|channel|>final <|constrain|>json<|message|>[1]<|return|>", ("[1]", "", [], "stop")),
]


@pytest.mark.parametrize(("text", "expected"), PUBLISHED)
@pytest.mark.parametrize("by_tokens", [True, False])
def test_published_examples_in_any_pieces(text: str, expected: Read, by_tokens: bool) -> None:
    tokens = tokens_of(text if text.endswith("|>") else f"{text}<|return|>")
    for sizes in ((), (2,), (3, 1), (7,), (len(tokens),)):
        assert read(tokens, sizes, by_tokens=by_tokens) == expected


def test_what_an_answer_says_of_marks_is_text() -> None:
    said = "a message ends with <|end|><|start|>assistant<|channel|>analysis<|message|>, you see"
    tokens = tokens_of("<|channel|>final<|message|>") + plain(said) + tokens_of("<|return|>")
    assert read(tokens) == (said, "", [], "stop")


def test_a_continued_message_keeps_its_channel() -> None:
    prompt = "<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>so "
    tokens = tokens_of("be it<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>")
    assert read(tokens, prompt=prompt) == ("yes", "be it", [], "stop")
    final = prompt.replace("analysis", "final")
    assert read(tokens_of("be it<|return|>"), prompt=final) == ("be it", "", [], "stop")


def test_calls_of_a_request_without_tools_are_content() -> None:
    tokens = tokens_of(f"<|channel|>commentary to=functions.f<|message|>{SF}<|call|>")
    assert read(tokens, with_calls=False) == (SF, "", [], "stop")


def test_a_call_that_is_cut_short_is_closed() -> None:
    tokens = tokens_of('<|channel|>commentary to=functions.f<|message|>{"a')
    assert read(tokens, finish="length") == ("", "", [("f", "{}")], "length")
    assert read([*tokens, CHAT.eos_token_ids[0]]) == ("", "", [("f", "{}")], "stop")
    assert read(tokens_of("<|channel|>commentary to=functions.f<|message|>"), finish="length")[2] == []


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["analysis", "commentary", "final", "f"]), st.text(max_size=12)), min_size=1, max_size=5
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(messages=MESSAGES, sizes=SIZES, ended=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_messages_are_read_whole_however_they_come(
    messages: list[tuple[str, str]], sizes: list[int], ended: bool
) -> None:
    tokens: list[int] = []
    expected: dict[str, str] = {"analysis": "", "final": ""}
    calls: list[tuple[str, str]] = []
    for channel, text in messages:
        head = f"<|channel|>{channel}" if channel != "f" else "<|channel|>commentary to=functions.f <|constrain|>json"
        text = json.dumps({"at": text}) if channel == "f" and text else text
        tokens += tokens_of(("<|start|>assistant" if tokens else "") + f"{head}<|message|>") + plain(text)
        tokens += tokens_of("<|call|>" if channel == "f" else "<|end|>")
        if channel == "f":
            calls.append(("f", text or "{}"))
        else:
            expected["analysis" if channel == "analysis" else "final"] += text
    if not ended:
        tokens = [*tokens[:-1], CHAT.eos_token_ids[0]]
    content, reasoning, named, finish = read(tokens, sizes)
    assert (content, reasoning, named) == (expected["final"], expected["analysis"], calls)
    assert finish == ("tool_calls" if calls else "stop")


@given(
    parts=st.lists(st.sampled_from([*MARKS, "assistant", "final", " to=functions.f", "TEXT"]), max_size=14),
    sizes=SIZES,
    by_tokens=st.booleans(),
    finish=st.sampled_from(["stop", "length"]),
    stop=st.sampled_from(["", "<|", "§3", "|>", "assistant"]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_broken_answers_lose_no_text(
    parts: list[str], sizes: list[int], by_tokens: bool, finish: str, stop: str
) -> None:
    """Each TEXT is a text that no head has. It comes out whichever marks stand around it, in the same way for any
    pieces."""
    texts = [f"§{i}§ " if part == "TEXT" else part for i, part in enumerate(parts)]
    tokens = [token for text in texts for token in tokens_of(text)] + [CHAT.eos_token_ids[0]]
    options = {"by_tokens": by_tokens, "finish": finish, "stops": [stop] if stop else []}
    content, reasoning, calls, end = read(tokens, sizes, **options)  # type: ignore[arg-type]
    assert (content, reasoning, calls, end) == read(tokens, (len(tokens),), **options)  # type: ignore[arg-type]
    if not stop:
        shown = content + reasoning + "".join(arguments for _, arguments in calls)
        assert all(text in shown for text in texts if text.startswith("§")), (texts, shown)


@given(tokens=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40), sizes=SIZES)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_tokens_are_read(tokens: list[int], sizes: list[int]) -> None:
    everything = [*tokens, CHAT.eos_token_ids[0]]
    assert read(everything, sizes) == read(everything, (len(everything),))


def test_arguments_come_as_they_are_written() -> None:
    parser = HarmonyParser(True, True, IDS, (), "<|start|>assistant")
    answer = Answer(CHAT.detokenizer(True, (), SHOWN))
    tokens = tokens_of(f"<|channel|>commentary to=functions.f<|message|>{json.dumps({'at': 'Bern and Basel'})}")
    deltas = [parser.push(answer.push(TokenDelta("", (token,)))) for token in tokens]
    assert sum(bool(delta.tool_calls) for delta in deltas) >= len("Bern and Basel")
