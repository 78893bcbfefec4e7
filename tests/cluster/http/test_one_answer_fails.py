"""Whatever the edge does for one request may fail: that request ends with an error, whole or as an event of its stream,
and those beside it end as if nothing had been."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aerie.cluster.http.answer import PromptScores
from aerie.cluster.http.parsers.output_parser import TextParser
from aerie.cluster.http.replies.reply import ReplyContext
from aerie.cluster.http.text.detokenizer import ByteLevelDetokenizer, StopMatcher
from tests.support.edge_client import CHAT, HELLO, PROMPT, TEXT, events, in_process
from tests.support.fake_engine import FakeEngine, says

PARTS: list[tuple[str, type, str]] = [
    ("detokenising", ByteLevelDetokenizer, "step"),
    ("the last of detokenising", ByteLevelDetokenizer, "flush"),
    ("stop strings", StopMatcher, "push"),
    ("usage", ReplyContext, "usage"),
    ("metrics", ReplyContext, "metrics"),
    ("scores of a prompt", PromptScores, "push"),
    ("calls and reasoning", TextParser, "push"),
]
BODY = {"max_tokens": 20, "stop": ["zzz"]}
WHOLE, STREAMED = {"prompt_logprobs": 1}, {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("kind,method", [each[1:] for each in PARTS], ids=[each[0] for each in PARTS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_in_one_answer_is_told_there_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, stream: bool
) -> None:
    if stream and kind is PromptScores:
        pytest.skip("streams have no scores of prompts")
    original: Callable[..., Any] = getattr(kind, method)
    chosen: list[object] = []

    def raising(self: object, *arguments: Any) -> Any:
        if not chosen:
            chosen.append(self)
        if chosen[0] is self:
            raise RuntimeError("/secret")
        return original(self, *arguments)

    monkeypatch.setattr(kind, method, raising)
    body = BODY | (STREAMED if stream else WHOLE)
    route, body = (CHAT, HELLO | body) if kind is TextParser else (TEXT, PROMPT | body)
    engine = FakeEngine(says("he", "llo ", "world", delay_s=0.01))
    async with in_process(engine) as client:
        asked = [client.post(route, json=body) for _ in range(3)]
        replies = await asyncio.gather(*asked)
    assert chosen, "the part was not used"
    failed = [reply for reply in replies if "internal_error" in reply.text]
    assert len(failed) == 1 and "secret" not in failed[0].text, [reply.text for reply in replies]
    for reply in replies:
        if reply is not failed[0]:
            assert reply.status_code == 200 and "error" not in reply.text
            if stream:
                assert reply.text.endswith("data: [DONE]\n\n")
        elif stream and reply.status_code == 200:
            assert "error" in events(reply.text)[-1]
        else:
            assert reply.status_code == 500
    assert engine.num_active == 0
