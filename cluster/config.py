"""The configuration of one Aerie application: the `args` of the Serve config file, checked once, here.

Sections are the dataclasses of the layers they configure. Every error names key, value, rule and remedy; an unknown
key's error suggests the most similar one.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.attention.config import CacheConfig, DraftAttention, TargetAttention
from aerie.attention.setting import Setting, check_settings
from aerie.cluster.http.config import EdgeConfig, TracingConfig
from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.learning.config import LearningConfig
from aerie.cluster.parallel import ParallelConfig
from aerie.speculative.config import BLOCK_METHODS, SpeculativeConfig, with_method_defaults
from aerie.workers.config import GraphCapture, LoraConfig, ModelSource, SchedulerConfig, WorkerConfig

_SECRET = "ingress.api_keys"  # errors do not show its value
_FORMER_PATH = "deploy.app:build"  # before 0.2
LEARNERS = ("eagle3", *BLOCK_METHODS)  # methods of `aerie.speculative.training.head_learner`
OnWorkerLoss = Literal["resume", "error"]


class ConfigError(ValueError):
    """An invalid configuration; the message has one line per fault, with its remedy."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits by which an engine is watched and restarted.

    on_worker_loss: `resume`: running requests continue after a worker's death; `error`: they end.
    max_resumes: how often a request is resumed; at most once if its own step hung or crashed.
    start_timeout_s: time from placement to readiness.
    step_timeout_s: a longer step counts as hung.
    queue_timeout_s: longest wait for a first step, measured or expected; longer ones get 429.
    drain_timeout_s: time for running requests at shutdown.
    restart_backoff_s: pause after a failed start, doubled each time.
    max_restarts: failed starts in a row before Serve replaces the replica.
    threads_per_worker: threads that compute on a CPU rank; auto: this machine's physical cores except one, shared by
        its ranks; 1 where ranks use GPUs.
    spare_workers: one more process per rank, with everything imported, to replace a dead one (0.2 GB of host memory, no
        device memory); auto: where ranks use GPUs.
    debug: compare the ranks' tokens after every step, and check what operations are called with.
    """

    on_worker_loss: OnWorkerLoss = "resume"
    max_resumes: Annotated[int, Setting(ge=1)] = 2
    start_timeout_s: Annotated[float, Setting(gt=0)] = 600.0
    step_timeout_s: Annotated[float, Setting(gt=0)] = 60.0
    queue_timeout_s: Annotated[float, Setting(gt=0)] = 300.0
    drain_timeout_s: Annotated[float, Setting(gt=0)] = 30.0
    restart_backoff_s: Annotated[float, Setting(gt=0)] = 0.5
    max_restarts: Annotated[int, Setting(ge=1)] = 5
    threads_per_worker: Annotated[int | Literal["auto"], Setting(ge=1)] = "auto"
    spare_workers: bool | Literal["auto"] = "auto"
    debug: bool = False

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class IngressConfig(EdgeConfig):
    """The HTTP ingresses; `EdgeConfig` has the other keys.

    num_replicas: ingresses; auto: 2 on clusters of 8 or more cores, so that one may die, else 1.
    routing: choice of the engine. `first_token`: earliest expected first token, from cached prefixes, pending prompts
        and speed; `least_loaded`: fewest requests.
    """

    num_replicas: Annotated[int | Literal["auto"], Setting(ge=1)] = "auto"
    routing: Literal["first_token", "least_loaded"] = "first_token"


class AerieConfig(BaseModel):
    """One application as the user wrote it: a target, perhaps a draft, engines and ingresses.
    `aerie.cluster.plan.resolve` makes the plans of its processes from it.

    deterministic: on a GPU, an answer depends on its request alone, not on speculation, batch or cache; slower
        (`aerie.workers.runner.deterministic`).
    log_format: `json`: processes log JSON objects, one per line on stderr, with the client's `X-Request-Id`. Each
        finished request is logged with path, status, reason and seconds. The output of the start stays text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: ModelSource
    speculative: SpeculativeConfig | None = None
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    attention: TargetAttention = TargetAttention()
    draft_attention: DraftAttention = DraftAttention()
    graph_capture: GraphCapture = GraphCapture()
    lora: LoraConfig | None = None
    learning: LearningConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    ingress: IngressConfig = IngressConfig()
    engine: EngineConfig = EngineConfig()
    tracing: TracingConfig = TracingConfig()
    deterministic: Annotated[bool, Setting("--enable-deterministic-inference")] = False
    log_format: Literal["text", "json"] = "text"

    @property
    def served_model_name(self) -> str:
        """The model name for clients."""
        return self.ingress.served_model_name or Path(self.model.path).name

    @property
    def worker(self) -> WorkerConfig:
        """The part of the configuration that ranks need."""
        return WorkerConfig(
            model=self.model,
            cache=self.cache,
            scheduler=self.scheduler,
            attention=self.attention,
            graph_capture=self.graph_capture,
            lora=self.lora,
            tensor_parallel=self.parallel.tensor_parallel,
            expert_parallel=self.parallel.expert_parallel,
            deterministic=self.deterministic,
            debug=self.engine.debug,
        )


def parse(args: Mapping[str, Any], base: Path) -> AerieConfig:
    """Return the checked configuration of a Serve application's `args`; relative paths start at `base`.

    Raises ConfigError."""
    faults = list(_unknown_keys(args, AerieConfig, ""))
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        # JSON mode: strict types, but a mapping is accepted for a dataclass.
        config = AerieConfig.model_validate_json(json.dumps(_with_defaults(args)), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error.errors()))) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"args: must be plain YAML values ({error})") from None
    return _with_paths(config, base)


def read_content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of a Serve config file, and its first Aerie application, whose `args` are a mapping. Raises
    ConfigError."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML ({error})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no text; give a Serve config file, or a model's folder") from None
    applications = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(applications, list):
        raise ConfigError(f"{path}: has no list `applications`; `aerie config eagle` prints one to start from")
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == "aerie.deploy.app:build":
            application["args"] = application.get("args") or {}
            if not isinstance(application["args"], dict):
                raise ConfigError(f"{path}: `args` must be a mapping")
            return content, application
    former = any(isinstance(entry, dict) and entry.get("import_path") == _FORMER_PATH for entry in applications)
    remedy = f" ({_FORMER_PATH} is its name before 0.2)" if former else ""
    raise ConfigError(f"{path}: no application has import_path aerie.deploy.app:build{remedy}")


def read_args(path: Path) -> dict[str, Any]:
    """Return the `args` of the first Aerie application in a Serve config file. Raises ConfigError."""
    args: dict[str, Any] = read_content(path)[1]["args"]
    return args


def _with_defaults(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the args with the draft method's own defaults."""
    section = args.get("speculative")
    return {**args, "speculative": with_method_defaults(section)} if isinstance(section, Mapping) else dict(args)


def _with_paths(config: AerieConfig, base: Path) -> AerieConfig:
    """Return the configuration with absolute paths, and the digests of API keys' files. base: folder at which relative
    paths start. Raises ConfigError for files that are missing and for a draft that does not fit."""
    model = dataclasses.replace(config.model, path=_folder("model.path", config.model.path, base))
    changes: dict[str, Any] = {"model": model}
    if config.speculative is not None:
        method, draft_path = config.speculative.method, config.speculative.path
        if method == "suffix" and draft_path:
            raise ConfigError(f"speculative.path={draft_path}: method suffix has no checkpoint; leave it out")
        with_target = method == "suffix" or (method == "mtp" and not draft_path)
        path = model.path if with_target else _folder("speculative.path", config.speculative.path, base)
        changes["speculative"] = dataclasses.replace(config.speculative, path=path)
    ingress = dataclasses.replace(config.ingress, api_keys=tuple(_read_keys(config.ingress.api_keys, base)))
    if ingress.chat_template:
        ingress = dataclasses.replace(ingress, chat_template=_file(ingress.chat_template, base))
    changes["ingress"] = ingress
    if config.lora is not None:
        modules = {name: _adapter(name, path, config, base) for name, path in config.lora.modules.items()}
        changes["lora"] = dataclasses.replace(config.lora, modules=modules)
    if config.learning is not None and (config.speculative is None or config.speculative.method not in LEARNERS):
        has = "none" if config.speculative is None else config.speculative.method
        raise ConfigError(f"learning: speculative.method={has} cannot learn; use one of {', '.join(LEARNERS)}")
    return config.model_copy(update=changes)


def _read_keys(entries: Sequence[str | KeyConfig], base: Path) -> Iterator[str | KeyConfig]:
    for index, entry in enumerate(entries):
        try:
            yield entry if isinstance(entry, str) else entry.read(base)
        except ValueError as error:
            raise ConfigError(f"{_SECRET}.{index}.{error}") from None


def _file(value: str, base: Path) -> str:
    path = Path(value).expanduser()
    path = path if path.is_absolute() else base / path
    if not path.is_file():
        raise ConfigError(f"ingress.chat_template={value}: {path} is no file; relative paths start at {base}")
    return str(path)


def _folder(key: str, value: str, base: Path) -> str:
    """Return the absolute path of a checkpoint's folder. key: for errors. base: where relative paths start."""
    if not value:
        raise ConfigError(f"{key}: is missing; give the folder that holds config.json and the weights")
    path = Path(value).expanduser()
    path = path if path.is_absolute() else base / path
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{key}={value}: {path} has no config.json; relative paths start at {base}; give a "
            "downloaded checkpoint's folder, present under the same path on every node, or OWNER/NAME on the hub"
        )
    return str(path)


def _adapter(name: str, value: str, config: AerieConfig, base: Path) -> str:
    """Return the folder of an adapter. Raises ConfigError."""
    if name in (config.served_model_name, *config.ingress.model_aliases):
        raise ConfigError(f"lora.modules.{name}: is the model's own name; give the adapter another one")
    path = Path(value).expanduser()
    path = path if path.is_absolute() else base / path
    if not name or not (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"lora.modules.{name}={value}: {path} has no adapter_config.json; relative paths start at {base}; give an "
            "adapter's folder as peft saves it, present under the same path on every node, or OWNER/NAME on the hub"
        )
    return str(path)


def _fields(section: type) -> dict[str, Any]:
    if dataclasses.is_dataclass(section):
        return {f.name: f.type for f in dataclasses.fields(section)}
    return {name: f.annotation for name, f in cast(type[BaseModel], section).model_fields.items()}


def _unknown_keys(values: Mapping[str, Any], section: type, prefix: str) -> Iterator[str]:
    """Yield a message for each unknown key, also of nested sections. prefix: path of `values`, with a dot at its
    end."""
    known = _fields(section)
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.7)
            remedy = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(known)}"
            # an unknown key among API keys may be a secret in the wrong place: it is not quoted
            name = f"{prefix}{key}" if near or not prefix.startswith(_SECRET) else prefix.removesuffix(".")
            yield f"{name}: unknown key; {remedy}"
            continue
        entries = {f"{key}.{index}": entry for index, entry in enumerate(value)} if isinstance(value, list) else {}
        for kind in _dataclasses(known[key]):
            for name, entry in (entries or {key: value}).items():
                if isinstance(entry, Mapping):
                    yield from _unknown_keys(entry, kind, f"{prefix}{name}.")


def _dataclasses(annotation: Any) -> Iterator[type]:
    """Yield the dataclasses that a value, or an entry of its list, may be."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _dataclasses(part)


def _sentences(faults: Iterable[Any]) -> Iterator[str]:
    """Return a line per key: `key=value: rule`. For a key of several types pydantic reports a fault per type."""
    by_key: dict[str, list[Any]] = {}
    for fault in faults:
        parts = [str(part) for part in fault["loc"]]
        key = ".".join(part for part in parts if not part.endswith("Config") and not _is_type(part))
        by_key.setdefault(key, []).append(fault)
    for key, faults in by_key.items():
        if isinstance(faults[0]["input"], Mapping) and any(other.startswith(f"{key}.") for other in by_key):
            continue  # a section instead of a number: the faults in it are reported
        faults.sort(key=lambda fault: fault["type"] != "value_error")
        if faults[0]["type"] == "missing":
            yield f"{key}: is missing"
        elif faults[0]["type"] == "value_error":
            message = str(faults[0]["msg"]).removeprefix("Value error, ")
            yield f"{key}.{message}" if key else message
        else:
            rules = " or ".join(str(fault["msg"]) for fault in faults)
            value = "" if key.startswith(_SECRET) else f"={faults[0]['input']!r}"
            yield f"{key}{value}: {rules[0].lower()}{rules[1:].replace('or Input', 'or input')}"


def _is_type(part: str) -> bool:
    """Return whether this part of a fault's path is the name of a type."""
    return part in ("int", "float", "str") or part.startswith("literal[")
