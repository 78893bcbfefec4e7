"""`AsyncLLM`: answers one request at a time in an event loop, with the interface of vLLM's `AsyncLLM`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aerie.deploy.offline.engine import EngineArgs, OfflineEngine, check_others, refused_method
from aerie.deploy.offline.engine_thread import EngineDeadError
from aerie.deploy.offline.outputs import Metric, RequestOutput, RunningAnswer, request_output
from aerie.deploy.offline.prompts import LoRARequest, Messages, Prompt, prompt_of
from aerie.deploy.offline.sampling_params import RequestOutputKind, SamplingParams, checked_params


class AsyncLLM:
    """An engine whose requests run concurrently, each an async generator of outputs. Several event loops may use it.

    async with AsyncLLM("eagle") as llm:
        async for output in llm.generate("Two and two", SamplingParams(), "1"):
            print(output.outputs[0].text)
    """

    def __init__(
        self, model: str | Path = "eagle", *, draft: str | None = None, revision: str | None = None, **options: Any
    ) -> None:
        """Load the model, which blocks the event loop. For the arguments, see `aerie.deploy.offline.llm.LLM`."""
        self._engine = OfflineEngine(model, draft, revision, options)
        self._answers: dict[str, list[RunningAnswer]] = {}
        self._aborted = set[str]()  # before they had answers

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """Build the engine of these arguments."""
        return cls(engine_args.model, **engine_args.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    if not TYPE_CHECKING:  # type checkers then know what there is

        def __getattr__(self, name: str) -> Any:
            raise refused_method(type(self).__name__, name)

    def shutdown(self) -> None:
        """End the engine; unfinished requests raise EngineDeadError."""
        self._engine.thread.close()

    @property
    def is_running(self) -> bool:
        """Whether the engine answers."""
        return not self._engine.thread.fault

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine was shut down or has failed."""
        if fault := self._engine.thread.fault:
            raise EngineDeadError(fault)

    async def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, one of transformers."""
        return self._engine.transformers_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `LLM.get_default_sampling_params` does."""
        return self._engine.default_sampling_params()

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False, and change nothing, while requests run."""
        return await asyncio.to_thread(self._engine.reset_prefix_cache)

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, as /metrics of a server has them."""
        return await asyncio.to_thread(self._engine.metrics)

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the answers to a prompt: an async generator of outputs, the last of which is `finished`.

        prompt: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: `output_kind` says what each output contains. Outputs of several answers (`n`) have the answers
            that changed; with FINAL_ONLY, all.
        request_id: id for `abort`; no other running request may have it.
        lora_request: the prompt's LoRA adapter, loaded at its first use. Needs enable_lora.
        others: parameters of vLLM's that have no effect, such as priority=0.

        A slow caller gets fewer and larger outputs. Closing the generator, or cancelling its task, aborts the request.
        Raises TypeError or ValueError for an invalid request, EngineDeadError if the engine has ended.
        """
        check_others("generate", others)

        async def prepared() -> Prompt:
            return prompt_of(prompt)

        return self._outputs(prepared(), sampling_params, request_id, lora_request)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the answers to a conversation; see `generate` and `LLM.chat`."""

        async def prepared() -> Prompt:
            options = (tools, chat_template_kwargs, add_generation_prompt, continue_final_message)
            (prompt,) = await self._engine.chat_prompts([messages], chat_template, *options)
            return prompt

        return self._outputs(prepared(), sampling_params, request_id, lora_request)

    async def _outputs(
        self,
        prepared: Coroutine[Any, Any, Prompt],
        params: SamplingParams | None,
        request_id: str,
        lora: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as its answers grow. prepared: the prompt, encoded in the first step. An `abort`
        during the preparation ends the request before it starts."""
        if request_id in self._answers:
            prepared.close()
            raise ValueError(f"request_id={request_id!r}: a running request has this id; choose another one")
        params = checked_params(params or self.get_default_sampling_params())
        kind = params.output_kind
        self._answers[request_id] = []
        try:
            prompt = await prepared
            adapter = await asyncio.wrap_future(self._engine.load_adapter(lora))
            answers = await self._engine.answers(prompt, params, adapter)
            if request_id in self._aborted:
                for answer in answers:
                    answer.abort()
                yield request_output(request_id, prompt.text, answers)
                return
            self._answers[request_id] = answers
            async with contextlib.aclosing(self._engine.stream(answers)) as steps:
                async for changed in steps:
                    is_last = all(answer.is_finished for answer in answers)
                    if kind is RequestOutputKind.FINAL_ONLY:
                        changed = answers if is_last else []
                    if changed:
                        yield request_output(request_id, prompt.text, changed, is_last, kind)
                    if is_last:
                        break
        finally:
            self._aborted.discard(request_id)
            del self._answers[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators end with an output whose answers have the finish reason "abort". Unknown ids
        are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if answers := self._answers.get(name):
                self._engine.thread.abort([answer.request_id for answer in answers])
            elif name in self._answers:
                self._aborted.add(name)
