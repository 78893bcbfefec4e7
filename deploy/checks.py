"""Checks of a configuration and its checkpoints, without a cluster; `aerie plan`. Imports torch, which takes over a
second, so commands import this module only where they need it."""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from aerie.cluster.assembly import engine_spec
from aerie.cluster.config import AerieConfig, ConfigError
from aerie.cluster.environment import set_process_environment
from aerie.cluster.http.parsers.self_check import chat_lines, check_parser
from aerie.cluster.http.requests.parameters import with_sampling_defaults
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.placement import NodeResources, choose_device, place
from aerie.cluster.plan import Plan, resolve, resolve_rank
from aerie.cluster.replica.plan_report import plan_lines
from aerie.cluster.replica.rank_process import start_ranks
from aerie.cluster.start_log import StartLog, print_line
from aerie.deploy.config.files import PACKAGED
from aerie.deploy.config.model import Chosen, configuration, read_command_line
from aerie.deploy.nodes import LocalGpus, local_nodes
from aerie.kernels.capability import Capability
from aerie.speculative import build
from aerie.speculative.drafts.checkpoint_files import has_weights
from aerie.workers.runner.layout import EnginePlan


def checked(args: Mapping[str, Any], base: Path = PACKAGED) -> AerieConfig:
    """Return the configuration of `args`, matched with its checkpoints. base: folder of relative paths. Raises
    ConfigError."""
    config = configuration(args, base)
    check_checkpoints(config)
    return config


def planned(args: Mapping[str, Any], nodes: Sequence[NodeResources], base: Path = PACKAGED) -> Plan:
    """Return the checked plan of an application on a cluster of `nodes`. base: as in `checked`. Raises ConfigError."""
    config = configuration(args, base)
    max_model_len = check_checkpoints(config)
    check_devices(config, nodes)
    return resolve(config, max_model_len, nodes)


def print_plan(chosen: Chosen, nodes: Sequence[NodeResources]) -> int:
    """Print the plan of a configuration on `nodes`; without nodes, only make the checks that need none. A folder
    without weights is planned from its config.json. Raises ConfigError."""
    config = chosen.config
    check_checkpoints(config, need_weights=False)
    check_devices(config, nodes)
    _print_plan(chosen.name, config, nodes, print)
    if lacking := lacking_weights(config):
        print(f"not checked {', '.join(lacking)}: no weight files yet; a start needs them")
    return 0


def check_and_start_ranks(
    name: str,
    config: AerieConfig,
    gpus: Callable[[], LocalGpus] | None,
    ranks: str,
    tell: Callable[[int], None],
) -> None:
    """Run `print_plan` for `aerie serve` on this machine. Raises ConfigError only before it calls `tell`.

    name: name of `config`, for messages.
    gpus: GPUs of this machine; None: the nodes are not known yet.
    ranks: folder for the sockets of an engine's ranks, which are started once the configuration is checked; "": start
        none.
    tell: called with the result of `check_checkpoints` before the plan is printed, which takes seconds on GPUs."""
    log = StartLog("check")
    log.done("torch imported")
    asked = config.engine.threads_per_worker
    set_process_environment(1 if asked == "auto" else asked)  # ranks on CPUs choose their own number later
    torch.set_num_threads(1)  # reading GGUF files would start threads, and then no rank could be forked
    max_model_len = check_checkpoints(config)
    nodes = []
    if gpus is not None:
        here = gpus()
        nodes = [dataclasses.replace(node, capability=here.capability) for node in local_nodes(1, None, here.count)]
    check_devices(config, nodes)
    log.done("checkpoints read")
    if nodes and ranks:
        _start_ranks(config, max_model_len, nodes, Path(ranks))
        log.done("ranks started")
    tell(max_model_len)
    _print_plan(name, config, nodes, print_line)


def check_devices(config: AerieConfig, nodes: Sequence[NodeResources]) -> None:
    """Refuse a configuration that cannot start on these nodes' devices, or, without nodes, on any device
    (`check_device`). Raises ConfigError."""
    if nodes:
        known = {node.capability for node in nodes}
        capability = known.pop() if len(known) == 1 else None
        check_device(config, place(config, nodes).device, capability, here=capability is not None)
    elif config.model.device != "auto":
        check_device(config, config.model.device)
    else:
        try:
            check_device(config, "cuda")
        except ConfigError as error:
            with contextlib.suppress(ConfigError):
                check_device(config, "cpu")
                return
            raise error from None


def _print_plan(name: str, config: AerieConfig, nodes: Sequence[NodeResources], report: Callable[[str], None]) -> None:
    tokenizer = ChatTokenizer.from_folder(config.model.path, template_file=config.ingress.chat_template)
    chats = chat_lines(tokenizer, config.ingress.output_parser)
    if not nodes:
        report(f"{name} is valid; whether it fits is for the cluster to say")
        for line in chats:
            report(f"chats       {line}")
        return
    placement = place(config, nodes)
    spec, device = engine_spec(config), Capability(placement.device)  # which this machine need not have
    engine = build.plan_engine(spec, device)
    weights = None if device.shares_host_memory else build.plan_weights(spec, engine, multiplies_fp8=True)
    for line in plan_lines(config, placement, nodes, engine.layout, weights, chats):
        report(line)


def _start_ranks(config: AerieConfig, max_model_len: int, nodes: Sequence[NodeResources], folder: Path) -> None:
    """Start the ranks of one engine. If that fails, their actors build them."""
    try:
        start_ranks(resolve_rank(config, max_model_len, choose_device(config, nodes)), folder)
    except (OSError, RuntimeError) as error:
        print_line(f"ranks are not started before Ray: {error}")


def check_checkpoints(config: AerieConfig, need_weights: bool = True) -> int:
    """Match the configuration with config.json of target and draft, the headers of their weight files and the
    tokenizer. Return the length of the longest request in tokens, for `aerie.cluster.plan.resolve`.

    need_weights: refuse folders without weight files, see `lacking_weights`.
    Raises ConfigError."""
    try:
        engine = _engine(config)
        _check_tokenizer(config, engine.target.vocab_size)
        if need_weights or not lacking_weights(config):
            build.check_weights(engine_spec(config), engine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return engine.layout.max_model_len


def check_device(
    config: AerieConfig, device: Literal["cpu", "cuda"], capability: tuple[int, int] | None = None, here: bool = False
) -> None:
    """Raise ConfigError if an engine cannot start on a device: an attention backend does not support its mode, model or
    draft, or the device does not support `deterministic` or the experts.

    capability: abilities of the GPUs; None if unknown.
    here: whether the GPUs are in this machine; then installed packages are checked, too."""
    try:
        build.check_device(engine_spec(config), _engine(config), Capability(device, capability), here)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def lacking_weights(config: AerieConfig) -> list[str]:
    """Return the checkpoint folders whose weight files are missing."""
    paths = [config.model.path, *([config.speculative.path] if config.speculative is not None else [])]
    return [path for path in paths if config.model.load_format != "dummy" and not has_weights(path)]


def _engine(config: AerieConfig) -> EnginePlan:
    """Build the engine's plan on the CPU, because the checking machine may have no GPU."""
    return build.plan_engine(engine_spec(config), Capability("cpu"))


def _check_tokenizer(config: AerieConfig, num_embedded: int) -> None:
    """Raise ValueError if the tokenizer has tokens without an embedding in the target: such a token in a prompt would
    crash the worker. Also for a parser that does not fit the chat template (`check_parser`), and for recommended
    sampling parameters that the ingress would refuse."""
    path = config.model.path
    tokenizer = ChatTokenizer.from_folder(path, template_file=config.ingress.chat_template)
    check_parser(tokenizer, config.ingress.output_parser)
    with_sampling_defaults(config.ingress, tokenizer.sampling_defaults)
    known = tokenizer.vocab_size
    if known > num_embedded:
        raise ValueError(
            f"model.path={path}: its tokenizer has {known} tokens, its config.json vocab_size="
            f"{num_embedded}; use the tokenizer that the model was trained with"
        )
    if tokenizer.num_ids > num_embedded:
        raise ValueError(
            f"model.path={path}: config.json says vocab_size={tokenizer.num_ids}, the model {num_embedded}"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run `aerie plan`. Raises ConfigError."""
    nodes = local_nodes(arguments.nodes, arguments.cpus, arguments.gpus)
    return print_plan(read_command_line(arguments), nodes)
