"""`AsyncLLM` with the embedded pair: streams, aborts, several event loops, and the same answers as `LLM`."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aerie import AsyncEngineArgs, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from aerie.deploy.offline.llm import LLM

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    torch.set_num_threads(1)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs("eagle", tensor_parallel_size=1))
    yield llm
    llm.shutdown()


def _num_requests(llm: AsyncLLM) -> int:
    return llm._engine.thread.call(lambda engine: engine.scheduler.num_running + engine.scheduler.num_waiting).result()


async def _outputs(llm: AsyncLLM, prompt: Any, sampling: SamplingParams, request_id: str = "a") -> list[Any]:
    return [output async for output in llm.generate(prompt, sampling, request_id)]


async def test_outputs_grow_or_have_the_parts_or_come_once(llm: AsyncLLM) -> None:
    common: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    grown, parts, whole = await asyncio.gather(
        _outputs(llm, "Question: What is 2 + 2?", SamplingParams(**common), "grown"),
        _outputs(llm, "Question: What is 2 + 2?", SamplingParams(**common, output_kind=DELTA), "parts"),
        _outputs(llm, "Question: What is 2 + 2?", SamplingParams(**common, output_kind=FINAL), "whole"),
    )
    (final,) = whole
    answer = final.outputs[0]
    assert final.finished and final.request_id == "whole" and len(answer.token_ids) == 40 == len(answer.logprobs)
    assert len(grown) > 1 and len(parts) > 1
    assert [each.finished for each in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(each.outputs[0].text for each in parts) == answer.text == grown[-1].outputs[0].text
    assert sum((each.outputs[0].token_ids for each in parts), ()) == answer.token_ids == grown[-1].outputs[0].token_ids
    assert [entry for each in parts for entry in each.outputs[0].logprobs] == answer.logprobs
    for before, after in zip(grown, grown[1:], strict=False):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert parts[-1].outputs[0].cumulative_logprob == answer.cumulative_logprob
    assert parts[0].outputs[0].finish_reason is None and parts[-1].outputs[0].finish_reason == "length"


async def test_several_answers_come_with_their_indices(llm: AsyncLLM) -> None:
    sampling = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    outputs = await _outputs(llm, "Once", sampling)
    texts = {answer.index: answer.text for output in outputs for answer in output.outputs}
    (whole,) = await _outputs(
        llm, "Once", SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True, output_kind=FINAL)
    )
    assert [answer.text for answer in whole.outputs] == [texts[i] for i in range(3)]
    assert [output.finished for output in outputs].count(True) == 1 and outputs[-1].finished


async def test_a_stop_text_ends_a_stream(llm: AsyncLLM) -> None:
    sampling = SamplingParams(stop="can", temperature=0.0, output_kind=DELTA, max_tokens=30)
    outputs = [output async for output in llm.chat([{"role": "user", "content": "Hello"}], sampling, "chat")]
    assert "".join(each.outputs[0].text for each in outputs) == "Hello! How "
    assert outputs[-1].finished and outputs[-1].outputs[0].stop_reason == "can"


async def test_abort_ends_the_stream_with_its_reason(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate("Count", LONG, "long"):
        outputs.append(output)
        await llm.abort(["long", "unknown"])
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 1900 and _num_requests(llm) == 0


async def test_abort_reaches_a_request_whose_prompt_is_still_encoded(llm: AsyncLLM) -> None:
    task = asyncio.create_task(_outputs(llm, "word " * 1500, LONG, "early"))
    await asyncio.sleep(0)
    assert llm._answers == {"early": []}
    await llm.abort("early")
    (output,) = await task
    assert output.finished and output.outputs[0].finish_reason == "abort" and not output.outputs[0].token_ids
    assert not llm._answers and not llm._aborted


async def test_its_other_methods_are_those_of_llm(llm: AsyncLLM) -> None:
    await _outputs(llm, "One", SamplingParams(max_tokens=2))
    assert await llm.reset_prefix_cache() and await llm.get_metrics()
    async with contextlib.aclosing(llm.generate("Count", LONG, "long", lora_request=None)) as outputs:
        await anext(outputs)
        assert not await llm.reset_prefix_cache()
    await llm.check_health()
    assert llm.is_running and (await llm.get_tokenizer()).encode("One")
    with pytest.raises(ValueError, match="^prompt_adapter_request is not supported"):
        llm.generate("x", LONG, "x", prompt_adapter_request="mine")


async def test_leaving_or_cancelling_aborts(llm: AsyncLLM) -> None:
    async with contextlib.aclosing(llm.generate("Count", LONG, "left")) as outputs:
        async for _ in outputs:
            break
    task = asyncio.create_task(_outputs(llm, "Count", LONG, "cancelled"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _num_requests(llm) == 0 and not llm._answers


async def test_a_running_id_is_refused(llm: AsyncLLM) -> None:
    async with contextlib.aclosing(llm.generate("Count", LONG, "same")) as outputs:
        await anext(outputs)
        with pytest.raises(ValueError, match="request_id='same': a running request has this id"):
            await _outputs(llm, "Count", LONG, "same")
    assert await _outputs(llm, "One", SamplingParams(max_tokens=2), "same")


async def test_invalid_requests_are_told_where_they_are_made(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="2048"):
        await _outputs(llm, "seven " * 4000, SamplingParams())
    with pytest.raises(TypeError, match="must be a text"):
        await _outputs(llm, 7, SamplingParams())
    assert not llm._answers


def test_each_event_loop_gets_its_own_outputs(llm: AsyncLLM) -> None:
    """Loops after one another, which texts that are encoded in threads must not bind, and a loop that ends early."""
    texts = [
        asyncio.run(_all(llm, ["word " * 1500] * 4, SamplingParams(max_tokens=3, temperature=0.0))) for _ in range(2)
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) == 1

    async def leave() -> None:
        task = asyncio.create_task(_outputs(llm, "Count", LONG, "left"))
        await asyncio.sleep(0.1)
        assert not task.done()

    asyncio.run(leave())
    assert _num_requests(llm) == 0


async def _all(llm: AsyncLLM, prompts: list[str], sampling: SamplingParams) -> list[str]:
    found = await asyncio.gather(*(_outputs(llm, each, sampling, str(i)) for i, each in enumerate(prompts)))
    return [outputs[-1].outputs[0].text for outputs in found]


async def test_unfinished_requests_are_told_of_the_end() -> None:
    async with AsyncLLM("eagle", tensor_parallel_size=1) as own:
        task = asyncio.create_task(_outputs(own, "Count", LONG))
        await asyncio.sleep(0.1)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await task
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await _outputs(own, "Count", LONG)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await own.check_health()


async def test_its_tokens_are_those_of_llm(llm: AsyncLLM) -> None:
    prompts = ["Once upon a time", "Question: What is 3 + 4? Answer:", "The"]
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    streamed = await _all(llm, prompts, sampling)
    with LLM("eagle", tensor_parallel_size=1) as sync:
        assert [result.outputs[0].text for result in sync.generate(prompts, sampling)] == streamed
