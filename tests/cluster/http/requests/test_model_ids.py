"""Ids that a model emits but its tokenizer does not know (padded rows, placeholders) come back to it: token in, token
out. The bound of ids is the model's vocabulary, as vLLM's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.deploy.checks import _check_tokenizer
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.mask_process.matcher import Matcher
from aerie.workers.structured_output.mask_process.trial import try_grammar
from tests.support.edge_client import CHAT, HELLO, PROMPT, TEXT, in_process
from tests.support.fake_engine import CHATML, EOS, FakeEngine, says, small_tokenizer

KNOWN = max(small_tokenizer().get_vocab().values()) + 1
IDS = KNOWN + 10  # of the model
LAST, BEYOND = IDS - 1, IDS


def tokenizer() -> ChatTokenizer:
    ends = (small_tokenizer().token_to_id(EOS),)
    return ChatTokenizer(small_tokenizer(), ChatTemplate(CHATML, {"eos_token": EOS}), ends, num_model_ids=IDS)


def bodies(token: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        (TEXT, PROMPT | {"prompt": [5, token]}),
        (TEXT, PROMPT | {"prompt": [[5, token], [token]], "echo": True}),
        (CHAT, HELLO | {"input_ids": [token]}),
        ("/generate", {"input_ids": [token, 5]}),
        ("/detokenize", {"tokens": [70, token]}),
        (TEXT, PROMPT | {"allowed_token_ids": [token]}),
        (TEXT, PROMPT | {"logit_bias": {str(token): 1}}),
    ]


async def test_ids_of_the_model_are_taken_everywhere() -> None:
    engine = FakeEngine(says("x", tokenizer=small_tokenizer()))
    async with in_process(engine, tokenizer()) as client:
        for route, body in bodies(LAST):
            reply = await client.post(route, json=body)
            assert reply.status_code == 200, (route, body, reply.text)
        await client.post(TEXT, json=PROMPT | {"stop_token_ids": [LAST, BEYOND]})
    assert [call.prompt for call in engine.calls[:5]] == [[5, LAST], [5, LAST], [LAST], [LAST], [LAST, 5]]
    assert engine.calls[-2].sampling.logit_bias == {LAST: 1.0}
    assert LAST in engine.calls[-1].sampling.stop_token_ids and BEYOND not in engine.calls[-1].sampling.stop_token_ids


async def test_ids_beyond_the_model_are_refused_everywhere() -> None:
    async with in_process(FakeEngine(says("x")), tokenizer()) as client:
        for route, body in bodies(BEYOND):
            reply = await client.post(route, json=body)
            assert reply.status_code == 400 and f"from 0 to {LAST}" in reply.text, (route, body, reply.text)


def test_unknown_ids_have_no_text() -> None:
    edge = tokenizer()
    known = small_tokenizer().encode("hello", add_special_tokens=False).ids
    assert edge.decode([*known, LAST, *known]) == "hellohello"
    detokenizer = edge.detokenizer(skip_special_tokens=False)
    assert "".join(map(detokenizer.step, [*known, LAST])) == "hello" and edge.token_bytes(LAST) == b""


def saved(folder: Path, config: dict[str, Any]) -> Path:
    small_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"vocab_size": IDS}, IDS),
        ({"vocab_size": 9, "text_config": {"vocab_size": IDS}}, IDS),
        ({"text_config": {}, "vocab_size": IDS}, IDS),
        ({}, KNOWN),
        ({"vocab_size": None}, KNOWN),
    ],
)
def test_the_number_of_ids_is_the_models(config: dict[str, Any], count: int, tmp_path: Path) -> None:
    assert ChatTokenizer.from_folder(saved(tmp_path, config)).num_ids == count


@pytest.mark.parametrize(("num_embedded", "fault"), [(KNOWN - 1, "its tokenizer has"), (IDS - 1, "config.json says")])
def test_ids_without_an_embedding_are_refused_at_the_start(num_embedded: int, fault: str, tmp_path: Path) -> None:
    model = SimpleNamespace(path=str(saved(tmp_path, {"vocab_size": IDS})))
    ingress = SimpleNamespace(chat_template="", output_parser="auto", sampling_defaults={})
    config: Any = SimpleNamespace(model=model, ingress=ingress)
    with pytest.raises(ValueError, match=fault):
        _check_tokenizer(config, num_embedded)
    _check_tokenizer(config, IDS)


def test_a_grammar_of_an_unknown_id_can_be_used(tmp_path: Path) -> None:
    token = {"type": "token", "token": LAST}
    text = json.dumps({"type": "structural_tag", "format": {"type": "plus", "content": token}})
    grammar = Grammar("structural_tag", text, (small_tokenizer().token_to_id(EOS),))
    vocabulary = Vocabulary(saved(tmp_path, {}), IDS)
    assert try_grammar(grammar, vocabulary).fault == ""
    text = json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})
    matcher = Matcher(GrammarCompiler(vocabulary).compile(Grammar("structural_tag", text, grammar.end_token_ids)))
    assert not matcher.take(LAST), "an unknown id is no text"


@pytest.mark.parametrize(("limit", "status"), [(129, 200), (128, 400)])
@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/v1/responses"])
async def test_the_number_of_tools_is_the_servers_to_say(route: str, limit: int, status: int) -> None:
    def tool(i: int) -> dict[str, Any]:
        schema = {"type": "object", "properties": {}}
        match route:
            case "/v1/messages":
                return {"name": f"f{i}", "input_schema": schema}
            case "/v1/responses":
                return {"type": "function", "name": f"f{i}", "parameters": schema}
        return {"type": "function", "function": {"name": f"f{i}", "parameters": schema}}

    shown = CHATML + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    edge = ChatTokenizer(small_tokenizer(), ChatTemplate(shown, {"eos_token": EOS}), tokenizer().eos_token_ids)
    body = {
        "model": HELLO["model"],
        "messages": HELLO["messages"],
        "input": "a",
        "max_tokens": 5,
        "tools": [tool(i) for i in range(129)],
    }
    body.pop("messages" if route == "/v1/responses" else "input")
    if route == "/v1/responses":
        body.pop("max_tokens")
    config = {"max_tools": limit, "output_parser": "hermes", "max_model_len": 4096}
    async with in_process(FakeEngine(says("x")), edge, **config) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == status, reply.text
    assert status == 200 or "ingress.max_tools" in reply.text
