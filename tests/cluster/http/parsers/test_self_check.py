"""The check of chat template and parser at every start: what does not work is said in a line."""

import pytest

from aerie.cluster.http.parsers.self_check import chat_lines, check_parser, chosen_parser, findings
from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.fake_engine import EOS, small_tokenizer

TOOLS = "{% if tools %}{{ tools | tojson }} <tool_call> arguments\n{% endif %}"
CALL = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
CALLS = "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + END
)
NO_THOUGHT = "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
CASES = {
    "all works": (HERMES, []),
    "tools": (HERMES.replace("if tools", "if my_tools"), ["tools"]),
    "no call": (HERMES.replace(CALLS, ""), ["call"]),
    "no call beside text": (HERMES.replace(CALLS, "{% if not m.content %}" + CALLS + "{% endif %}"), ["text"]),
    "no text beside a call": (HERMES.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), ["text"]),
    "no results": (HERMES.replace("in messages", "in messages if m.role != 'tool'"), ["result"]),
    "another form of calls": (HERMES.replace('"arguments": {{', '"values": {{'), ["read"]),
    "no parser": (HERMES.replace("tool_call>", "my_call>"), ["parser"]),
    "unknown reasoning": (
        HERMES.replace("assistant\n{% endif %}", "assistant\n<my_think>{% endif %}"),
        ["marks", "switch"],
    ),
    "reasoning always": (HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"), ["switch"]),
    "reasoning by a switch": (HERMES.replace("assistant\n{% endif %}", "assistant\n" + NO_THOUGHT), []),
    "questions": ("{{ messages[0].title + 'x' }}", ["chat"]),
}


def tokenizer_of(template: str) -> ChatTokenizer:
    tokenizer = small_tokenizer()
    return ChatTokenizer(tokenizer, ChatTemplate(template, {}) if template else None, (tokenizer.token_to_id(EOS),))


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_work_is_found(name: str) -> None:
    template, expected = CASES[name]
    tokenizer = tokenizer_of(template)
    parser = "text" if name in ("no parser", "questions") else "hermes"
    found = findings(tokenizer, parser)  # type: ignore[arg-type]
    assert [finding.check for finding in found] == expected
    assert chat_lines(tokenizer, parser)[1:] == [finding.text for finding in found]  # type: ignore[arg-type]


def test_summary_names_parser_tools_and_variables() -> None:
    (line,) = chat_lines(tokenizer_of(CASES["reasoning by a switch"][0]), "auto")
    assert line == "parser hermes; tools shown and read; reasoning_effort sets enable_thinking"
    assert chat_lines(tokenizer_of(""), "auto")[1] == "chats are refused: the model has no chat template"


def test_parser_that_finds_no_call_of_the_template_is_not_chosen() -> None:
    assert chosen_parser(tokenizer_of(HERMES), "auto") == "hermes"
    other = HERMES.replace(CALL, "<call>{{ c.function.name }} {{ c.function.arguments }}</call>")
    assert chosen_parser(tokenizer_of(other), "auto") == "text"
    assert chosen_parser(tokenizer_of(other + "{# </think> #}"), "auto") == "think"
    assert chosen_parser(tokenizer_of(other), "hermes") == "hermes"


def test_configured_parser_needs_tools_in_the_prompt() -> None:
    without = tokenizer_of(CASES["tools"][0].replace("<tool_call> arguments", ""))
    check_parser(without, "auto")
    check_parser(without, "hermes")  # found from the template: it may be there for reasoning
    check_parser(tokenizer_of(HERMES), "mistral")
    with pytest.raises(ValueError, match=r"output_parser=mistral: reads tool calls, but .* \(hermes\)"):
        check_parser(without, "mistral")
