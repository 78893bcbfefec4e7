"""Options of `vllm serve` for `aerie serve MODEL`, and the configuration keys that they set.

One table of options: with the same meaning, with a difference (its note is printed), without effect (Aerie always does
it), and refused (with a remedy). `aerie.LLM` takes the same names as keyword arguments. Imports nothing heavy.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.config.vllm_values import (
    QUANTIZATION,
    Changes,
    OptionError,
    api_keys,
    attention_backend,
    generation_config,
    nothing,
    one_of,
    only,
    origins,
    real_number,
    refused,
    sampling_defaults,
    served_names,
    speculative,
    to_key,
    whole_number,
)


@dataclass(frozen=True)
class Option:
    """One option.

    flags: its spellings; the first one is its name.
    keys: returns the keys that a value sets. Raises OptionError without the option's name.
    nargs: argparse's nargs; 0 for a flag.
    note: how the key differs from vLLM's option.
    """

    flags: tuple[str, ...]
    keys: Callable[[Any], Changes]
    nargs: int | str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """Return the name of the keyword argument."""
        return self.flags[0].lstrip("-").replace("-", "_")


def add_options(parser: argparse.ArgumentParser, prefix: str = "vllm_") -> None:
    """Add every option of the table. prefix: of the names of the parsed values."""
    group = parser.add_argument_group("as `vllm serve` spells them (docs/coming-from-vllm.md)")
    for option in OPTIONS:
        how: dict[str, Any] = {"action": "store_true"} if option.nargs == 0 else {"nargs": option.nargs}
        group.add_argument(*option.flags, dest=_dest(option, prefix), default=None, help=argparse.SUPPRESS, **how)


def given(arguments: argparse.Namespace, prefix: str = "vllm_") -> dict[str, Any]:
    """Return the command line's options of the table, by name. prefix: see `add_options`."""
    found = {option.name: getattr(arguments, _dest(option, prefix), None) for option in OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def changes(values: Mapping[str, Any], python: bool = False) -> tuple[Changes, list[str]]:
    """Return the keys that `values` (by name) set, and a line for each option that differs from vLLM's. python: whether
    the values are keyword arguments. Raises OptionError that names option, value and remedy."""
    keys: Changes = {}
    notes = []
    for name, value in values.items():
        option = _BY_NAME[name]
        shown = f"{name}={value!r}" if python else f"{option.flags[0]} {_text(value)}".rstrip()
        try:
            found = option.keys(value)
        except OptionError as error:
            raise OptionError(f"{shown}: {error}") from None
        keys |= found
        if option.note:
            became = ", ".join(f"{key}={value}" for key, value in found.items())
            notes.append(f"{shown}: {became + '; ' if became else ''}{option.note}")
    return keys, notes


def is_option(name: str) -> bool:
    """Whether the table has this option."""
    return name in _BY_NAME


def _dest(option: Option, prefix: str) -> str:
    return prefix + option.name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_KV_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "bfloat16": "model", "float16": "model"}
_DTYPES = {
    "auto": "auto",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
}
_IMPLEMENTATIONS = {"auto": "auto", "transformers": "transformers"}
_SAME_PARSERS = {name: name for name in ("glm45", "kimi_k2", "minimax_m2", "seed_oss", "granite", "gemma4")}
_TOOL_PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "deepseek_v3": "deepseek_v3",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "openai": "harmony",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "glm47": "glm45",
    "phi4_mini_json": "phi4_mini",
    **_SAME_PARSERS,
}
_REASONING_PARSERS = {"deepseek_r1": "think", "qwen3": "think", "openai_gptoss": "harmony", **_SAME_PARSERS}
_FOUND_BY_ITSELF = "leave it out: the model's chat template says which (ingress.output_parser: auto)"
_LORA = "Aerie serves no LoRA adapters: merge them into the checkpoint"
_TLS = "Aerie speaks plain HTTP: put a proxy with _TLS in front"
_TEMPLATE = "save it as chat_template.jinja in the model's folder"

OPTIONS: Sequence[Option] = (
    # The same.
    Option(("--served-model-name",), served_names, "+"),
    Option(("--max-model-len",), to_key("model.max_model_len", whole_number)),
    Option(("--tensor-parallel-size", "-tp"), to_key("parallel.tensor_parallel", whole_number)),
    Option(("--enable-expert-parallel",), to_key("parallel.expert_parallel"), 0),
    Option(("--max-num-seqs",), to_key("scheduler.max_running", whole_number)),
    Option(("--block-size",), to_key("cache.page_size", whole_number)),
    Option(("--num-gpu-blocks-override",), to_key("cache.num_pages", whole_number)),
    Option(("--kv-cache-dtype",), to_key("cache.dtype", one_of(_KV_DTYPES))),
    Option(("--enable-prefix-caching",), to_key("cache.prefix_cache"), 0),
    Option(("--no-enable-prefix-caching",), lambda value: {"cache.prefix_cache": False}, 0),
    Option(("--dtype",), to_key("model.dtype", one_of(_DTYPES))),
    Option(
        ("--load-format",),
        to_key("model.load_format", one_of({"auto": "safetensors", "safetensors": "safetensors", "dummy": "dummy"})),
    ),
    Option(("--model-impl",), to_key("model.implementation", one_of(_IMPLEMENTATIONS))),
    Option(("--api-key",), api_keys, "+"),
    Option(("--allowed-origins",), origins),
    Option(("--speculative-config",), speculative),
    Option(("--attention-backend",), attention_backend),
    Option(("--override-generation-config",), sampling_defaults),
    Option(("--strict",), to_key("ingress.strict"), 0),  # Aerie's own, because other servers ignore unknown fields
    # With a difference; its note is printed.
    Option(
        ("--data-parallel-size", "-dp"), to_key("parallel.replicas", whole_number), None, "engines behind one address"
    ),
    Option(
        ("--gpu-memory-utilization",),
        to_key("cache.memory_share", real_number),
        note="a share of the memory that is free at the start, not of all",
    ),
    Option(
        ("--kv-cache-memory-bytes",),
        lambda value: {"cache.memory_gb": whole_number(value) / 1e9},
        note="with the tables of running requests",
    ),
    Option(
        ("--max-num-batched-tokens",),
        to_key("scheduler.max_step_tokens", whole_number),
        note="prompt tokens of a step, beside those of running requests",
    ),
    Option(
        ("--seed",),
        to_key("model.seed", whole_number),
        note="of dummy weights; a request's tokens follow from its own `seed`",
    ),
    Option(("--reasoning-parser",), to_key("ingress.output_parser", one_of(_REASONING_PARSERS, _FOUND_BY_ITSELF))),
    Option(
        ("--tool-call-parser",),
        to_key("ingress.output_parser", one_of(_TOOL_PARSERS, _FOUND_BY_ITSELF)),
        note="one parser for calls and reasoning",
    ),
    Option(("--quantization", "-q"), to_key(QUANTIZATION)),
    # Options whose behaviour Aerie always has, or that do not change answers.
    Option(("--enable-chunked-prefill",), nothing, 0),
    Option(("--enable-auto-tool-choice",), nothing, 0),
    Option(("--async-scheduling",), nothing, 0),
    Option(("--trust-remote-code",), nothing, 0, "Aerie runs no code of checkpoints"),
    Option(("--enforce-eager",), nothing, 0, "no effect; --set graph_capture.limit_gb=0 captures the fewest graphs"),
    Option(("--disable-log-stats",), nothing, 0),
    Option(("--disable-log-requests", "--no-enable-log-requests"), nothing, 0),
    Option(("--disable-uvicorn-access-log",), nothing, 0),
    Option(("--uvicorn-log-level",), nothing),
    Option(("--swap-space",), nothing, None, "no effect: preempted requests are computed again"),
    Option(("--distributed-executor-backend",), nothing, None, "no effect: ranks are Ray's"),
    Option(("--tokenizer-mode",), only("auto", "Aerie has one tokenizer: leave it out")),
    Option(("--runner",), only("generate", "Aerie generates only")),
    Option(("--task",), only("generate", "Aerie generates only")),
    Option(
        ("--generation-config",),
        generation_config,
    ),
    Option(("--pipeline-parallel-size", "-pp"), only("1", "Aerie has no pipelines: raise --tensor-parallel-size")),
    # Refused.
    Option(("--chat-template",), refused(_TEMPLATE)),
    Option(("--tokenizer",), refused("put tokenizer.json and tokenizer_config.json into the model's folder")),
    Option(("--enable-lora",), refused(_LORA), 0),
    Option(("--lora-modules",), refused(_LORA), "+"),
    Option(("--cpu-offload-gb",), refused("Aerie keeps weights on the device: raise --tensor-parallel-size")),
    Option(("--hf-overrides",), refused("change config.json in a copy of the model's folder")),
    Option(("--rope-scaling",), refused("change rope_scaling in config.json")),
    Option(("--download-dir",), refused("set HF_HOME")),
    Option(("--hf-token",), refused("set HF_TOKEN, or `hf auth login`"), "?"),
    Option(("--ssl-keyfile",), refused(_TLS)),
    Option(("--ssl-certfile",), refused(_TLS)),
    Option(("--root-path",), refused("set applications[].route_prefix in a config file")),
    Option(("--uds",), refused("Aerie listens on TCP alone: --host 127.0.0.1 --port N")),
    Option(("--compilation-config", "-O"), refused("leave it out: graph_capture has what can be set")),
    Option(("--no-enable-chunked-prefill",), refused("prompts are always computed in chunks: leave it out"), 0),
)
_BY_NAME = {option.name: option for option in OPTIONS}
