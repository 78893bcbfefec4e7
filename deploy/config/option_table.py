"""Every option that `aerie.deploy.config.vllm_options` reads. Those that set one key to their value are declared with
the key, by a `Setting`; here are those of other meaning, with all their spellings: vLLM's, then SGLang's.

Spellings that argparse accepts there as the beginning of a longer one (`--mem-fraction`) are listed where people use
them, because Aerie takes no beginnings: `--model` must not mean `--model-impl`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from aerie.cluster.config import AerieConfig
from aerie.deploy.config.keys import Key, keys
from aerie.deploy.config.option_names import REFUSED, WITHOUT_EFFECT, Names
from aerie.deploy.config.vllm_values import (
    DOWNLOADS,
    ENABLE_LORA,
    OWN_TOKENIZER,
    QUANTIZATION,
    SHARED_ATTENTION,
    TOTAL_TOKENS,
    Changes,
    adapters,
    algorithm,
    api_keys,
    attention_backend,
    expert_ranks,
    generation_config,
    json_object,
    memory_bytes,
    memory_share,
    model_length,
    nothing,
    one_of,
    only,
    optional_number,
    origins,
    page_size,
    real_number,
    refused,
    rope_override,
    sampling_defaults,
    served_names,
    speculative,
    step_tokens,
    to_key,
    whole_number,
)
from aerie.deploy.config.vllm_values import parser as output_parser


@dataclass(frozen=True)
class Option:
    """One option.

    flags: its spellings; the first one is its name.
    keys: returns the keys that a value sets. Raises OptionError without the option's name.
    nargs: argparse's nargs; 0 for a flag.
    note: how the key differs from the other server's option.
    group: group of the help; "": hidden.
    help, metavar: as in argparse.
    is_unused: whether it never has an effect.
    """

    flags: tuple[str, ...]
    keys: Callable[[Any], Changes]
    nargs: int | str | None = None
    note: str = ""
    group: str = ""
    help: str = ""
    metavar: str | None = "NAME"
    is_unused: bool = False

    @property
    def name(self) -> str:
        """Return the name of the keyword argument."""
        return self.flags[0].lstrip("-").replace("-", "_")


GROUPS = {
    "names": "names and access",
    "memory": "length, memory and batch",
    "ranks": "parallelism",
    "draft": "speculation",
    "answers": "answers",
    "weights": "weights",
    "adapters": "LoRA adapters",
    "server": "server",
}
# the group of a section's options, where it is not "server"
_GROUP_OF = {"cache": "memory", "scheduler": "memory", "parallel": "ranks", "speculative": "draft"}
_GROUP_OF |= {"ingress": "answers", "deterministic": "answers", "lora": "adapters"}
_GROUP_OF |= dict.fromkeys(("model", "attention", "draft_attention"), "weights")
_KV_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
_KV_DTYPES |= dict.fromkeys(("bfloat16", "bf16", "float16"), "model")
_DTYPES = {name: name for name in ("auto", "float16", "bfloat16", "float32")} | {"half": "float16", "float": "float32"}
_LOADERS = ("auto", "safetensors", "hf", "mistral", "fastsafetensors", "runai_streamer", "instanttensor", "layered")
_LOADERS_OF = dict.fromkeys(_LOADERS, "safetensors") | {"dummy": "dummy"}
_LENGTH = "model.max_model_len: 32768, 32k, auto"
_MEMORY = "--gpu-memory-utilization --mem-fraction-static --mem-fraction --device-memory-utilization"
_FREE = "a share of the memory that is free at the start, not of all"
_KV_BYTES = "--kv-cache-memory-bytes --kv-cache-memory"
_SIZES = "a power of two up to 64; other sizes leave Aerie's"
_PROMPTS = "prompt tokens of a step, beside those of running requests"
_STEP = "--max-num-batched-tokens --chunked-prefill-size"
_ONE_PARSER = "one parser for calls and reasoning"
_DEFAULTS = "--override-generation-config --preferred-sampling-params"
_OUTSIDE = "Aerie generates only: serve embeddings and scores with another server"
_NO_CONTEXT_RANKS = "Aerie does not split a sequence: raise --tensor-parallel-size"
_ONE_HOST = "one command serves all hosts: `aerie start` on each (docs/clusters.md), then --tensor-parallel"
_EXACT = "Aerie's speculation is exact: leave it out"


def _flag(key: str, value: bool = True) -> Callable[[Any], Changes]:
    """Return what sets `key` to `value` for a flag, and to the opposite for its form with `--no-`."""
    return lambda is_set: {key: value if is_set else not value}


def _row(
    flags: str, keys: Callable[[Any], Changes], group: str = "", help: str = "", metavar: str = "NAME", note: str = ""
) -> Option:
    """Return an option with one value. flags: separated by spaces."""
    return Option(tuple(flags.split()), keys, None, note, group, help, metavar)


def _declared(key: Key) -> Option:
    """Return the option that a key declares."""
    flags = tuple(key.setting.flags.split())
    meaning = re.split(r"[;:] (?![^{]*})|\. ", key.meaning)[0].replace("%", "%%")
    read, nargs, metavar = _reader(key.kind)
    keys = _flag(key.name) if nargs == 0 else to_key(key.name, read)
    group = _GROUP_OF.get(key.name.partition(".")[0], "server")
    shown = key.setting.metavar or metavar
    return Option(flags, keys, nargs, key.setting.note, group, f"{key.name}: {meaning}", shown)


def _reader(kind: Any) -> tuple[Callable[[Any], Any], int | str | None, str]:
    """Return what reads a value of this type from a command line or Python, argparse's nargs, and the metavar."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if bool in parts and not words:
        return bool, 0, ""
    kinds = [get_origin(part) or part for part in parts]
    read, metavar = next(
        (row[1:] for row in _READERS if row[0] in kinds), (one_of({word: word for word in words}), "NAME")
    )

    def read_value(text: Any) -> Any:
        if NoneType in parts and str(text).lower() == "none":
            return None
        return text if text in words else read(text)

    return read_value, "+" if tuple in kinds else None, metavar


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value]


_READERS: Sequence[tuple[type, Callable[[Any], Any], str]] = (
    (int, whole_number, "N"),
    (float, real_number, "X"),
    (str, str, "TEXT"),
    (Mapping, json_object, "JSON"),
    (tuple, _texts, "TEXT"),
)


_SET: Sequence[Option] = (
    Option(("--served-model-name",), served_names, "+", group="names", help="names for clients"),
    Option(("--api-key",), api_keys, "+", group="names", help="ingress.api_keys, kept as digests", metavar="KEY"),
    Option(("--allowed-origins",), origins, group="names", help="ingress.allowed_origins", metavar="JSON"),
    _row("--max-model-len --context-length --context-len", model_length, "memory", _LENGTH, "N"),
    _row(_MEMORY, memory_share, "memory", "cache.memory_share", "SHARE", _FREE),
    _row(_KV_BYTES, memory_bytes, "memory", "cache.memory_gb", "N", "with the tables of running requests"),
    _row("--max-total-tokens", to_key(TOTAL_TOKENS, optional_number)),
    _row("--block-size --page-size", page_size, "memory", "cache.page_size", "N", _SIZES),
    _row("--kv-cache-dtype", to_key("cache.dtype", one_of(_KV_DTYPES)), "memory", "cache.dtype", "TYPE"),
    Option(("--disable-radix-cache",), _flag("cache.prefix_cache", False), 0),
    _row(_STEP, step_tokens, "memory", "scheduler.max_step_tokens", "N", _PROMPTS),
    _row("--ep-size --expert-parallel-size --ep", expert_ranks, note="over all ranks of an engine"),
    Option(("--enable-dp-attention",), to_key(SHARED_ATTENTION), 0, "--dp-size is not read: ranks share attention"),
    Option(("--speculative-config", "-sc"), speculative, group="draft", help="speculative.*", metavar="JSON"),
    Option(("--spec-method", "--speculative-method"), nothing),  # parts of the one before: see SPECULATIVE_PARTS
    Option(("--spec-model", "--speculative-model"), nothing),
    Option(("--spec-tokens", "--num-speculative-tokens"), nothing),
    Option(("--speculative-algorithm", "--speculative-algo"), algorithm, group="draft", help="speculative.method"),
    _row("--speculative-draft-kv-cache-dtype", to_key("cache.draft_dtype", one_of(_KV_DTYPES))),
    Option(("--speculative-accept-threshold-single",), only("1", _EXACT, "1.0")),
    Option(("--speculative-accept-threshold-acc",), only("1", _EXACT, "1.0")),
    Option(("--reasoning-parser",), output_parser, group="answers", help="ingress.output_parser"),
    # After the one before, which it replaces.
    _row("--tool-call-parser", output_parser, "answers", "ingress.output_parser", note=_ONE_PARSER),
    _row(_DEFAULTS, sampling_defaults, "answers", "ingress.default_*", "JSON"),
    Option(("--generation-config", "--sampling-defaults"), generation_config),
    _row("--dtype", to_key("model.dtype", one_of(_DTYPES)), "weights", "model.dtype", "TYPE"),
    _row("--load-format", to_key("model.load_format", one_of(_LOADERS_OF)), "weights", "model.load_format"),
    Option(("--quantization", "-q"), to_key(QUANTIZATION), group="weights", help="must equal the checkpoint's"),
    _row("--download-dir", to_key(DOWNLOADS), "weights", "of hub models: HF_HUB_CACHE", "FOLDER"),
    Option(("--hf-token",), refused("set HF_TOKEN: every user of a machine can read its command lines"), "?"),
    Option(("--attention-backend",), attention_backend("prefill", "decode"), group="weights", help="attention.*"),
    Option(("--prefill-attention-backend",), attention_backend("prefill")),
    Option(("--decode-attention-backend",), attention_backend("decode")),
    Option(("--hf-overrides", "--json-model-override-args"), rope_override),
    Option(("--enable-lora",), _flag(ENABLE_LORA), 0, group="adapters", help="serve LoRA adapters (docs/lora.md)"),
    Option(
        ("--lora-modules", "--lora-paths"),
        adapters,
        "+",
        group="adapters",
        help="lora.modules: adapters of the start",
        metavar="NAME=PATH",
    ),
    Option(("--lora-target-modules",), nothing, "+", is_unused=True),
    Option(("--enable-custom-logit-processor",), nothing, 0, "requests that bring code are refused"),
    Option(("--trust-remote-code",), nothing, 0, "Aerie runs no code of checkpoints"),
    Option(("--enforce-eager",), nothing, 0, "no effect; --set graph_capture.limit_gb=0 captures the fewest graphs"),
)
_CHECKED: Sequence[Option] = (
    Option(("--tokenizer", "--tokenizer-path"), to_key(OWN_TOKENIZER)),
    Option(
        ("--tokenizer-mode",),
        only("auto", "Aerie has one tokenizer: leave it out", "hf", "fast", "slow", "mistral"),
        is_unused=True,
    ),
    Option(
        ("--config-format",), only("auto", "Aerie reads config.json: leave it out", "hf", "mistral"), is_unused=True
    ),
    Option(("--runner", "--task"), only("generate", _OUTSIDE, "auto"), is_unused=True),
    Option(("--convert",), only("none", _OUTSIDE, "auto"), is_unused=True),
    Option(("--device",), only("cuda", "--set model.device=cpu, or leave it out", "auto", "gpu"), is_unused=True),
    Option(("--response-role",), only("assistant", "answers are the assistant's"), is_unused=True),
    Option(("--logprobs-mode",), only("raw_logprobs", "log-probabilities are those before sampling parameters")),
    Option(
        ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
        only("1", "Aerie has no pipelines: raise --tensor-parallel-size"),
    ),
    Option(("--decode-context-parallel-size", "-dcp", "--dcp-size"), only("1", _NO_CONTEXT_RANKS)),
    Option(
        ("--prefill-context-parallel-size", "-pcp", "--attn-cp-size", "--attention-context-parallel-size"),
        only("1", _NO_CONTEXT_RANKS),
    ),
    Option(
        ("--attn-dp-size", "--attention-data-parallel-size", "--moe-dp-size", "--moe-data-parallel-size"),
        nothing,
        is_unused=True,
    ),
    Option(("--nnodes", "-n", "--num-nodes"), only("1", _ONE_HOST)),
    Option(("--node-rank", "-r"), only("0", _ONE_HOST)),
    Option(("--data-parallel-size-local", "-dpl"), nothing, is_unused=True),
    Option(("--cpu-offload-gb",), only("0", "Aerie keeps weights on the device: raise --tensor-parallel-size", "0.0")),
)


def _named(names: Names, keys: Callable[[Any], Changes], is_unused: bool = False) -> list[Option]:
    """Return the options of a table's entry. keys: makes configuration changes of an option's value."""
    groups = ((names.flags, 0), (names.values, None), (names.lists, "+"))

    def spelled(name: str) -> str:
        return name if name.startswith("-") else f"--{name}"

    return [
        Option(tuple(map(spelled, spelling.split("/"))), keys, nargs, is_unused=is_unused)
        for text, nargs in groups
        for spelling in text.split()
    ]


KEY_OPTIONS = [_declared(key) for section in AerieConfig.model_fields for key in keys(section) if key.setting.flags]
DECLARED: Sequence[Option] = (*KEY_OPTIONS, *_SET, *_CHECKED)  # those whose value is read
OPTIONS: Sequence[Option] = (
    *DECLARED,
    *_named(WITHOUT_EFFECT, nothing, is_unused=True),
    *(option for remedy, names in REFUSED.items() for option in _named(names, refused(remedy))),
)
