"""`thinking_token_budget`: thinking ends after so many tokens, the answer goes on, nothing is lost or said
twice."""

from typing import Any

import pytest

from aerie.cluster.transport.messages import TokenDelta
from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import CHAT, HELLO, events, in_process
from tests.support.fake_engine import EOS, FakeEngine, Step, logprobs_of, small_tokenizer

THINKS = HELLO | {"chat_template_kwargs": {"enable_thinking": True}}
THOUGHT, ANSWER = "so be it or", "yes it is"
EOS_ID = small_tokenizer().token_to_id(EOS)


def _ids(text: str) -> list[int]:
    return list(small_tokenizer().encode(text, add_special_tokens=False).ids)


def thinker(chunk: int, begins: str = "") -> Any:
    """A model that thinks THOUGHT unless its prompt ends its thinking, and then says ANSWER, `chunk` tokens at a time.
    begins: what opens its thinking, where the prompt does not."""

    def script(tokens: list[int], sampling: Any) -> list[Step]:
        text = small_tokenizer().decode(tokens)
        done = "</think>" in text
        answer = [*_ids(ANSWER if done else f"{begins}{THOUGHT}</think>{ANSWER}"), EOS_ID]
        steps: list[Step] = [TokenDelta("", ())]
        for at in range(0, len(answer), chunk):
            part = tuple(answer[at : at + chunk])
            finish = "stop" if at + chunk >= len(answer) else None
            steps.append(TokenDelta("", part, finish, logprobs_of(part, sampling), drafted=(True,) * len(part)))
        return steps

    return script


async def ask(engine: FakeEngine, body: dict[str, Any], stream: bool) -> tuple[str, str, list[int], dict[str, Any]]:
    """(reasoning, content, tokens, usage)."""
    body = body | {"stream": stream, "return_token_ids": True, "logprobs": True, "return_token_origins": True}
    if stream:
        body |= {"stream_options": {"include_usage": True}}
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        choice = reply.json()["choices"][0]
        message = choice["message"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len(choice["token_origins"])
        return message["reasoning"] or "", message["content"], choice["token_ids"], reply.json()["usage"]
    chunks = events(reply.text)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    joined = ["".join(each["delta"].get(name, "") for each in choices) for name in ("reasoning", "content")]
    tokens = sum((each.get("token_ids", []) for each in choices), [])
    return joined[0], joined[1], tokens, chunks[-1]["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("budget", [0, 1, 3, 7])
async def test_thinking_ends_after_its_budget_however_tokens_come(stream: bool, chunk: int, budget: int) -> None:
    engine = FakeEngine(thinker(chunk))
    reasoning, content, tokens, usage = await ask(engine, THINKS | {"thinking_token_budget": budget}, stream)
    thought = _ids(THOUGHT)[:budget]
    assert tokens == [*thought, *_ids("</think>"), *_ids(ANSWER), EOS_ID]
    assert reasoning.strip() == small_tokenizer().decode(thought).strip() and content == ANSWER
    assert usage["completion_tokens"] == len(tokens)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(_ids(reasoning))
    assert engine.calls[-1].output == (*thought, *_ids("</think>"))
    assert engine.num_active == 0 and len(engine.calls) == (1 if budget == 0 else 2)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("budget", [-1, None, 500])
async def test_a_budget_that_is_not_spent_changes_nothing(chunk: int, budget: int | None) -> None:
    engine = FakeEngine(thinker(chunk))
    plain = await ask(FakeEngine(thinker(chunk)), THINKS, True)
    assert await ask(engine, THINKS | {"thinking_token_budget": budget}, True) == plain
    assert len(engine.calls) == 1


async def test_thinking_that_the_model_opens_itself_has_a_budget_too() -> None:
    engine = FakeEngine(thinker(4, "<think>"))
    reasoning, content, _, _ = await ask(engine, HELLO | {"thinking_token_budget": 3}, False)
    assert reasoning.strip() == small_tokenizer().decode(_ids(THOUGHT)[:3]).strip() and content == ANSWER


async def test_answers_without_thinking_are_as_without_a_budget() -> None:
    answer = (*_ids("plain text"), EOS_ID)

    def script(tokens: list[int], sampling: Any) -> list[Step]:
        return [TokenDelta("", answer, "stop", logprobs_of(answer, sampling), drafted=(True,) * len(answer))]

    engine = FakeEngine(script)
    _, content, _, _ = await ask(engine, HELLO | {"thinking_token_budget": 2}, False)
    assert content == "plain text" and len(engine.calls) == 1


@pytest.mark.parametrize(
    ("extra", "config"),
    [({}, {"output_parser": "text"}), ({}, {"output_parser": "harmony"}), ({"separate_reasoning": False}, {})],
)
async def test_a_budget_that_cannot_be_kept_is_refused(extra: dict[str, Any], config: dict[str, Any]) -> None:
    body = HELLO | {"thinking_token_budget": 2} | extra
    async with in_process(FakeEngine(thinker(1)), tool_tokenizer(), max_model_len=4096, **config) as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in ("thinking_token_budget", "separate_reasoning")


async def test_anthropics_budget_is_the_same() -> None:
    engine = FakeEngine(thinker(3))
    body = HELLO | {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 3}}
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = (await client.post("/v1/messages", json=body)).json()
    thinking, text = reply["content"]
    assert thinking["thinking"].strip() == small_tokenizer().decode(_ids(THOUGHT)[:3]).strip()
    assert text["text"] == ANSWER
