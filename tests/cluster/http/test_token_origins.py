"""Which tokens were drafted and which are the target's own: from a round's result to the reply."""

from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.ingress.attempts import RequestStream
from aerie.cluster.transport.messages import TokenDelta
from tests.support.cluster import TestBed
from tests.support.edge_client import CHAT, HELLO, PROMPT, TEXT, events, in_process
from tests.support.fake_engine import EOS, FakeEngine, small_tokenizer

ASK = {"return_token_origins": True}


def _ids(text: str) -> tuple[int, ...]:
    return tuple(small_tokenizer().encode(text, add_special_tokens=False).ids)


def _engine() -> FakeEngine:
    """Says "hello world ä!": the prompt's token, a round with a drafted token, one that cuts a character, the end."""
    split = _ids(" ä!")
    assert len(split) == 3
    eos = small_tokenizer().token_to_id(EOS)
    deltas = [
        TokenDelta("", _ids("hello"), drafted=(False,)),
        TokenDelta("", (*_ids(" world"), split[0]), drafted=(True, False)),
        TokenDelta("", (*split[1:], eos), "stop", drafted=(True, True, False)),
    ]
    return FakeEngine(lambda prompt, sampling: deltas)


ORIGINS = [("hello", False), (" world", True), (" ", False), ("ä", True), ("!", True), ("", False)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("route", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_reply_says_of_each_token_how_it_came(route: str, body: dict[str, Any], stream: bool) -> None:
    engine = _engine()
    async with in_process(engine) as client:
        reply = await client.post(route, json=body | ASK | {"stream": stream})
    chunks = events(reply.text) if stream else [reply.json()]
    found = [origin for chunk in chunks for choice in chunk["choices"] for origin in choice.get("token_origins", [])]
    assert [(origin["text"], origin["drafted"]) for origin in found] == ORIGINS
    assert [call.token_origins for call in engine.calls] == [True]


async def test_without_asking_nothing_is_said() -> None:
    engine = FakeEngine(lambda prompt, sampling: [TokenDelta("", _ids("hello"), "length")])
    async with in_process(engine) as client:
        for body in (HELLO, HELLO | {"stream": True}, HELLO | {"return_token_origins": False}):
            assert "token_origins" not in (await client.post(CHAT, json=body)).text
    assert not any(call.token_origins for call in engine.calls)


async def test_tokens_after_a_stop_string_are_left_out() -> None:
    async with in_process(_engine()) as client:
        reply = await client.post(CHAT, json=HELLO | ASK | {"stop": "world"})
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] == "hello "
    assert [(origin["text"], origin["drafted"]) for origin in choice["token_origins"]] == ORIGINS[:2]


async def test_unfinished_character_is_its_last_tokens_text() -> None:
    half = _ids(chr(0x2603))[:1]  # a token of one byte of three
    async with in_process(FakeEngine(lambda p, s: [TokenDelta("", half, "length", drafted=(True,))])) as client:
        choice = (await client.post(CHAT, json=HELLO | ASK)).json()["choices"][0]
    assert choice["token_origins"] == [{"text": "\ufffd", "drafted": True}]
    assert choice["message"]["content"] == "\ufffd"


async def test_deltas_that_wait_for_their_reader_keep_their_origins() -> None:
    stream = RequestStream()
    stream.put(TokenDelta("q", (1, 2), drafted=(True, False)))
    stream.put(TokenDelta("q", (3,), "length", drafted=(False,)))
    taken = stream.take("client")
    assert taken is not None and taken.tokens == (1, 2, 3) and taken.drafted == (True, False, False)
    stream.put(TokenDelta("q", (4,), drafted=(True,)))
    later = stream.take("client")
    assert later is not None and later.drafted == (True,)


@pytest.mark.parametrize("asked", [True, False])
def test_coordinator_tells_origins_if_asked(tmp_path: Path, asked: bool) -> None:
    """All tokens of a round but the last were drafted; if the request's end cut the round, all may be."""
    bed = TestBed(tmp_path)
    try:
        bed.attach()
        bed.generate("q", max_tokens=30, seed=3, token_origins=asked)
        bed.ingress.read_end("q")
        _, first, *rounds = bed.ingress.deltas["q"]  # the very first says that it is queued
    finally:
        bed.close()
    if not asked:
        assert not any(delta.drafted for delta in (first, *rounds))
        return
    assert first.drafted == (False,) and len(rounds) > 3
    *whole, last = rounds
    for delta in whole:
        assert delta.drafted == (*[True] * (len(delta.tokens) - 1), False)
    assert len(last.drafted) == len(last.tokens) and last.speculation is not None
    histogram = last.speculation.histogram
    accepted = sum(count * k for k, count in enumerate(histogram))
    num_drafted = sum(sum(delta.drafted) for delta in rounds)
    assert 0 < num_drafted <= accepted < num_drafted + len(histogram)  # the last round's accepted tokens may be cut
