"""Runs a function once per rank, each in a process of its own, with a timeout: a kernel that spins or a collective that
a rank misses ends as a failed test."""

import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aerie.workers.distributed.ports import free_port

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@functools.cache
def fresh_processes() -> BaseContext:
    """Starts processes. Without a GPU they are forks of one that has imported what ranks need, which each would import
    for seconds; they see the environment of the first start."""
    if torch.cuda.device_count():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    return context


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """The ranks of local engines start so too. For the conftest.py of folders whose tests have such engines."""
    forked = SimpleNamespace(get_context=lambda _: fresh_processes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aerie.workers.runner.local_engine.multiprocessing", forked)
        yield


class RankError(AssertionError):
    """A rank raised, died or did not finish; carries every rank's story."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    deadline_s: float = 120,
    environments: Sequence[dict[str, str]] | None = None,
    grace_s: float = 10,
) -> list[Any]:
    """What function(rank, size, address, *arguments) returns on each rank; it must be a module's own, and give plain
    values, no tensors. environments: variables for each rank, beside those that keep NVLink multicast off. grace_s:
    that the others get once a rank has failed: they may wait for it in vain."""
    context = fresh_processes()
    address = f"tcp://127.0.0.1:{free_port()}"
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            environment = NO_MULTICAST | (environments[rank] if environments else {})
            task = (theirs, environment, function, rank, size, address, arguments)
            process = context.Process(target=_run, args=task, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        outcomes = _collect(pipes, time.monotonic() + deadline_s, grace_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(10)
    stories = [f"rank {rank}: {story}" for rank, (ok, story) in enumerate(outcomes) if not ok]
    if stories:
        raise RankError("\n".join(stories))
    return [value for _, value in outcomes]


def _collect(pipes: list[Connection], deadline_s: float, grace_s: float) -> list[tuple[bool, Any]]:
    """Each rank's outcome."""
    outcomes: list[tuple[bool, Any]] = [(False, "did not finish in time")] * len(pipes)
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline_s:
        for rank, pipe in list(waiting.items()):
            if not pipe.poll(0.02):
                continue
            del waiting[rank]
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = (False, "died without a word")
            if not outcomes[rank][0]:
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
    return outcomes


def _run(
    pipe: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    rank: int,
    size: int,
    address: str,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    try:
        pipe.send((True, function(rank, size, address, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # a process group or a captured graph may not want to be torn down
