"""Parses the values of options, for the table in `aerie.deploy.config.option_table`."""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from aerie.attention.config import CacheConfig
from aerie.cluster.http.config import SERVER_DEFAULTS
from aerie.deploy.config.option_names import ALGORITHMS, BACKENDS, OTHER_BACKENDS, OTHER_PARSERS, PARSERS
from aerie.speculative.config import Method
from aerie.workers.config import LoraConfig

# Keys that are none of the configuration: of the checkpoint's config.json, the command line, the environment.
QUANTIZATION = "quantization_config.quant_method"
OWN_TOKENIZER = "tokenizer"
DOWNLOADS = "HF_HUB_CACHE"
# Options whose effect depends on others: `settled` replaces them by keys of the configuration.
ENABLE_LORA = "enable_lora"
SHARED_ATTENTION, ALGORITHM, TOTAL_TOKENS = "enable_dp_attention", "speculative_algorithm", "max_total_tokens"
# Options that are parts of the object of --speculative-config.
SPECULATIVE_PARTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

Changes = dict[str, Any]  # key of the configuration, such as model.dtype -> value


class OptionError(ValueError):
    """An option cannot be honoured; the message names it, the value and the remedy."""


def to_key(key: str, read: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Changes]:
    return lambda value: {key: read(value)}


def whole_number(value: Any) -> int:
    """Parse 32768, and vLLM's 32k (32,000), 32K (32,768) and 1.5k."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(value).replace("_", ""))
    unit = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}[match[2]] if match else 1
    number = float(match[1]) * unit if match else 0.5
    if match is None or number != int(number):
        raise OptionError("must be a whole number, such as 32768 or 32k")
    return int(number)


def optional_number(value: Any) -> int | None:
    """Parse a whole number, or `none`."""
    return None if str(value).lower() == "none" else whole_number(value)


def memory_share(value: Any) -> Changes:
    """Parse a share of memory. Above 95 % it is 95 %, because Aerie leaves the rest to drivers."""
    share = real_number(value)
    return {"cache.memory_share": 0.95 if 0.95 < share <= 1 else share}


def memory_bytes(value: Any) -> Changes:
    """Parse the bytes of KV."""
    return {"cache.memory_gb": whole_number(value) / 1e9}


def expert_ranks(value: Any) -> Changes:
    """Parse the number of ranks that share experts."""
    return {"parallel.expert_parallel": whole_number(value) > 1}


def page_size(value: Any) -> Changes:
    """Parse the tokens of a page. Sizes that Aerie lacks, which others take for their kernels, leave its own."""
    size = whole_number(value)
    return {"cache.page_size": size} if size in (1, 2, 4, 8, 16, 32, 64) else {}


def step_tokens(value: Any) -> Changes:
    """Parse the prompt tokens of a step. SGLang's -1, prompts in one piece, leaves Aerie's own limit."""
    return {} if str(value) == "-1" else {"scheduler.max_step_tokens": whole_number(value)}


def model_length(value: Any) -> Changes:
    """Parse the length; `auto` and -1 are the model's own."""
    return {} if str(value) in ("auto", "-1") else {"model.max_model_len": whole_number(value)}


def real_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise OptionError("must be a number") from None


def one_of(table: Mapping[str, Any], remedy: str = "") -> Callable[[Any], Any]:
    """Return a parser that accepts the keys of `table`, and returns their values."""

    def read(value: Any) -> Any:
        if str(value) not in table:
            raise OptionError(f"Aerie knows {', '.join(table)}{'; ' + remedy if remedy else ''}")
        return table[str(value)]

    return read


def only(value: str, remedy: str, *others: str) -> Callable[[Any], Changes]:
    """Accept the one value of an option that Aerie implements, and others that mean it; refuse the rest with
    `remedy`."""

    def read(argument: Any) -> Changes:
        if str(argument).lower() not in (value, *others):
            raise OptionError(remedy)
        return {}

    return read


_OFF = ("false", "none", "null", "0", "")  # values that ask for nothing


def refused(remedy: str) -> Callable[[Any], Changes]:
    """Return a parser that accepts only values that switch the option off."""

    def refuse(value: Any) -> Changes:
        if str(value).lower() in _OFF:
            return {}
        raise OptionError(remedy)

    return refuse


def nothing(value: Any) -> Changes:
    return {}


def served_names(value: Any) -> Changes:
    first, *others = [value] if isinstance(value, str) else list(value)
    return {"ingress.served_model_name": first} | ({"ingress.model_aliases": others} if others else {})


def api_keys(value: Any) -> Changes:
    return {"ingress.api_keys": [value] if isinstance(value, str) else list(value)}


def origins(value: Any) -> Changes:
    """Parse a JSON list, as in vLLM, or one origin."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        parsed = value
    return {"ingress.allowed_origins": [parsed] if isinstance(parsed, str) else parsed}


def json_object(value: Any) -> Mapping[str, Any]:
    """Parse a JSON object. Raises OptionError."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(f"is not JSON ({error})") from None
    if not isinstance(parsed, Mapping):
        raise OptionError("must be a JSON object")
    return parsed


_ROPE = ("rope_parameters", "rope_scaling")


def rope_override(value: Any) -> Changes:
    """Parse fields in place of config.json's, of which RoPE's settings alone can be given here."""
    overrides = json_object(value)
    text = overrides.get("text_config")
    fields = dict(overrides)
    if isinstance(text, Mapping):
        fields = {**text, **{name: field for name, field in overrides.items() if name != "text_config"}}
    others = [name for name in fields if name not in _ROPE]
    declared = [fields[name] for name in _ROPE if name in fields]
    if others or len(declared) != 1 or not isinstance(declared[0], Mapping):
        raise OptionError("only rope_scaling can be given here: change config.json in a copy of the model's folder")
    return {"model.rope_scaling": dict(declared[0])}


def speculative(value: Any) -> Changes:
    """Parse vLLM's object: method, model, num_speculative_tokens, draft_tensor_parallel_size; for n-grams also
    prompt_lookup_min and prompt_lookup_max."""
    options = dict(json_object(value))
    methods = {name: name for name in get_args(Method)} | {"ngram": "suffix"}
    model, method = options.pop("model", None), options.pop("method", None)
    if str(method).endswith("_mtp"):  # vLLM has a name for each model's
        method = "mtp"
    for name in _DRAFTS_OWN:
        options.pop(name, None)
    steps = options.pop("num_speculative_tokens", None)
    ranks = options.pop("draft_tensor_parallel_size", None)
    if method is not None and method not in methods:
        raise OptionError(f"method {method}: Aerie speculates with {', '.join(methods)}; take an EAGLE or DFlash head")
    lookup = _prompt_lookup(options) if method == "ngram" else {}
    if options:
        names = ", ".join(options)
        raise OptionError(f"{names}: not known here; --set speculative.KEY=VALUE has all that Aerie can do")
    has_model = methods.get(method or "") != "suffix"
    if has_model and model is None and methods.get(method or "") != "mtp":
        raise OptionError("model is missing: the folder or the hub's name of a head")
    keys: Changes = {**lookup}
    if method is not None:
        keys["speculative.method"] = methods[method]
    if model is not None and has_model:
        keys["speculative.path"] = model
    if steps is not None:
        num_steps = whole_number(steps)
        keys |= {"speculative.num_steps": num_steps, "speculative.num_draft_tokens": num_steps + 1}
    return keys | ({} if ranks is None else {"speculative.draft_tp": ranks})


# Fields of --speculative-config that do not change what is answered, or that follow from the head.
_DRAFTS_OWN = (
    "attention_backend",
    "disable_by_batch_size",
    "disable_padded_drafter_batch",
    "draft_sample_method",
    "enforce_eager",
    "max_model_len",
    "moe_backend",
    "use_local_argmax_reduction",
)


def _prompt_lookup(options: dict[str, Any]) -> Changes:
    """Remove the lengths of n-grams from `options`. vLLM's default is 5; if one is missing, it equals the other."""
    shortest, longest = (options.pop(f"prompt_lookup_{name}", None) for name in ("min", "max"))
    first, last = (next((n for n in pair if n is not None), 5) for pair in ((shortest, longest), (longest, shortest)))
    return {"speculative.match_min": whole_number(first), "speculative.match_max": whole_number(last)}


def attention_backend(*steps: str) -> Callable[[Any], Changes]:
    """Return what chooses the kernels of `steps` (prefill, decode) that a backend of vLLM or SGLang names."""

    def read(value: Any) -> Changes:
        name = str(value).upper()
        if name in OTHER_BACKENDS.split():
            return {}  # Aerie lacks it, and chooses
        backend = one_of(BACKENDS, "--set attention.decode=NAME has Aerie's own")(name)
        return {f"attention.{step}": backend for step in steps}

    return read


def adapters(value: Any) -> Changes:
    """Parse LoRA adapters: NAME=PATH, JSON objects with name and path (SGLang: lora_name, lora_path), or PATH alone,
    which is also the name; in Python also a mapping from names to folders."""
    entries = [value] if isinstance(value, str | Mapping) else list(value)
    if isinstance(value, Mapping) and not {"path", "lora_path"} & value.keys():
        return {"lora.modules": {str(name): str(path) for name, path in value.items()}}
    folders: dict[str, str] = {}
    for item in entries:
        is_json = isinstance(item, str) and item.lstrip().startswith("{")
        if isinstance(item, Mapping) or is_json:
            entry = json_object(item)
            name, path = (entry.get(key) or entry.get(f"lora_{key}") for key in ("name", "path"))
        else:
            name, _, path = str(item).rpartition("=")
            name = name or path
        if not name or not path or not isinstance(name, str) or not isinstance(path, str):
            raise OptionError('each adapter is NAME=PATH, or {"name": NAME, "path": PATH}')
        if name in folders:
            raise OptionError(f"{name}: two adapters have this name")
        folders[name] = path
    return {"lora.modules": folders}


def algorithm(value: Any) -> Changes:
    """Parse SGLang's name of a method; see `settled` for EAGLE."""
    return {ALGORITHM: one_of(ALGORITHMS, "take an EAGLE or DFlash head")(str(value).upper())}


def settled(keys: Changes) -> Changes:
    """Return `keys` where one option's meaning depends on another. A head's own config.json says whether it is EAGLE or
    EAGLE-3; without a head SGLang's EAGLE is the model's MTP module. With attention over data-parallel ranks SGLang's
    engines share one group of GPUs."""
    keys = dict(keys)
    method = keys.pop(ALGORITHM, None)
    if method not in (None, "eagle", "eagle3"):
        keys["speculative.method"] = method
    elif method is not None and "speculative.path" not in keys:
        keys["speculative.method"] = "mtp"
    if keys.pop(ENABLE_LORA, False) and not any(key.startswith("lora.") for key in keys):
        keys["lora.max_loras"] = LoraConfig.max_loras
    if keys.pop(SHARED_ATTENTION, False):
        keys.pop("parallel.replicas", None)
    if (tokens := keys.pop(TOTAL_TOKENS, None)) is not None:
        keys["cache.num_pages"] = -(-tokens // keys.get("cache.page_size", CacheConfig.page_size))
    if keys.get("speculative.top_k") == 1 and "speculative.num_steps" in keys:
        keys.setdefault("speculative.num_draft_tokens", keys["speculative.num_steps"] + 1)
    return keys


def parser(value: Any) -> Changes:
    """Parse the name of a parser of vLLM or SGLang. Other formats than Aerie's are looked for in the chat template."""
    name = str(value).lower().replace("-", "_")
    if name not in PARSERS and name not in OTHER_PARSERS.split():
        near = difflib.get_close_matches(name, [*PARSERS, *OTHER_PARSERS.split()], 1)
        meant = f"is {near[0]} meant? " if near else ""
        raise OptionError(f"no parser of vLLM or SGLang; {meant}Leave it out: the model's chat template says which")
    return {"ingress.output_parser": PARSERS.get(name, "auto")}


def sampling_defaults(value: Any) -> Changes:
    defaults = json_object(value)
    if others := [name for name in defaults if name not in SERVER_DEFAULTS]:
        known = ", ".join(SERVER_DEFAULTS)
        raise OptionError(f"{', '.join(others)}: only {known} have defaults here; send it with requests")
    return {f"ingress.default_{name}": value for name, value in defaults.items()}


def generation_config(value: Any) -> Changes:
    """Parse `auto` (use the model folder's generation config, as without the option) or `vllm` (do not use it)."""
    match value:
        case "auto":
            return {}
        case "vllm":
            return {f"ingress.default_{name}": value.default for name, value in SERVER_DEFAULTS.items()}
    raise OptionError("only `auto` and `vllm` are supported: put generation_config.json into the model's folder")
