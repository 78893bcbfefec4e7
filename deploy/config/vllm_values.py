"""Parses the values of `vllm serve`'s options, for the table in `deploy.config.vllm_options`."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

QUANTIZATION = "quantization_config.quant_method"  # a key of the checkpoint's config.json, not of the configuration

Changes = dict[str, Any]  # key of the configuration, such as model.dtype -> value


class OptionError(ValueError):
    """An option cannot be honoured; the message names it, the value and the remedy."""


def to_key(key: str, read: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Changes]:
    return lambda value: {key: read(value)}


def whole_number(value: Any) -> int:
    """Parse 32768, and vLLM's 32k (32,000) and 32K (32,768)."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", str(value))
    if found is None:
        raise OptionError("must be a whole number, such as 32768 or 32k")
    return int(found[1]) * {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]]


def real_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise OptionError("must be a number") from None


def one_of(table: Mapping[str, Any], remedy: str = "") -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if str(value) not in table:
            raise OptionError(f"Aerie knows {', '.join(table)}{'; ' + remedy if remedy else ''}")
        return table[str(value)]

    return read


def only(value: str, remedy: str) -> Callable[[Any], Changes]:
    """Accept the one value of an option that Aerie implements; refuse others with `remedy`."""

    def read(given: Any) -> Changes:
        if str(given).lower() != value:
            raise OptionError(remedy)
        return {}

    return read


def refused(remedy: str) -> Callable[[Any], Changes]:
    def refuse(value: Any) -> Changes:
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


def speculative(value: Any) -> Changes:
    """Parse vLLM's object: method, model, num_speculative_tokens, draft_tensor_parallel_size; for n-grams also
    prompt_lookup_min and prompt_lookup_max."""
    found = dict(_json(value))
    methods = {name: name for name in ("eagle", "eagle3", "mtp", "dflash", "dspark", "dflash2", "suffix")}
    methods |= {"ngram": "suffix"}
    methods |= dict.fromkeys(("deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "gemma4_mtp"), "mtp")
    model, method = found.pop("model", None), found.pop("method", None)
    steps = found.pop("num_speculative_tokens", None)
    ranks = found.pop("draft_tensor_parallel_size", None)
    if method is not None and method not in methods:
        raise OptionError(f"method {method}: Aerie speculates with {', '.join(methods)}; take an EAGLE or DFlash head")
    lookup = _prompt_lookup(found) if method == "ngram" else {}
    if found:
        names = ", ".join(found)
        raise OptionError(f"{names}: not known here; --set speculative.KEY=VALUE has all that Aerie can do")
    has_model = methods.get(method or "") != "suffix"
    if not has_model and model not in (None, method):
        raise OptionError(f"model {model}: method {method} has none; leave it out")
    if has_model and model is None and methods.get(method or "") != "mtp":
        raise OptionError("model is missing: the folder or the hub's name of a head")
    keys: Changes = {**lookup}
    if method is not None:
        keys["speculative.method"] = methods[method]
    if model is not None and has_model:
        keys["speculative.path"] = model
    if steps is not None:
        keys |= {"speculative.num_steps": steps, "speculative.num_draft_tokens": whole_number(steps) + 1}
    return keys | ({} if ranks is None else {"speculative.draft_tp": ranks})


def _prompt_lookup(found: dict[str, Any]) -> Changes:
    """Remove the lengths of n-grams from `found`. vLLM's default is 5; if one is missing, it equals the other."""
    shortest, longest = (found.pop(f"prompt_lookup_{name}", None) for name in ("min", "max"))
    first, last = (next((n for n in pair if n is not None), 5) for pair in ((shortest, longest), (longest, shortest)))
    return {"speculative.match_min": whole_number(first), "speculative.match_max": whole_number(last)}


def attention_backend(value: Any) -> Changes:
    backend = one_of(_BACKENDS, "--set attention.decode=NAME has Aerie's own")(value)
    return {"attention.prefill": backend, "attention.decode": backend}


def sampling_defaults(value: Any) -> Changes:
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = _json(value)
    if others := [name for name in found if name not in known]:
        raise OptionError(f"{', '.join(others)}: only {', '.join(known)} have defaults here; send it with requests")
    return {f"ingress.default_{name}": value for name, value in found.items()}


def generation_config(value: Any) -> Changes:
    """`auto`: use the model folder's generation config, as without the option. `vllm`: do not use it."""
    match value:
        case "auto":
            return {}
        case "vllm":
            off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
            return {f"ingress.default_{name}": number for name, number in off.items()}
    raise OptionError("only `auto` and `vllm` are supported: put generation_config.json into the model's folder")


_BACKENDS = {
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    "TORCH_SDPA": "torch",
    "FLASHINFER_MLA": "flashinfer",
    "TRITON_MLA": "triton",
}
