"""`LLM`: answers lists of prompts, with the interface of vLLM's `LLM`.

Several ranks run in separate processes, started by `multiprocessing`; a script then needs the usual
`if __name__ == "__main__":`.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from cluster.http.text.tokenizer import ChatTokenizer
from deploy.offline.engine import OfflineEngine, finished
from deploy.offline.outputs import RequestOutput, SamplingParams, is_token_ids, prompt_of, request_output

GREEDY = SamplingParams(max_tokens=256, temperature=0.0)
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """An engine that answers lists of prompts. Use it in a `with` statement, or `close` it, because ranks may be
    processes."""

    def __init__(
        self, model: str | Path = "eagle", *, draft: str | None = None, revision: str | None = None, **options: Any
    ) -> None:
        """model: a folder with a checkpoint, a name on the hub, a Serve config file, or the name of a packaged one.
        draft: an EAGLE head's folder or hub name, or "suffix"; only with a model.
        revision: branch, tag or commit of the model on the hub.
        options: keyword arguments of vLLM's `LLM` that docs/coming-from-vllm.md lists, such as tensor_parallel_size,
        max_model_len, dtype, gpu_memory_utilization, speculative_config.

        Raises ConfigError for an invalid model, configuration or option, TypeError for an unknown option."""
        self._engine = OfflineEngine(model, draft, revision, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. It also ends with the interpreter, and when this object is garbage."""
        self._engine.thread.close()

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer and chat template."""
        return self._engine.tokenizer

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Return the continuations of prompts, in order.

        prompts: a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: for all prompts, or one per prompt; default: greedy answers of up to 256 tokens.
        use_tqdm: show progress on a terminal.
        Raises RequestTooLargeError for a prompt that can never run, TypeError for an invalid prompt. After Ctrl-C the
        engine remains usable."""
        is_one = isinstance(prompts, str | Mapping) or is_token_ids(prompts)
        found = [prompt_of(prompt) for prompt in ([prompts] if is_one else prompts)]
        texts = [text for text, _ in found if text is not None]
        encoded = iter(finished(self._engine.encoded(texts, add_special_tokens=True)))
        given = [(text, next(encoded) if tokens is None else tokens) for text, tokens in found]
        return self._answer(given, sampling_params, use_tqdm)

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Return the assistant's answer to a conversation, or to each of a list of conversations; see `generate`.

        messages: {"role", "content"} and other keys of the model's template.
        Raises ChatTemplateError for messages that the template refuses."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self._engine.tokenizer.render(conversation) for conversation in conversations]  # type: ignore[arg-type]
        encoded = finished(self._engine.encoded(texts, add_special_tokens=False))
        given = [(text.text, tokens) for text, tokens in zip(texts, encoded, strict=True)]
        return self._answer(given, sampling_params, use_tqdm)

    def _answer(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Answer prompts, each a text (None if unknown) and token ids."""
        each = [params or GREEDY] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"sampling_params: {len(each)} for {len(prompts)} prompts; give one for all, or one each")
        groups = [self._engine.answers(tokens, p) for (_, tokens), p in zip(prompts, each, strict=True)]
        answers = [answer for group in groups for answer in group]
        # None: tqdm shows nothing if stderr is not a terminal
        with (
            tqdm(total=len(answers), desc="answers", disable=None if use_tqdm else True) as progress,
            contextlib.closing(self._engine.run(answers)) as steps,
        ):
            for changed in steps:
                progress.update(sum(answer.is_finished for answer in changed))
        return [
            request_output(group[0].request.request_id, text, tokens, group)
            for (text, tokens), group in zip(prompts, groups, strict=True)
        ]
