"""Cost of a text that is too long, and the encoded end of a truncated text."""

import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.http.text import user_text
from aerie.cluster.http.text.user_text import ChatText, TooManyTokensError, Truncation
from tests.support.edge_client import CHAT, MODEL, TEXT, in_process
from tests.support.fake_engine import EOS, FakeEngine, chat_tokenizer, says

EDGE = chat_tokenizer()
# Of an ingress whose model reads 131,072 tokens: 8 MB of random words, 4.7 million tokens of this vocabulary. On the
# former code the process grew by 1,300 MB and kept 870; now by 90 and 54. The limits leave room for other allocators.
MEASURE = """
import asyncio, random, sys
from tests.support.edge_client import *
from tests.support.fake_engine import *

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) / 256

async def main():
    rng = random.Random(1)
    text = " ".join(rng.choice(["hello", "world", "lorem", "x1"]) for _ in range(1_400_000))[:7_800_000]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    async with in_process(FakeEngine(says("x")), max_model_len=131072, max_bytes_per_token=128) as client:
        await client.post("/tokenize", json={"prompt": "hi"})
        before, most = resident_mb(), 0
        for route, body in (
            ("/tokenize", {"prompt": text}),
            (TEXT, {"prompt": text, "truncate_prompt_tokens": 100}),
            (TEXT, {"prompt": text, "truncate_prompt_tokens": -1}),
            (CHAT, chat),
            ("/v1/messages/count_tokens", chat),
        ):
            reply = asyncio.ensure_future(client.post(route, json=body, timeout=100))
            while not reply.done():
                await asyncio.sleep(0.01)
                most = max(most, resident_mb())
            print(reply.result().status_code, end=" ")
        print(round(most - before), round(resident_mb() - before))

asyncio.run(main())
"""


def test_a_body_as_large_as_may_be_takes_little_memory_on_any_route_and_gives_it_back() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=100, check=True)
    *statuses, most_mb, kept_mb = done.stdout.split()
    assert statuses == ["400", "200", "200", "400", "400"]
    assert int(most_mb) < 300 and int(kept_mb) < 150, done.stdout


def _text(num_words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["hello", "world", "x", "é", "\n", EOS, "1234"]) for _ in range(num_words))


@pytest.mark.parametrize("at_end", [True, False])
async def test_the_kept_part_of_a_long_text_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, at_end: bool) -> None:
    monkeypatch.setattr(user_text, "PIECE_CHARS", 1000)
    text = _text(30_000)
    whole = EDGE._encode(ChatText(text), False)
    for keep in (1, 7, 1000, 20_000, len(whole), len(whole) + 5):
        kept = Truncation(keep, at_end)
        tokens = await EDGE.encode(text, False, truncation=kept)
        assert kept.of(tokens) == kept.of(whole)
        if keep < 10_000:
            assert len(tokens) < keep + 4 * user_text.SLACK_TOKENS, "and hardly more is encoded"


async def test_marks_of_a_chat_stay_in_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_text, "PIECE_CHARS", 1000)
    chat = EDGE.render([{"role": "user", "content": _text(5000) + EOS}])
    kept = await EDGE.encode(chat, False, truncation=Truncation(50))
    assert kept[-50:].count(EDGE.eos_token_ids[0]) == 1


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab \n\u00e9\u5317", max_size=400), keep=st.integers(1, 60))
def test_parts_hold_the_tokens_that_are_wanted_of_them(text: str, keep: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_text, "PIECE_CHARS", 20)
        patch.setattr(user_text, "SLACK_TOKENS", 8)
        whole = EDGE._encode(ChatText(text), False)
        for kept in (Truncation(keep), Truncation(keep, at_end=False)):
            start, end = kept.part(EDGE._num_tokens, text)
            assert kept.of(EDGE._encode(ChatText(text[start:end]), False)) == kept.of(whole)


async def test_a_text_that_fits_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose cuts make many tokens of few."""
    monkeypatch.setattr(user_text, "PIECE_CHARS", 50)
    text = " world" * 4000
    assert len(await EDGE.encode(text, False, max_tokens=4000)) == 4000
    with pytest.raises(TooManyTokensError, match="more than 200 tokens"):
        await EDGE.encode("x" * 9000, False, max_tokens=100)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": "x" * 300_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 300_000}]}),
        (TEXT, {"prompt": "x" * 300_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300_000}]}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "x" * 300_000}]}),
    ],
)
async def test_every_route_has_the_bound(route: str, body: dict[str, Any]) -> None:
    for changes in ({}, {"max_bytes_per_token": 10_000}):  # by characters alone, and by pieces
        async with in_process(FakeEngine(says("x")), **changes) as client:
            reply = await client.post(route, json=body)
        assert reply.status_code == 400 and "maximum context length is 256 tokens" in reply.text
