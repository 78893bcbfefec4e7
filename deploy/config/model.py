"""What a command line (a model's name and options) or a config file amounts to, read and checked once. Used by `aerie
serve`, `aerie plan`, `aerie doctor`, `aerie eval-draft` and `aerie.LLM`; `aerie.cluster.plan.resolve` makes the plan of
it."""

import argparse
import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie.cluster.config import AerieConfig, ConfigError, parse, read_content
from aerie.deploy.config import hub, vllm_options
from aerie.deploy.config.drafts import block_tree_keys, draft_method, own_draft
from aerie.deploy.config.files import (
    PACKAGED,
    find_config,
    is_gguf_folder,
    is_gguf_path,
    key_digest,
    make_portable,
    packaged_names,
    with_tokenizer,
)
from aerie.deploy.config.hub import model_folder, with_downloads
from aerie.deploy.config.vllm_values import DOWNLOADS, OWN_TOKENIZER, QUANTIZATION, Changes, OptionError

# vLLM's kernel names, by the quant_method of checkpoints.
_SAME_QUANTIZATION = {"awq_marlin": "awq", "auto_awq": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq"}
_SAME_QUANTIZATION |= {"modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt", "gpt_oss_mxfp4": "mxfp4"}
_SAME_QUANTIZATION |= dict.fromkeys(("w8a8_int8", "w8a8_fp8"), "compressed-tensors")

_COPYING = ("suffix", "ngram")  # values of --draft that need no checkpoint


def check_file_options(path: Path, arguments: argparse.Namespace) -> None:
    """Refuse options that need a model, beside the config file `path`. Raises ConfigError."""
    wanted = {"--draft": arguments.draft, "--set": arguments.set}
    wanted |= {"--save": arguments.save, "--revision": arguments.revision}
    if used := [name for name, value in wanted.items() if value]:
        raise ConfigError(f"{used[0]}: only with a model; {path} is a config file: write it there")
    if keys := _vllm_keys(arguments):
        raise ConfigError(
            f"{', '.join(f'{key}={value}' for key, value in keys.items())}: vLLM's options are allowed only with a "
            f"model; {path} is a config file: write these keys there"
        )


def content_of_model(source: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the content of a Serve config file for a model in a folder or on the hub. Raises ConfigError."""
    keys = _vllm_keys(arguments, print)
    if DOWNLOADS in keys:
        os.environ[DOWNLOADS] = str(keys.pop(DOWNLOADS))  # huggingface_hub, which is imported later, reads it
    if "ingress.chat_template" in keys:
        keys["ingress.chat_template"] = _template_file(keys["ingress.chat_template"])
    args = model_args(source, arguments.draft, arguments.revision)
    if not any(_chooses_draft(key) for key in [*keys, *(text.partition("=")[0] for text in arguments.set)]):
        args = _with_own_draft(args)
    args = use_options(args, keys)
    for assignment in arguments.set:
        _assign(args, assignment)
    application = {"name": "aerie", "route_prefix": "/", "import_path": "aerie.deploy.app:build", "args": args}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }


def quick_start() -> str:
    """Return what to serve if nothing is named: the published model, or a packaged one if it cannot be fetched."""
    try:
        hub.fetched_file(hub.SMOLLM2)
    except hub.NotFetchedError as error:
        wanted, packaged = hub.SMOLLM2.name, hub.FALLBACK
        print(f"{error}: serving the embedded test model ({packaged}) instead of {wanted}")
        return hub.FALLBACK
    return hub.NAME


def model_args(source: str, draft: str | None, revision: str | None) -> dict[str, Any]:
    """Return the `args` of an application for a model in a folder or on the hub. Raises ConfigError."""
    model = model_folder(source, revision)
    args: dict[str, Any] = {
        "model": {"path": str(model)},
        "ingress": {"served_model_name": _served_name(source, model)},
    }
    if draft is None and source == hub.NAME:
        return use_options(args, hub.DRAFT)
    if draft in _COPYING:
        return use_options(args, {"speculative.method": "suffix"})
    return use_options(args, {"speculative.path": draft} if draft else {})


def use_options(args: dict[str, Any], keys: Changes) -> dict[str, Any]:
    """Return `args` with the keys that options set. Raises ConfigError."""
    args = copy.deepcopy(args)
    for key, value in keys.items():
        if key == DOWNLOADS:
            raise ConfigError(f"download_dir={value}: set {DOWNLOADS} in the environment")
        if key == OWN_TOKENIZER:
            _use_tokenizer(value, args)
        elif key == QUANTIZATION:
            _check_quantization(value, Path(args["model"]["path"]))
        elif key == "speculative.path":
            folder = model_folder(value, None)
            speculative = args.setdefault("speculative", {})
            speculative |= {"path": str(folder)} | {"method": speculative.get("method") or draft_method(folder)}
        else:
            _set(args, key, value, f"{key}={value}")
    if "speculative.path" in keys and not args["speculative"].keys() & {"num_steps", "top_k", "num_draft_tokens"}:
        args["speculative"] |= block_tree_keys(Path(args["speculative"]["path"]), Path(args["model"]["path"]))
    return args


def _chooses_draft(key: str) -> bool:
    return key in ("speculative", "speculative.method", "speculative.path", "speculative.num_steps")


def _with_own_draft(args: dict[str, Any]) -> dict[str, Any]:
    """Return `args` with the model's own draft, unless they name a draft."""
    draft = None if "speculative" in args else own_draft(Path(args["model"]["path"]))
    if draft is None:
        return args
    print("speculative: the model's own MTP module drafts (--set speculative=null: no draft)")
    return {**args, "speculative": draft}


def _vllm_keys(arguments: argparse.Namespace, report: Callable[[str], None] = lambda note: None) -> Changes:
    """Return the keys that options of `vllm serve` set. report: called with a line for each option that differs from
    vLLM's. Raises ConfigError."""
    try:
        keys, notes = vllm_options.changes(vllm_options.given(arguments))
    except OptionError as error:
        raise ConfigError(str(error)) from None
    for note in notes:
        report(note)
    if "ingress.api_keys" in keys:
        keys["ingress.api_keys"] = [key_digest(key) for key in keys["ingress.api_keys"]]  # never write keys to files
    return keys


def _use_tokenizer(source: str, args: dict[str, Any]) -> None:
    """Use another tokenizer for a GGUF file; refuse it for other models. Raises ConfigError."""
    path = args["model"]["path"]
    if is_gguf_folder(Path(path)):
        args["model"]["path"] = str(with_tokenizer(Path(path), Path(source).expanduser().resolve()))
    elif source not in (path, args.get("ingress", {}).get("served_model_name")) and str(Path(source).resolve()) != path:
        remedy = "put its tokenizer.json and tokenizer_config.json into the model's folder"
        raise ConfigError(f"--tokenizer {source}: the tokenizer is the model's own; {remedy}")


def _template_file(template: str) -> str:
    """Return the absolute path of --chat-template. Raises ConfigError."""
    path = Path(template).expanduser()
    if path.is_file():
        return str(path.resolve())
    raise ConfigError(
        f"--chat-template {template}: no such file; leave it out for the model's own, or save the template as a file"
    )


def _check_quantization(wanted: str, model: Path) -> None:
    """Refuse --quantization if the checkpoint has another. Raises ConfigError."""
    if wanted == "gguf" and is_gguf_folder(model):
        return
    raw = json.loads((model / "config.json").read_text())
    present = (raw.get("quantization_config") or {}).get("quant_method")
    if _SAME_QUANTIZATION.get(wanted, wanted) != present:
        own = f"is quantised by {present}" if present else "is not quantised"
        raise ConfigError(
            f"--quantization {wanted}: {model} {own}, and Aerie quantises nothing itself: leave it out, or serve a "
            f"checkpoint in {wanted}"
        )


def names_model(source: str) -> bool:
    """Whether this is a folder with a checkpoint, a GGUF file, or a name of the form OWNER/NAME and no file."""
    path = hub.snapshot(Path(source).expanduser())
    if is_gguf_path(source) or source == hub.NAME:
        return True
    if path.is_dir():
        return (path / "config.json").is_file()
    is_name = (
        source.count("/") == 1 and not source.startswith((".", "/", "~")) and not source.endswith((".yaml", ".yml"))
    )
    return is_name and not path.is_file() and source not in packaged_names()


def _served_name(source: str, folder: Path) -> str:
    if source == hub.NAME:
        return hub.SMOLLM2.name
    is_path = is_gguf_path(source) or Path(source).expanduser().is_dir()
    return (hub.cached_name(folder) or folder.name) if is_path else source.partition("@")[0]


def _assign(args: dict[str, Any], assignment: str) -> None:
    """Set keys given as `cache.memory_gb=4`, with YAML values. The check of the configuration refuses unknown keys."""
    key, separator, value = assignment.partition("=")
    parts: Sequence[str] = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {assignment}: must be KEY=VALUE, such as cache.memory_gb=4")
    try:
        _set(args, key, yaml.safe_load(value), f"--set {assignment}")
    except yaml.YAMLError:
        raise ConfigError(f"--set {assignment}: the value is not YAML; quote it") from None


def _set(args: dict[str, Any], key: str, value: Any, shown: str) -> None:
    """Set a key such as cache.memory_gb. shown: name of the option in errors."""
    *parts, last = key.split(".")
    section: Any = args
    for part in parts:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{shown}: {part} is no section")
    section[last] = value


@dataclass(frozen=True)
class Chosen:
    """A server's configuration.

    name: name of its file or model, for messages.
    content: content of a Serve config file, with the command line's options, without relative paths.
    application: its first Aerie application, a part of `content`.
    config: the checked `args` of that application.
    """

    name: str
    content: dict[str, Any]
    application: dict[str, Any]
    config: AerieConfig

    @property
    def has_one_engine(self) -> bool:
        """Whether there is one application, with one engine."""
        return len(self.content["applications"]) == self.config.parallel.replicas == 1


def configuration(args: Mapping[str, Any], base: Path = PACKAGED) -> AerieConfig:
    """Return the checked configuration of an application's `args`. Checkpoints named by hub names are downloaded. base:
    folder of relative paths. Raises ConfigError."""
    return parse(with_downloads(args, base), base)


def read_file(source: str) -> Chosen:
    """Return the configuration of a file, or of the packaged one of this name. Raises ConfigError."""
    path = find_config(source)
    return _chosen(str(path), *read_content(path), path.resolve().parent)


def read_command_line(arguments: argparse.Namespace) -> Chosen:
    """Return the configuration of the arguments of `aerie serve`: a file's, or that of a model in a folder or on the
    hub, which is written to --save. Raises ConfigError."""
    source = str(arguments.config or quick_start())
    is_model = names_model(source)
    if is_model:
        content = content_of_model(source, arguments)
        application, name, base = content["applications"][0], source, Path.cwd()
    else:
        path = find_config(source)
        check_file_options(path, arguments)
        (content, application), name, base = read_content(path), str(path), path.resolve().parent
    root_path = None if arguments.root_path is None else arguments.root_path.rstrip("/")
    http = {"host": arguments.host, "port": arguments.port, "root_path": root_path}
    content["http_options"] = dict(content.get("http_options") or {}) | _set_chosen(http)
    application |= {"name": "aerie", "route_prefix": "/"} | application
    application |= _set_chosen({"name": arguments.name, "route_prefix": arguments.route_prefix})
    if is_model:
        text = yaml.safe_dump(content, sort_keys=False)
        if arguments.shows_config:
            print(text, end="", flush=True)
        if arguments.save:
            arguments.save.write_text(text)
    return _chosen(name, content, application, base)


def _set_chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _chosen(name: str, content: dict[str, Any], application: dict[str, Any], base: Path) -> Chosen:
    config = configuration(application["args"], base)
    make_portable(content, base)
    return Chosen(name, content, application, config)
