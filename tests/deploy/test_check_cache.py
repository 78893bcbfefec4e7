"""`aerie check-cache` over real servers: engines whose cache is right, is wrong, or is not there."""

import asyncio
from collections.abc import Iterator

import pytest

from aerie.cluster.transport.messages import FlushOutcome, TokenDelta
from aerie.deploy.cli import main
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.edge_client import served
from tests.support.fake_engine import FakeEngine, Step, small_tokenizer

PAGE = 16
LETTERS = [small_tokenizer().token_to_id(chr(97 + i)) for i in range(26)]
OPTIONS = ["--words", "24", "--max-tokens", "8", "--conversations", "2", "--concurrency", "2"]


class CachingEngine(FakeEngine):
    """An engine whose answer is a function of the whole prompt. lost: tokens before the end of what its cache had of a
    prompt that do not reach the answer, as where a state of an earlier position is taken."""

    def __init__(self, lost: int = 0, heeds_salt: bool = True, caches: bool = True) -> None:
        super().__init__(self._answer)
        self._lost, self._heeds_salt, self._caches = lost, heeds_salt, caches
        self._known: set[tuple[bytes, tuple[int, ...]]] = set()

    def _answer(self, prompt: list[int], sampling: SamplingParams) -> Iterator[Step]:
        salt = sampling.cache_salt if self._heeds_salt else b""
        cached = 0
        for end in range(PAGE, len(prompt), PAGE):
            key = salt, tuple(prompt[:end])
            if key in self._known:
                cached = end
            elif self._caches:
                self._known.add(key)
        seen = prompt[: max(0, cached - self._lost)] + prompt[cached:]
        first = sum((i + 1) * token for i, token in enumerate(seen))
        ids = tuple(LETTERS[(first + 7 * i) % 26] for i in range(sampling.max_tokens))
        yield TokenDelta("", ids, "length", cached_tokens=cached)

    async def flush_cache(self) -> list[FlushOutcome]:
        self._known.clear()
        return await super().flush_cache()


async def check(engine: FakeEngine, *options: str) -> int:
    async with served(engine, max_model_len=4096) as url:
        return await asyncio.to_thread(main, ["check-cache", url, *OPTIONS, *options])


@pytest.mark.parametrize("off", ["salt", "flush"])
async def test_a_right_cache_passes(off: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(CachingEngine(), "--off", off) == 0
    out = capsys.readouterr().out
    assert f"0 of 22 answers differ from those without the cache (off by {off})" in out
    assert "A again" in out and "fork of A" in out


@pytest.mark.parametrize("off", ["salt", "flush"])
async def test_a_state_of_an_earlier_position_is_caught(off: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(CachingEngine(lost=1), "--off", off, "--show", "1") == 1
    out = capsys.readouterr().out
    assert "from character 0 on" in out and "prompt tokens cached" in out and out.count("without  '") == 1


async def test_a_server_that_ignores_the_salt_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(CachingEngine(heeds_salt=False)) == 2
    assert "ignores cache_salt: use --off flush" in capsys.readouterr().err


async def test_a_cache_that_is_never_hit_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(CachingEngine(caches=False)) == 2
    assert "the cache was never hit, so nothing was checked" in capsys.readouterr().err


def test_without_a_server_the_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-cache", "http://127.0.0.1:9"]) == 2
    assert "no server answers" in capsys.readouterr().err
