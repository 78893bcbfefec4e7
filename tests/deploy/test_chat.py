"""`aerie chat` over a real server with a scripted engine: what is shown, kept and asked for."""

import argparse
import asyncio
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.routing import Mount

from aerie.cluster.config import ConfigError
from aerie.cluster.transport.messages import SpeculationStats, TokenDelta
from aerie.deploy.bench.arrivals import Arrival
from aerie.deploy.bench.load import Target, run_rate
from aerie.deploy.chat import CommandError, Conversation, chat
from aerie.deploy.cli import main
from aerie.deploy.client import Server, parse_server
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.edge_client import MODEL, served
from tests.support.fake_engine import EOS, FakeEngine, Step, small_tokenizer

GREEN, MAGENTA = "\x1b[32m", "\x1b[35m"


def _script(prompt: list[int], sampling: SamplingParams) -> Iterator[Step]:
    ids = small_tokenizer().encode("hello world[b]\x1b", add_special_tokens=False).ids
    yield TokenDelta("", (ids[0],), drafted=(False,))
    yield 0.02
    yield TokenDelta("", tuple(ids[1:]), drafted=(True,) * (len(ids) - 1))
    yield 0.02
    stats = SpeculationStats(2, (1, 0, 1), 2, 4)
    last = (small_tokenizer().token_to_id(EOS),)
    yield TokenDelta("", last, "stop", cached_tokens=0, speculation=stats, drafted=(False,))


def _lines(*lines: str | BaseException) -> Callable[[], str]:
    left = iter((*lines, EOFError()))

    def read() -> str:
        line = next(left)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


async def _chat(engine: FakeEngine, conversation: Conversation, *lines: str | BaseException, key: str = "") -> str:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=200, highlight=False)
    async with served(engine, max_model_len=2048, api_keys=(key,) if key else ()) as url:
        code = await asyncio.to_thread(chat, Server(url, key), conversation, console, _lines(*lines))
    assert code == 0
    return shown.getvalue()


async def test_tokens_are_coloured_by_origin_and_figures_follow() -> None:
    engine = FakeEngine(_script)
    text = await _chat(engine, Conversation(MODEL), "hi", key="first-key")
    assert f"{MAGENTA}hello\x1b[0m{GREEN} world\x1b[0m" in text and f"{GREEN}[\x1b[0m" in text
    assert "\x1b\x1b" not in text and "\ufffd" in text, "what a model writes does not command the terminal"
    assert "2.00 tokens a round · accepted by position 50% 50%" in text and "tokens/s" in text


async def test_history_and_settings_go_with_the_next_question() -> None:
    engine = FakeEngine(_script)
    conversation = Conversation(MODEL, system="be brief")
    lines = ("one", "/spec off", "/temp 0.5", "/max 7", "/seed 9", "two", "/clear", KeyboardInterrupt(), "three", "/x")
    text = await _chat(engine, conversation, *lines)
    prompts = [small_tokenizer().decode(call.prompt, skip_special_tokens=False) for call in engine.calls]
    assert "one" in prompts[1] and "hello world[b]" in prompts[1] and "two" in prompts[1]
    assert "one" not in prompts[2] and all("be brief" in prompt for prompt in prompts)
    first, second, _ = (call.sampling for call in engine.calls)
    assert first.speculative and first.temperature == 0
    assert (second.speculative, second.temperature, second.max_tokens, second.seed) == (False, 0.5, 7, 9)
    assert "/x: no such command; /help lists them" in text


def test_a_picture_goes_with_the_next_line(tmp_path: Path) -> None:
    (tmp_path / "a b.JPG").write_bytes(b"picture")
    conversation = Conversation(MODEL)
    assert "goes with the next line" in conversation.command(f"/image {tmp_path}/a b.JPG")
    (message,) = conversation.body("what?")["messages"]
    image, text = message["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,cGljdHVyZQ=="}}
    assert text == {"type": "text", "text": "what?"}
    conversation.keep("what?", "a cat")
    messages = conversation.body("sure?")["messages"]
    assert messages[0] == message and messages[-1]["content"] == "sure?"


async def test_an_error_is_shown_and_forgotten() -> None:
    failing = [TokenDelta("", (64,), drafted=(False,)), TokenDelta("", (), "error", error="rank 1 died")]
    scripts: list[list[Step]] = [list(failing), list(_script([], SamplingParams(1)))]
    engine = FakeEngine(lambda prompt, sampling: scripts.pop(0))
    text = await _chat(engine, Conversation(MODEL), "one", "two")
    assert "The engine failed" in text
    assert "one" not in small_tokenizer().decode(engine.calls[1].prompt)


async def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C raises KeyboardInterrupt wherever the main thread is; here while the second event is pushed."""
    from aerie.deploy.chat import StreamedAnswer

    push, pushed = StreamedAnswer.push, 0

    def interrupted(self: StreamedAnswer, chunk: dict[str, object], now_s: float) -> Iterator[tuple[str, bool | None]]:
        nonlocal pushed
        pushed += bool(chunk["choices"][0].get("token_origins"))  # type: ignore[index]
        if pushed == 2:
            raise KeyboardInterrupt
        return push(self, chunk, now_s)

    monkeypatch.setattr(StreamedAnswer, "push", interrupted)
    engine = FakeEngine(lambda p, s: [*list(_script(p, s))[:3], 60.0])
    conversation = Conversation(MODEL)
    text = await _chat(engine, conversation, "hi")
    assert "stopped · 1 tokens, 0 drafted" in text
    assert conversation.messages[-1] == {"role": "assistant", "content": "hello"}
    assert len(engine.closed) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/spec", "on or off"),
        ("/temp hot", "a number from 0 to 2"),
        ("/temp 3", "a number from 0 to 2"),
        ("/temp nan", "a number from 0 to 2"),
        ("/max -1", "a number from 0"),
        ("/what", "/what: no such command"),
        ("/image notes.txt", "a file that ends with .png"),
        ("/image /none.png", "cannot be read: No such file"),
    ],
)
def test_commands_that_cannot_be_carried_out_say_why(line: str, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        Conversation(MODEL).command(line)


def test_no_server_and_no_url_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "bench"):
        assert main([command, "127.0.0.1:9"]) == 2
        assert "http://127.0.0.1:9: no server answers" in capsys.readouterr().err
        assert main([command, "ftp://x"]) == 2
        assert "must be a server's URL" in capsys.readouterr().err


async def test_a_server_below_a_path() -> None:
    """Its URL as `aerie serve` prints it, and as clients of OpenAI's have it."""
    async with served(FakeEngine(_script), around=lambda app: Starlette(routes=[Mount("/team/chat", app)])) as url:
        for given in (f"{url}/team/chat", f"{url}/team/chat/v1/"):
            server = parse_server(argparse.Namespace(url=given, key=""))
            assert (await asyncio.to_thread(server.model))["id"] == MODEL
        answers, _ = await run_rate(Target(server.url, MODEL, {}, ""), [Arrival(0.0, (1, 2), 3)], 10)
        assert [(answer.fault, answer.num_tokens > 0) for answer in answers] == [("", True)]


async def test_wrong_key_and_wrong_model_name_the_remedy() -> None:
    async with served(FakeEngine(_script), api_keys=("first-key",)) as url:
        with pytest.raises(ConfigError, match="AERIE_API_KEY"):
            await asyncio.to_thread(Server(url, "wrong").model)
        with pytest.raises(ConfigError, match=f"--model other: {url} serves {MODEL}"):
            await asyncio.to_thread(Server(url, "first-key").model, "other")
