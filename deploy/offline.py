"""Offline generation: the engine of a configuration in this process, texts in and texts out, without Ray and HTTP.

    from deploy.offline import LLM

    with LLM("eagle") as llm:
        print(llm.chat([[{"role": "user", "content": "Hello!"}]])[0].text)

Several ranks are processes of their own, started by `multiprocessing`: a script then needs the usual
`if __name__ == "__main__":`.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import msgspec

from cluster.assembly import engine_spec
from cluster.config import ConfigError, read_args
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.http.text.user_text import ChatText
from deploy.checks import checked
from deploy.configs import find_config
from speculative.local import local_engine
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import FinishReason, Request, RequestOutput

__all__ = ["GREEDY", "LLM", "Completion", "SamplingParams"]

GREEDY = SamplingParams(max_tokens=256, temperature=0.0)


@dataclass(frozen=True)
class Completion:
    """One answer. token_ids: with the token that ended it. acceptance_length: tokens a verified draft yielded, 1 +
    accepted / rounds; None if nothing was drafted for it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    acceptance_length: float | None


class LLM:
    """An engine that answers lists of prompts. Use it in a `with` statement, or `close` it: ranks are processes."""

    def __init__(self, config: str | Path = "eagle", tensor_parallel: int | None = None) -> None:
        """config: a Serve config file, or the name of a packaged one. tensor_parallel: instead of the configuration's.

        Raises ConfigError for what the configuration or its checkpoints have wrong."""
        path = find_config(config)
        args = dict(read_args(path))
        if tensor_parallel is not None:
            args["parallel"] = {**(args.get("parallel") or {}), "tensor_parallel": tensor_parallel}
        parsed = checked(args, path.resolve().parent)
        self.tokenizer = ChatTokenizer.from_folder(parsed.model.path)
        self._numbers = count()
        self._stack = contextlib.ExitStack()
        try:
            self._engine = self._stack.enter_context(local_engine(engine_spec(parsed)))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        self._stack.close()

    def generate(self, prompts: Sequence[str], sampling: SamplingParams = GREEDY) -> list[Completion]:
        """What the model writes after each text, in the order of `prompts`. The model's own end of text ends an answer
        beside `sampling.stop_token_ids`. Raises RequestTooLargeError for a prompt that can never run."""
        return self._run(self._encoded(prompts, add_special_tokens=True), sampling)

    def chat(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], sampling: SamplingParams = GREEDY
    ) -> list[Completion]:
        """The assistant's answer to each list of messages ({"role", "content"}), as `generate`. Raises
        ChatTemplateError for messages that the model's template refuses."""
        texts = [self.tokenizer.render(messages) for messages in conversations]
        return self._run(self._encoded(texts, add_special_tokens=False), sampling)

    def _encoded(self, texts: Sequence[str | ChatText], add_special_tokens: bool) -> list[list[int]]:
        async def encode() -> list[list[int]]:
            return [await self.tokenizer.encode(text, add_special_tokens) for text in texts]

        return asyncio.run(encode())

    def _run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Completion]:
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self.tokenizer.eos_token_ids)))
        sampling = msgspec.structs.replace(sampling, stop_token_ids=stops)
        requests = [Request(f"offline-{next(self._numbers)}", prompt, sampling) for prompt in prompts]
        reasons: dict[str, FinishReason] = {}

        def listen(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                reasons[output.request.request_id] = output.finish_reason

        try:
            self._engine.run(requests, self._engine.scheduler.num_slots, listen)
        except ValueError:  # one of them was refused: the others are not wanted either
            for request in requests:
                self._engine.scheduler.abort(request.request_id)
            raise
        return [self._completion(request, reasons[request.request_id]) for request in requests]

    def _completion(self, request: Request, reason: FinishReason) -> Completion:
        rounds = sum(request.acceptance_histogram)
        accepted = sum(k * times for k, times in enumerate(request.acceptance_histogram))
        return Completion(
            text=self.tokenizer.decode(request.output, skip_special_tokens=True),
            token_ids=tuple(request.output),
            finish_reason=reason,
            acceptance_length=1 + accepted / rounds if rounds else None,
        )
