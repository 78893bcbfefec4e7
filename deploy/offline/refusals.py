"""Parameters and methods of vLLM's `LLM` that Aerie cannot honour, refused by name with a reason."""

from collections.abc import Mapping
from typing import Any

from aerie.cluster.http.schema.body import Refusals
from aerie.deploy.offline.sampling_params import honoured

PARAMETERS: Refusals = {
    "prompt_adapter_request": ("prompt adapters are not implemented", ()),
    "guided_options_request": ("use SamplingParams(structured_outputs=...)", ()),
    "tokenization_kwargs": ("use SamplingParams(truncate_prompt_tokens=...)", ({},)),
    "chat_template_content_format": ("contents are texts", ("auto", "string", "openai")),
    "data_parallel_rank": ("LLM has one engine", (0,)),
    "trace_headers": ("LLM writes no traces; a server does", ({},)),
    "prompt_text": ("give the text as prompt", ()),
    "prompt_token_ids": ("give token ids as the prompt", ()),
    "prompt_embeds": ('give {"prompt_embeds": tensor} as the prompt', ()),
    "multi_modal_data": ("prompts are text, token ids or embeddings", ({},)),
}
_NO_POOLING = "Aerie generates text; it has no pooling models"
_ONE_PROCESS = "ranks are Aerie's own processes; use get_metrics, or a server's profile"
METHODS = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _NO_POOLING),
    **dict.fromkeys(("collective_rpc", "apply_model", "start_profile", "stop_profile"), _ONE_PROCESS),
    **dict.fromkeys(("sleep", "wake_up"), "close() the engine, and build it again"),
    **dict.fromkeys(("pause_generation", "resume_generation"), "abort requests, and send them again"),
    "beam_search": "beam search is not implemented: ask for n answers, and rank them by their cumulative_logprob",
    "llm_engine": "there is no LLMEngine: use generate, chat, get_metrics or AsyncLLM",
    "set_tokenizer": "put tokenizer.json and tokenizer_config.json into the model's folder",
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
}


def check_others(method: str, others: Mapping[str, Any]) -> None:
    """Raise ValueError for refused parameters, TypeError for unknown ones. Those without effect are accepted; see
    `honoured`."""
    if unknown := honoured(others, PARAMETERS):
        raise TypeError(f"{method}() got an unexpected keyword argument {next(iter(unknown))!r}")


def refused_method(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that does not exist."""
    reason = METHODS.get(name)
    return AttributeError(f"{owner!r} object has no attribute {name!r}" + (f": {reason}" if reason else ""))
