"""The options of `vllm serve` that `aerie serve MODEL` understands, and the keys of the configuration that they become.

One table: what means the same, what differs a little (its note is printed), what Aerie does in any case, and what it
refuses with the remedy. `aerie.LLM` takes the same names as keyword arguments. Imports nothing heavy.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

QUANTIZATION = "quantization_config.quant_method"  # a key of the checkpoint's config.json, not of the configuration

Changes = dict[str, Any]  # key of the configuration, such as model.dtype -> value


class OptionError(ValueError):
    """An option cannot be honoured; the message names it, the value and the remedy."""


@dataclass(frozen=True)
class Option:
    """One option.

    flags: its spellings, the first is the name of it.
    keys: what a value becomes. Raises OptionError without the option's name.
    nargs: as argparse has it; 0 for a flag.
    note: in what the key differs from vLLM's option.
    """

    flags: tuple[str, ...]
    keys: Callable[[Any], Changes]
    nargs: int | str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The name of the keyword argument."""
        return self.flags[0].lstrip("-").replace("-", "_")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of the table."""
    group = parser.add_argument_group("as `vllm serve` spells them (docs/coming-from-vllm.md)")
    for option in OPTIONS:
        how: dict[str, Any] = {"action": "store_true"} if option.nargs == 0 else {"nargs": option.nargs}
        group.add_argument(*option.flags, dest=_dest(option), default=None, help=argparse.SUPPRESS, **how)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the table that a command line has, by name."""
    found = {option.name: getattr(arguments, _dest(option), None) for option in OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def changes(values: Mapping[str, Any], python: bool = False) -> tuple[Changes, list[str]]:
    """The keys that `values` (by name) become, and a line for each option that differs from vLLM's. python: the values
    are keyword arguments. Raises OptionError that names option, value and remedy."""
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
    """Whether the table has it."""
    return name in _BY_NAME


def _dest(option: Option) -> str:
    return f"vllm_{option.name}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _to(key: str, read: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Changes]:
    return lambda value: {key: read(value)}


def _whole(value: Any) -> int:
    """32768, and 32k as vLLM has it (1,000; 32K is 1,024)."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", str(value))
    if found is None:
        raise OptionError("must be a whole number, such as 32768 or 32k")
    return int(found[1]) * {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]]


def _real(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise OptionError("must be a number") from None


def _one_of(table: Mapping[str, Any], remedy: str = "") -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if str(value) not in table:
            raise OptionError(f"Aerie knows {', '.join(table)}{'; ' + remedy if remedy else ''}")
        return table[str(value)]

    return read


def _only(value: str, remedy: str) -> Callable[[Any], Changes]:
    """An option of which one value is what Aerie does."""

    def read(given: Any) -> Changes:
        if str(given).lower() != value:
            raise OptionError(remedy)
        return {}

    return read


def _refused(remedy: str) -> Callable[[Any], Changes]:
    def refuse(value: Any) -> Changes:
        raise OptionError(remedy)

    return refuse


def _nothing(value: Any) -> Changes:
    return {}


def _names(value: Any) -> Changes:
    first, *others = [value] if isinstance(value, str) else list(value)
    return {"ingress.served_model_name": first} | ({"ingress.model_aliases": others} if others else {})


def _keys(value: Any) -> Changes:
    return {"ingress.api_keys": [value] if isinstance(value, str) else list(value)}


def _origins(value: Any) -> Changes:
    """A JSON list, as vLLM has it, or one origin."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = value
    return {"ingress.allowed_origins": [found] if isinstance(found, str) else found}


def _json(value: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(f"is not JSON ({error})") from None
    if not isinstance(found, Mapping):
        raise OptionError("must be a JSON object")
    return found


def _speculative(value: Any) -> Changes:
    """vLLM's object: method, model, num_speculative_tokens, draft_tensor_parallel_size."""
    found = dict(_json(value))
    methods = {"eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "deepseek_mtp": "mtp"}
    model, method = found.pop("model", None), found.pop("method", None)
    steps = found.pop("num_speculative_tokens", None)
    ranks = found.pop("draft_tensor_parallel_size", None)
    if method is not None and method not in methods:
        raise OptionError(f"method {method}: Aerie speculates with {', '.join(methods)}; take an EAGLE head")
    if found:
        names = ", ".join(found)
        raise OptionError(f"{names}: not known here; --set speculative.KEY=VALUE has all that Aerie can do")
    if model is None and methods.get(method or "") != "mtp":
        raise OptionError("model is missing: the folder or the hub's name of an EAGLE head")
    keys: Changes = {}
    if method is not None:
        keys["speculative.method"] = methods[method]
    if model is not None:
        keys["speculative.path"] = model
    if steps is not None:
        keys |= {"speculative.num_steps": steps, "speculative.num_draft_tokens": _whole(steps) + 1}
    return keys | ({} if ranks is None else {"speculative.draft_tp": ranks})


def _attention(value: Any) -> Changes:
    backend = _one_of(_BACKENDS, "--set attention.decode=NAME has Aerie's own")(value)
    return {"attention.prefill": backend, "attention.decode": backend}


def _defaults(value: Any) -> Changes:
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = _json(value)
    if others := [name for name in found if name not in known]:
        raise OptionError(f"{', '.join(others)}: only {', '.join(known)} have defaults here; send it with requests")
    return {f"ingress.default_{name}": value for name, value in found.items()}


_BACKENDS = {
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    "TORCH_SDPA": "torch",
    "FLASHINFER_MLA": "flashinfer",
    "TRITON_MLA": "triton",
}
_DTYPES = {
    "auto": "auto",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
}
_TOOL_PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "deepseek_v3": "deepseek_v3",
    "openai": "harmony",
}
_REASONING_PARSERS = {"deepseek_r1": "think", "qwen3": "think", "openai_gptoss": "harmony"}
_FOUND_BY_ITSELF = "leave it out: the model's chat template says which (ingress.output_parser: auto)"
_LORA = "Aerie serves no LoRA adapters: merge them into the checkpoint"
_TLS = "Aerie speaks plain HTTP: put a proxy with TLS in front"
_TEMPLATE = "save it as chat_template.jinja in the model's folder"

OPTIONS: Sequence[Option] = (
    # The same.
    Option(("--served-model-name",), _names, "+"),
    Option(("--max-model-len",), _to("model.max_model_len", _whole)),
    Option(("--tensor-parallel-size", "-tp"), _to("parallel.tensor_parallel", _whole)),
    Option(("--enable-expert-parallel",), _to("parallel.expert_parallel"), 0),
    Option(("--max-num-seqs",), _to("scheduler.max_running", _whole)),
    Option(("--block-size",), _to("cache.page_size", _whole)),
    Option(("--num-gpu-blocks-override",), _to("cache.num_pages", _whole)),
    Option(("--enable-prefix-caching",), _to("cache.prefix_cache"), 0),
    Option(("--no-enable-prefix-caching",), lambda value: {"cache.prefix_cache": False}, 0),
    Option(("--dtype",), _to("model.dtype", _one_of(_DTYPES))),
    Option(
        ("--load-format",),
        _to("model.load_format", _one_of({"auto": "safetensors", "safetensors": "safetensors", "dummy": "dummy"})),
    ),
    Option(("--api-key",), _keys, "+"),
    Option(("--allowed-origins",), _origins),
    Option(("--speculative-config",), _speculative),
    Option(("--attention-backend",), _attention),
    Option(("--override-generation-config",), _defaults),
    Option(("--strict",), _to("ingress.strict"), 0),  # Aerie's own: its users come from servers that ignore fields
    # With a difference, which is printed.
    Option(("--data-parallel-size", "-dp"), _to("parallel.replicas", _whole), None, "engines behind one address"),
    Option(
        ("--gpu-memory-utilization",),
        _to("cache.memory_share", _real),
        None,
        "a share of the memory that is free at the start, not of all",
    ),
    Option(
        ("--kv-cache-memory-bytes",),
        lambda value: {"cache.memory_gb": _whole(value) / 1e9},
        None,
        "with the tables of running requests",
    ),
    Option(
        ("--max-num-batched-tokens",),
        _to("scheduler.max_step_tokens", _whole),
        None,
        "prompt tokens of a step, beside those of running requests",
    ),
    Option(
        ("--seed",),
        _to("model.seed", _whole),
        None,
        "of dummy weights; a request's tokens follow from its own `seed`",
    ),
    Option(("--reasoning-parser",), _to("ingress.output_parser", _one_of(_REASONING_PARSERS, _FOUND_BY_ITSELF))),
    Option(
        ("--tool-call-parser",),
        _to("ingress.output_parser", _one_of(_TOOL_PARSERS, _FOUND_BY_ITSELF)),
        None,
        "one parser for calls and reasoning",
    ),
    Option(("--quantization", "-q"), _to(QUANTIZATION)),
    # What Aerie does in any case, or what changes no answer.
    Option(("--enable-chunked-prefill",), _nothing, 0),
    Option(("--enable-auto-tool-choice",), _nothing, 0),
    Option(("--async-scheduling",), _nothing, 0),
    Option(("--trust-remote-code",), _nothing, 0, "Aerie runs no code of checkpoints"),
    Option(("--enforce-eager",), _nothing, 0, "no effect; --set graph_capture.limit_gb=0 captures the fewest graphs"),
    Option(("--disable-log-stats",), _nothing, 0),
    Option(("--disable-log-requests", "--no-enable-log-requests"), _nothing, 0),
    Option(("--disable-uvicorn-access-log",), _nothing, 0),
    Option(("--uvicorn-log-level",), _nothing),
    Option(("--swap-space",), _nothing, None, "no effect: preempted requests are computed again"),
    Option(("--distributed-executor-backend",), _nothing, None, "no effect: ranks are Ray's"),
    Option(("--tokenizer-mode",), _only("auto", "Aerie has one tokenizer: leave it out")),
    Option(("--runner",), _only("generate", "Aerie generates only")),
    Option(("--task",), _only("generate", "Aerie generates only")),
    Option(
        ("--generation-config",),
        _only("vllm", "Aerie reads no generation_config.json; --override-generation-config sets defaults"),
    ),
    Option(("--kv-cache-dtype",), _only("auto", "KV has the model's dtype: leave it out")),
    Option(("--pipeline-parallel-size", "-pp"), _only("1", "Aerie has no pipelines: raise --tensor-parallel-size")),
    # Refused.
    Option(("--chat-template",), _refused(_TEMPLATE)),
    Option(("--tokenizer",), _refused("put tokenizer.json and tokenizer_config.json into the model's folder")),
    Option(("--enable-lora",), _refused(_LORA), 0),
    Option(("--lora-modules",), _refused(_LORA), "+"),
    Option(("--cpu-offload-gb",), _refused("Aerie keeps weights on the device: raise --tensor-parallel-size")),
    Option(("--hf-overrides",), _refused("change config.json in a copy of the model's folder")),
    Option(("--rope-scaling",), _refused("change rope_scaling in config.json")),
    Option(("--download-dir",), _refused("set HF_HOME")),
    Option(("--hf-token",), _refused("set HF_TOKEN, or `hf auth login`"), "?"),
    Option(("--ssl-keyfile",), _refused(_TLS)),
    Option(("--ssl-certfile",), _refused(_TLS)),
    Option(("--root-path",), _refused("set applications[].route_prefix in a config file")),
    Option(("--uds",), _refused("Aerie listens on TCP alone: --host 127.0.0.1 --port N")),
    Option(("--compilation-config", "-O"), _refused("leave it out: graph_capture has what can be set")),
    Option(("--no-enable-chunked-prefill",), _refused("prompts are always computed in chunks: leave it out"), 0),
)
_BY_NAME = {option.name: option for option in OPTIONS}
