"""`AsyncLLM`: answers one request at a time in an event loop, with the interface of vLLM's `AsyncLLM`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, Self

from cluster.http.text.tokenizer import ChatTokenizer
from deploy.offline.engine import EngineArgs, OfflineEngine
from deploy.offline.outputs import (
    RequestOutput,
    RequestOutputKind,
    RunningAnswer,
    SamplingParams,
    prompt_of,
    request_output,
)


class AsyncLLM:
    """An engine whose requests run concurrently, each an async generator of outputs. Several event loops may use it.

    async with AsyncLLM("eagle") as llm:
        async for output in llm.generate("Two and two", SamplingParams(), "1"):
            print(output.outputs[0].text)
    """

    def __init__(
        self, model: str | Path = "eagle", *, draft: str | None = None, revision: str | None = None, **options: Any
    ) -> None:
        """Load the model, which blocks the event loop. For the arguments, see `deploy.offline.llm.LLM`."""
        self._engine = OfflineEngine(model, draft, revision, options)
        self._answers: dict[str, list[RunningAnswer]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build the engine of these arguments."""
        return cls(engine_args.model, **engine_args.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End the engine; unfinished requests raise EngineDeadError."""
        self._engine.thread.close()

    async def get_tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer and chat template."""
        return self._engine.tokenizer

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the answers to a prompt: an async generator of outputs, the last of which is `finished`.

        prompt: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: `output_kind` says what each output contains. Outputs of several answers (`n`) have the answers
            that changed; with FINAL_ONLY, all.
        request_id: for `abort`; no other running request may have it.

        A slow caller gets fewer and larger outputs. Closing the generator, or cancelling its task, aborts the request.
        Raises TypeError or ValueError for an invalid request, EngineDeadError if the engine has ended.
        """
        if request_id in self._answers:
            raise ValueError(f"request_id={request_id!r}: a running request has this id; choose another one")
        (text, tokens), kind = prompt_of(prompt), sampling_params.output_kind
        self._answers[request_id] = []
        try:
            if tokens is None:
                assert text is not None
                (tokens,) = await self._engine.encoded([text], add_special_tokens=True)
            answers = self._answers[request_id] = self._engine.answers(tokens, sampling_params)
            async with contextlib.aclosing(self._engine.stream(answers)) as steps:
                async for changed in steps:
                    is_last = all(answer.is_finished for answer in answers)
                    if kind is RequestOutputKind.FINAL_ONLY:
                        changed = answers if is_last else []
                    if changed:
                        yield request_output(request_id, text, tokens, changed, is_last, kind)
                    if is_last:
                        break
        finally:
            del self._answers[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators end with an output whose answers have the finish reason "abort". Unknown ids
        are ignored."""
        names = [request_id] if isinstance(request_id, str) else request_id
        self._engine.thread.abort(answer.request.request_id for name in names for answer in self._answers.get(name, ()))
