"""Published chat templates, the 70 of llama-cpp-python's source distribution: rendered like transformers, and tried
with their parsers. `pytest -m slow -s tests/cluster/http/text/test_published_templates.py` prints the table."""

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aerie.cluster.http.parsers.self_check import chosen_parser, findings
from aerie.cluster.http.text.chat_template import ChatTemplate, ChatTemplateError
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.fake_engine import EOS, small_tokenizer

pytestmark = pytest.mark.slow
SOURCE = "llama-cpp-python==0.3.36"
FOLDER = "/vendor/llama.cpp/models/templates/"
NUM_TEMPLATES = 70
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The texts of the templates, by name. Downloads 77 MB."""
    folder = tmp_path_factory.mktemp("templates")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--dest",
        str(folder),
        SOURCE,
    ]
    subprocess.run(command, check=True, timeout=500, capture_output=True)
    found = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive:
            if FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).stem] = file.read().decode()
    assert len(found) == NUM_TEMPLATES
    return found


def tokenizer_of(source: str) -> ChatTokenizer:
    tokenizer = small_tokenizer()
    template = ChatTemplate(source, SPECIAL)
    return ChatTokenizer(tokenizer, template, (tokenizer.token_to_id(EOS),))


def test_self_check_finds_nothing_that_is_ours(templates: dict[str, str]) -> None:
    """A chosen parser reads the calls that its template writes. The other findings are the templates' own."""
    wrong = []
    for name, source in sorted(templates.items()):
        tokenizer = tokenizer_of(source)
        parser = chosen_parser(tokenizer, "auto")
        found = findings(tokenizer, parser)
        print(f"{name:48} {parser:12} {', '.join(each.check for each in found)}")
        wrong += [(name, each) for each in found if each.check == "read"]
    assert not wrong


TEXTS = st.lists(
    st.sampled_from(
        ["Hello", "é", "\U0001f600", "\n", " ", "<|im_end|>", "</s>", "<think>", "</think>", "{{ x }}", "<", "/think"]
    ),
    min_size=1,
    max_size=4,
).map("".join)
ARGUMENTS: Any = st.dictionaries(
    st.sampled_from(["city", "days"]), st.text("aé<\n\"'\\", max_size=4) | st.integers(-9, 9) | st.none(), max_size=2
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Über <b>"},
        "days": {"type": "integer", "description": "d", "enum": [1, 2]},
    },
    "required": ["city"],
}
TOOLS = st.lists(
    st.sampled_from(
        [
            {"type": "function", "function": {"name": "get_weather", "description": "W.", "parameters": PARAMETERS}},
            {"function": {"parameters": PARAMETERS, "description": "T.", "name": "other"}, "type": "function"},
        ]
    ),
    max_size=2,
    unique_by=lambda tool: tool["function"]["name"],  # type: ignore[index]
)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for i in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        turn: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            turn["reasoning_content"] = turn["reasoning"] = turn["thinking"] = draw(TEXTS)
        if draw(st.booleans()):
            turn["content"] = draw(st.just("") | st.none() | TEXTS)
            turn["tool_calls"] = [
                {
                    "id": f"aerie000{i}{k}"[-9:],
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": draw(ARGUMENTS)},
                }
                for k in range(draw(st.integers(1, 2)))
            ]
            messages.append(turn)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": draw(TEXTS)}
                for call in turn["tool_calls"]
            ]
        else:
            messages.append(turn)
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(TEXTS)})
    return messages


def in_transformers(source: str, messages: list[dict[str, Any]], continued: bool, **options: Any) -> str | None:
    try:
        (text,), _ = render_jinja_template(
            [messages], chat_template=source, continue_final_message=continued, **options, **SPECIAL
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        return None
    return str(text)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_equal_those_of_transformers(templates: dict[str, str], seed: int) -> None:
    num_compared = 0
    edges = {name: (source, tokenizer_of(source), ChatTemplate(source, SPECIAL)) for name, source in templates.items()}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=40, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(conversations(), TOOLS, st.booleans(), st.booleans())
    def compare(messages: list[dict[str, Any]], tools: list[Any], begins: bool, continues: bool) -> None:
        nonlocal num_compared
        continued = continues and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        for name, (source, edge, template) in edges.items():
            options = {"add_generation_prompt": begins and not continued, "tools": tools or None}
            sent = [template._call_turns.of(turn) if turn.get("tool_calls") else turn for turn in messages]
            expected = in_transformers(source, sent, continued, **options)
            try:
                turns = [turn if turn["content"] is not None else turn | {"content": ""} for turn in messages]
                found = edge.render(turns, begins and not continued, {}, tools, continued=continued).text
            except ChatTemplateError:
                found = None
            if expected is not None:
                num_compared += 1
                assert found == expected, name

    compare()
    assert num_compared > 1000
