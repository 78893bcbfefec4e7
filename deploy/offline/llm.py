"""`LLM`: answers lists of prompts, with the interface of vLLM's `LLM`.

Several ranks run in separate processes, started by `multiprocessing`; a script then needs the usual
`if __name__ == "__main__":`.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from aerie.deploy.offline.engine import OfflineEngine, check_others, refused_method
from aerie.deploy.offline.outputs import Metric, RequestOutput, request_output
from aerie.deploy.offline.prompts import LoRARequest, Messages, Prompt, is_token_ids, prompt_of, run_coroutine
from aerie.deploy.offline.sampling_params import SamplingParams, checked_params

Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """An engine that answers lists of prompts, from any thread, also one whose event loop runs. Use it in a `with`
    statement, or `close` it, because ranks may be processes."""

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

    if not TYPE_CHECKING:  # type checkers then know what there is

        def __getattr__(self, name: str) -> Any:
            raise refused_method(type(self).__name__, name)

    def close(self) -> None:
        """End the engine. It also ends with the interpreter, and when this object is garbage."""
        self._engine.thread.close()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, one of transformers."""
        return self._engine.transformers_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: those that the model's generation_config.json recommends, else
        greedy; up to 256 tokens."""
        return self._engine.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False, and change nothing, while requests run."""
        return self._engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, as /metrics of a server has them."""
        return self._engine.metrics()

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the continuations of prompts, in order.

        prompts: a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: parameters for all prompts, or one per prompt; default: `get_default_sampling_params`.
        use_tqdm: show progress on a terminal; or what shows it, called as tqdm.
        lora_request: the LoRA adapter of all prompts, or one per prompt; loaded at its first use. Needs enable_lora.
        others: parameters of vLLM's that have no effect, such as priority=None.

        Raises ValueError for an invalid request or adapter, RequestTooLargeError for a prompt that can never run,
        TypeError for what is no prompt. After Ctrl-C the engine remains usable."""
        check_others("generate", others)
        is_one = isinstance(prompts, str | Mapping) or is_token_ids(prompts) or not isinstance(prompts, Iterable)
        checked = [prompt_of(prompt) for prompt in ([prompts] if is_one else prompts)]
        return self._answer(checked, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the assistant's answer to a conversation, or to each of a list of conversations; see `generate`.

        messages: as in the HTTP API: {"role", "content"}, and calls of tools and their results.
        tools: functions shown to the model. Its calls are text of the answer.
        chat_template: a template's text, instead of the model's.
        chat_template_kwargs: further variables of the template, such as enable_thinking.
        continue_final_message: continue the last message; needs add_generation_prompt=False.

        Raises ValueError for messages that the template refuses."""
        check_others("chat", others)
        is_one = isinstance(messages, str) or (messages and isinstance(messages[0], Mapping))  # a str is refused below
        conversations = [messages] if is_one else messages
        options = (tools, chat_template_kwargs, add_generation_prompt, continue_final_message)
        rendered = self._engine.chat_prompts(conversations, chat_template, *options)  # type: ignore[arg-type]
        return self._answer(run_coroutine(rendered), sampling_params, use_tqdm, lora_request)

    def _answer(
        self, prompts: Sequence[Prompt], params: Params, use_tqdm: bool | Callable[..., Any], lora: Adapters
    ) -> list[RequestOutput]:
        """Run all prompts to their ends and return their outputs, in order. params, lora: one for all prompts, or a
        list."""
        params = params or self.get_default_sampling_params()
        several = isinstance(params, Sequence) and not isinstance(params, str)
        samplings = list(map(checked_params, params if several else [params] * len(prompts)))  # type: ignore[arg-type]
        if len(samplings) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(samplings)} for {len(prompts)} prompts; give one for all, or one each"
            )
        is_list = isinstance(lora, Sequence) and not isinstance(lora, str)  # a str is refused below
        adapters: Sequence[Any] = lora if is_list else [lora] * len(prompts)  # type: ignore[assignment]
        if len(adapters) != len(prompts):
            raise ValueError(f"lora_request: {len(adapters)} for {len(prompts)} prompts; give one for all, or one each")
        names = [self._engine.load_adapter(adapter).result() for adapter in adapters]
        groups = run_coroutine(self._engine.all_answers(prompts, samplings, names))
        answers = [answer for group in groups for answer in group]
        bar = use_tqdm if callable(use_tqdm) else tqdm
        # None: tqdm shows nothing if stderr is not a terminal
        with (
            bar(total=len(answers), desc="answers", disable=None if use_tqdm else True) as progress,
            contextlib.closing(self._engine.run(answers)) as steps,
        ):
            for changed in steps:
                progress.update(sum(answer.is_finished for answer in changed))
        return [
            request_output(group[0].request_id, prompt.text, group)
            for prompt, group in zip(prompts, groups, strict=True)
        ]
