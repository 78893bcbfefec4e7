"""`LLM` and `AsyncLLM` with LoRA adapters, by vLLM's `LoRARequest`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie import LLM, AsyncLLM, LoRARequest, SamplingParams
from aerie.cluster.config import ConfigError
from tests.support import MODELS
from tests.support.targets.adapters import make_adapter, merged_tokens

TARGET = MODELS / "target"
PROMPTS = ["Question: What is 2 + 2? Answer:", "The capital of France is", "Tom has 3 bags"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(make_adapter(folder / name, TARGET, seed, r=16)) for seed, name in enumerate(("a", "b"), 7)}


@pytest.fixture(scope="module")
def llm(folders: dict[str, str]) -> Iterator[LLM]:
    with LLM("eagle", enable_lora=True, lora_modules={"a": folders["a"]}, max_loras=2, tensor_parallel_size=1) as llm:
        yield llm


def expected(llm: LLM, folder: str | None) -> list[list[int]]:
    ids = [llm.get_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    found: list[list[int]] = merged_tokens(TARGET, None if folder is None else Path(folder), ids, 12, -1)
    return found


def token_ids(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_each_prompt_may_have_an_adapter_which_is_loaded_at_its_first_use(llm: LLM, folders: dict[str, str]) -> None:
    none, a, b = (expected(llm, folders.get(name)) for name in ("", "a", "b"))
    assert none != a != b
    both = [LoRARequest("a", 1, folders["a"]), None, LoRARequest("b", 2, folders["b"])]
    assert token_ids(llm.generate(PROMPTS, GREEDY, lora_request=both)) == [a[0], none[1], b[2]]
    for request, tokens in ((None, none), (both[0], a), (both[2], b)):
        assert token_ids(llm.generate(PROMPTS, GREEDY, lora_request=request)) == tokens
    moved = LoRARequest("b", 2, folders["a"])
    assert token_ids(llm.generate(PROMPTS, GREEDY, lora_request=moved)) == a, "another folder is another adapter"
    (chat,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY, lora_request=both[2])
    assert chat.outputs[0].text != llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0].outputs[0].text


def test_what_cannot_be_loaded_is_refused_and_the_engine_goes_on(llm: LLM, folders: dict[str, str]) -> None:
    for name, path, message in (("c", "/nowhere", "cannot be read"), ("", folders["a"], "must not be empty")):
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest(name, 3, path))
    with pytest.raises(ValueError, match="lora_request: 2 for 3 prompts"):
        llm.generate(PROMPTS, GREEDY, lora_request=[None, None])
    odd: Any
    for odd in (["name"], "name"):
        with pytest.raises(TypeError, match="lora_request: must be a LoRARequest"):
            llm.generate(PROMPTS[:1], GREEDY, lora_request=odd)
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected(llm, None)


def test_engines_without_adapters_say_so() -> None:
    with LLM("eagle", tensor_parallel_size=1) as llm, pytest.raises(ValueError, match="start it with enable_lora"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("a", 1, "/a"))
    with pytest.raises(ConfigError, match="lora.modules.a=/nowhere: /nowhere has no adapter_config.json"):
        LLM("eagle", lora_modules={"a": "/nowhere"})


async def test_streams_of_different_adapters_share_an_engine(llm: LLM, folders: dict[str, str]) -> None:
    requests = [None, LoRARequest("a", 1, folders["a"]), LoRARequest("b", 2, folders["b"]), None]
    wanted = [expected(llm, each.lora_path if each else None)[0] for each in requests]
    async with AsyncLLM("eagle", enable_lora=True, max_loras=1, tensor_parallel_size=1) as engine:

        async def last(i: int) -> Any:
            async for output in engine.generate(PROMPTS[0], GREEDY, f"{i}", requests[i]):
                found = output
            return found

        assert token_ids(await asyncio.gather(*map(last, range(4)))) == wanted
