"""`Plan`: the resolved configuration of an application, as far as it is known before its processes start.

Sizes that depend on checkpoints and device memory are in `aerie.workers.engine_layout.EngineLayout`; the parser of
answers is chosen when the ingress has read the chat template. Only `resolve` reads `engine.spare_workers` and
`ingress.num_replicas`, which may be "auto".

resolve          computes it once, from the configuration as written (`aerie.cluster.config.AerieConfig`), the
                 checkpoints and the cluster; called by `aerie serve`, and by `aerie.deploy.app` where Serve reads the
                 configuration itself
resolve_rank     its part that needs no cluster, for ranks that start before Ray
RankPlan         read by `aerie.cluster.assembly.RankBuilder` and the processes around it
ReplicaPlan      read by an engine's replica, coordinator and supervisor
IngressPlan      read by `aerie.cluster.ingress.deployment`
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from aerie.attention.config import DraftAttention
from aerie.attention.distribution import version
from aerie.cluster.config import AerieConfig, ConfigError, EngineConfig, IngressConfig
from aerie.cluster.http.config import TracingConfig
from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.learning.config import LearningConfig
from aerie.cluster.linux import physical_cores
from aerie.cluster.parallel import ReplicasConfig
from aerie.cluster.placement import NodeResources, Placement, place
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, WorkerConfig

CORES_FOR_TWO = 8  # minimum cores for two ingresses, each of which uses up to one


@dataclass(frozen=True)
class RankPlan:
    """The plan of a rank. Equal plans give equal ranks.

    worker: its `model.device` is "cpu" or "cuda".
    threads: torch threads of a CPU rank.
    log_format: see `aerie.cluster.start_log`.
    """

    worker: WorkerConfig
    speculative: SpeculativeConfig | None
    draft_attention: DraftAttention
    threads: int
    log_format: Literal["text", "json"]

    def __post_init__(self) -> None:
        assert self.worker.model.device != "auto", "`resolve` knows the device"

    @property
    def uses_gpus(self) -> bool:
        """Whether ranks compute on GPUs, one each."""
        return self.worker.model.device == "cuda"


@dataclass(frozen=True)
class ReplicaPlan:
    """The plan of one engine: its ranks and their supervision.

    has_spare_workers: whether a spare process waits for each rank.
    identity: see `identity`.
    one_node: whether the whole application runs on one node.
    learning: how its draft learns; None: it does not.
    busy_file: where its coordinator writes whether it has requests, see `aerie.cluster.learning.engine_busy`; "":
        nowhere.
    """

    rank: RankPlan
    engine: EngineConfig
    has_spare_workers: bool
    one_node: bool
    identity: str
    learning: LearningConfig | None = None
    busy_file: str = ""


@dataclass(frozen=True)
class IngressPlan:
    """The resolved configuration of an ingress.

    config: its `served_model_name` and `max_model_len` are filled in.
    model: the target, in whose folder the tokenizer is.
    resumes: whether requests continue after a loss of their workers.
    start_timeout_s: start timeout of engines.
    identity: identity of the engines that it may use; see `identity`.
    one_node: see `ReplicaPlan`.
    """

    config: IngressConfig
    model: ModelSource
    resumes: bool
    start_timeout_s: float
    tracing: TracingConfig
    log_format: Literal["text", "json"]
    one_node: bool
    identity: str


@dataclass(frozen=True)
class Plan:
    """The resolved configuration of an application.

    placement: placement of each engine's processes.
    num_engines: number of engines, or the bounds and times of autoscaling.
    num_ingresses: replicas of the ingress.
    """

    replica: ReplicaPlan
    ingress: IngressPlan
    placement: Placement
    num_engines: int | ReplicasConfig
    num_ingresses: int

    def to_args(self) -> dict[str, Any]:
        """Return the `args` of a Serve application: plain values that YAML can hold."""
        args: dict[str, Any] = msgspec.to_builtins(self)
        return args

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> "Plan":
        """Rebuild a plan from the result of `to_args`."""
        return msgspec.convert(args, Plan)


def resolve_rank(config: AerieConfig, max_model_len: int, device: Literal["cpu", "cuda"]) -> RankPlan:
    """Return the plan of an engine's ranks. max_model_len: see `resolve`. device: see
    `aerie.cluster.placement.choose_device`."""
    worker = config.worker
    model = dataclasses.replace(worker.model, device=device, max_model_len=max_model_len)
    asked = config.engine.threads_per_worker
    plan = RankPlan(
        dataclasses.replace(worker, model=model),
        config.speculative,
        config.draft_attention,
        1 if asked == "auto" else asked,
        config.log_format,
    )
    if asked == "auto" and not plan.uses_gpus:
        num_ranks = worker.tensor_parallel * config.parallel.min_replicas
        # one core is left to Ray, ingress and coordinator: a product ends with its slowest thread, so one that waits
        # for a core stops all (two cores under load: a server took 394 ms a token with two threads, 40 with one)
        return dataclasses.replace(plan, threads=max(1, (physical_cores() - 1) // num_ranks))
    return plan


def resolve(config: AerieConfig, max_model_len: int, nodes: Sequence[NodeResources]) -> Plan:
    """Return the plan of an application on a cluster of `nodes`.

    max_model_len: limit of the checkpoints (`aerie.deploy.checks.check_checkpoints`).

    Raises ConfigError if the engines do not fit."""
    engine, wanted = config.engine, config.ingress.num_replicas
    placement = place(config, nodes)
    device, one_node = placement.device, len(nodes) == 1 and not config.parallel.autoscaling
    spares = device == "cuda" if engine.spare_workers == "auto" else engine.spare_workers
    if config.learning is not None and not one_node and not config.learning.folder:
        raise ConfigError("learning.folder: give a folder that all nodes share, in which drafts are written")
    num_cpus = sum(node.cpus for node in nodes)
    num_ingresses = (2 if num_cpus >= CORES_FOR_TWO else 1) if wanted == "auto" else wanted
    ingress = dataclasses.replace(
        config.ingress,
        api_keys=_divided(config.ingress.api_keys, num_ingresses),
        served_model_name=config.served_model_name,
        max_model_len=config.ingress.max_model_len or max_model_len,
        serves_adapters=config.lora is not None,
        records_experts=config.cache.routed_experts,
    )
    same = identity(config, max_model_len)
    return Plan(
        ReplicaPlan(resolve_rank(config, max_model_len, device), engine, spares, one_node, same, config.learning),
        IngressPlan(
            ingress,
            config.model,
            engine.on_worker_loss == "resume",
            engine.start_timeout_s,
            config.tracing,
            config.log_format,
            one_node,
            same,
        ),
        placement,
        config.parallel.replicas,
        num_ingresses,
    )


def identity(config: AerieConfig, max_model_len: int) -> str:
    """Return a digest of what an ingress and its engines must agree on: the code that encodes messages, the model with
    its tokenizer and chat template, and the length limit. While an application is updated, processes of two plans run;
    an ingress uses only engines of its own identity. max_model_len: see `resolve`."""
    model = config.model
    parts = [
        version(),
        str((model.path, model.rope_scaling, model.load_format, model.seed, max_model_len)),
        str((model.images, model.max_image_pixels)),
    ]
    return _digest(*parts, _file_versions(model.path))[:16]


def start_identity(plan: ReplicaPlan) -> str:
    """Return a digest of what decides whether an engine can start: its plan and the checkpoints' files. A repaired
    checkpoint has another one."""
    rank = plan.rank
    folders = {rank.worker.model.path, *([rank.speculative.path] if rank.speculative is not None else [])}
    return _digest(plan, *(_file_versions(folder) for folder in sorted(folders)))


def _file_versions(folder: str) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of a checkpoint's files, in place of their content: weights are large."""
    stats = ((path.name, path.stat()) for path in sorted(Path(folder).glob("*")) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _divided(entries: Sequence[str | KeyConfig], num_ingresses: int) -> tuple[str | KeyConfig, ...]:
    """Return the API keys with the limits of one ingress. Raises ConfigError."""
    try:
        return tuple(entry if isinstance(entry, str) else entry.part(num_ingresses) for entry in entries)
    except ValueError as error:
        raise ConfigError(f"ingress.api_keys: {error}") from None
