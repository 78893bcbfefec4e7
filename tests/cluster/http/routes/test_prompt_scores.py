"""Log-probabilities of prompts in replies: OpenAI's echo and vLLM's `prompt_logprobs`."""

from typing import Any

import pytest

from tests.cluster.http.routes.test_generation import _post as post
from tests.support.edge_client import CHAT, HELLO, PROMPT, TEXT, in_process, streamed
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says, small_tokenizer

WORLD = PROMPT | {"prompt": "hello world"}
IDS = small_tokenizer().encode("hello world", add_special_tokens=False).ids  # two tokens
LONG = "hello wonderful world ää"
LONG_IDS: list[int] = small_tokenizer().encode(LONG, add_special_tokens=False).ids


def named(token: int, k: int) -> dict[str, float]:
    tokenizer = chat_tokenizer()
    names = [(tokenizer.token_bytes(t % 256).decode(errors="replace"), t) for t in range(token, token + k)]
    found: dict[str, float] = {}
    for name, other in (*names, (tokenizer.token_bytes(token).decode(errors="replace"), token)):
        found.setdefault(name, pytest.approx(-other / 100, abs=1e-5))
    return found


async def test_echo_has_the_prompts_logprobs_before_the_answers() -> None:
    body = PROMPT | {"prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": 4}
    engine = FakeEngine(says("hello", " world", finish="length"))
    (choice,) = (await post(engine, TEXT, body))["choices"]
    assert engine.calls[0].sampling.prompt_logprobs == 2
    found = choice["logprobs"]
    tokenizer = chat_tokenizer()
    ids = LONG_IDS + [small_tokenizer().token_to_id(t) for t in ("hello", "Ġworld")]
    assert choice["text"] == LONG + "hello world"
    assert found["tokens"] == [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx([-token / 100 for token in ids[1:]], abs=1e-5)
    assert found["top_logprobs"][1 : len(LONG_IDS)] == [named(token, 2) for token in LONG_IDS[1:]]
    offsets = found["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0
    assert offsets[len(LONG_IDS) :] == [len(LONG), len(LONG) + len("hello")]
    whole = [(token, offset) for token, offset in zip(found["tokens"], offsets, strict=True) if "\ufffd" not in token]
    assert all(choice["text"][offset:].startswith(token) for token, offset in whole)


@pytest.mark.parametrize("prompt", ["hello world", IDS])
async def test_max_tokens_0_with_echo_scores_the_prompt_alone(prompt: Any) -> None:
    body = WORLD | {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    engine = FakeEngine(says("hello", finish="stop"))
    reply = await post(engine, TEXT, body)
    (choice,) = reply["choices"]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == len(IDS)
    assert reply["usage"]["completion_tokens"] == 0
    assert engine.calls[0].sampling.max_tokens == 1


async def test_lm_evals_request_for_a_batch_of_token_prompts() -> None:
    """As its local-completions model sends it; it sums token_logprobs[ctxlen:-1] and reads top_logprobs there."""
    prompts = [LONG_IDS, IDS]
    body = PROMPT | {
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = (await post(FakeEngine(says("h", finish="length")), TEXT, body))["choices"]
    for choice, prompt in zip(choices, prompts, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][1:-1] == pytest.approx([-token / 100 for token in prompt[1:]], abs=1e-5)
        tops = logprobs["top_logprobs"][1:-1]
        assert [max(top.values()) for top in tops] == pytest.approx(logprobs["token_logprobs"][1:-1])


async def test_a_stream_echoes_the_logprobs_first() -> None:
    body = PROMPT | {"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 4}
    script = says("hello", " world", finish="length")
    chunks = [chunk["choices"][0] for chunk in await streamed(FakeEngine(script), TEXT, body)]
    (whole,) = (await post(FakeEngine(script), TEXT, body))["choices"]
    assert chunks[0]["text"] == LONG
    assert len(chunks[0]["logprobs"]["tokens"]) == len(LONG_IDS)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum((chunk["logprobs"][name] for chunk in chunks if chunk["logprobs"]), []) == whole["logprobs"][name]


@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_prompt_logprobs_are_vllms(route: str) -> None:
    body = (HELLO if route == CHAT else WORLD) | {"prompt_logprobs": 2}
    engine = FakeEngine(says("hello"))
    reply = await post(engine, route, body)
    holder = reply if route == CHAT else reply["choices"][0]
    places, prompt = holder["prompt_logprobs"], engine.calls[0].prompt
    assert len(places) == len(prompt) and places[0] is None
    assert "logprobs" not in holder or holder["logprobs"] is None
    tokenizer = chat_tokenizer()
    for token, place in zip(prompt[1:], places[1:], strict=True):
        own, others = place.pop(str(token)), [(token + j) % 256 for j in range(2)]
        assert own == {
            "logprob": pytest.approx(-token / 100, abs=1e-5),
            "rank": token,
            "decoded_token": tokenizer.token_bytes(token).decode(errors="replace"),
        }
        assert {int(other) for other in place} == set(others) - {token}
        assert all(entry["rank"] == others.index(int(other)) + 1 for other, entry in place.items())


async def test_prompt_logprobs_of_0_are_the_prompts_own() -> None:
    reply = await post(FakeEngine(says("hello")), TEXT, WORLD | {"prompt_logprobs": 0})
    assert [list(place) for place in reply["choices"][0]["prompt_logprobs"][1:]] == [[str(t)] for t in IDS[1:]]


async def test_nobody_who_does_not_ask_pays() -> None:
    engine = FakeEngine(says("hello"))
    for body in (WORLD, WORLD | {"echo": True}, WORLD | {"logprobs": 2}, WORLD | {"prompt_logprobs": None}):
        reply = await post(engine, TEXT, body)
        assert reply["choices"][0]["prompt_logprobs"] is None
    assert all(call.sampling.prompt_logprobs == -1 for call in engine.calls)


@pytest.mark.parametrize(
    ("route", "change", "param", "words"),
    [
        (TEXT, {"max_tokens": 0}, "max_tokens", "echo: true"),
        (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream"),
        (TEXT, {"prompt_logprobs": 20}, "prompt_logprobs", "ingress.max_prompt_logprobs"),
        (TEXT, {"echo": True, "logprobs": 20}, "logprobs", "ingress.max_prompt_logprobs"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ],
)
async def test_refusals_name_the_remedy(route: str, change: dict[str, Any], param: str, words: str) -> None:
    body = (HELLO if route == CHAT else PROMPT | {"prompt": LONG}) | change
    async with in_process(FakeEngine(says("hello")), max_prompt_logprobs=40) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param and words in error["message"]
