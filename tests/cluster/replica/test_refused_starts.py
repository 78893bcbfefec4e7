"""A start that was refused is not tried again: told from failures that may pass, given up at once with its reason, and
seen by the command that waits for it."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from aerie.cluster.config import parse
from aerie.cluster.placement import NodeResources
from aerie.cluster.plan import ReplicaPlan, resolve
from aerie.cluster.replica import engine
from aerie.cluster.replica.supervisor import GaveUpError, Supervisor
from aerie.cluster.replica.worker_group import StartRefusedError, WorkerGroup, WorkerGroupError
from aerie.deploy.serve import watches
from aerie.deploy.serve.applications import Application
from aerie.deploy.serve.watches import StartWatch, failure
from aerie.workers.memory_use import DeviceMemoryError
from tests.support import MODELS

ARGS = {
    "model": {"path": str(MODELS / "target")},
    "engine": {"restart_backoff_s": 0.001, "max_restarts": 4},
}
NAN = "model /m: weights are NaN or infinite: model.norm.weight (model.safetensors)"


class Rank:
    """An actor's handle, whose method fails as Ray has it fail."""

    def __init__(self, error: Exception) -> None:
        async def failing() -> None:
            raise ray.exceptions.RayTaskError("build", "Traceback ...", error)

        self.build = SimpleNamespace(remote=failing)


async def failed(error: Exception) -> WorkerGroupError:
    group: Any = object.__new__(WorkerGroup)
    group._workers, group.locations = [Rank(error)], []
    with pytest.raises(WorkerGroupError) as raised:
        await group._all("build")
    return raised.value


def plan_of(args: dict[str, Any], base: Path) -> ReplicaPlan:
    """Return the plan of an engine on one node's CPUs."""
    config = parse(args, base)
    return resolve(config, config.model.max_model_len or 2048, [NodeResources("n", "10.0.0.1", 4.0, 0.0)]).replica


def test_a_refusal_is_told_from_what_may_pass() -> None:
    refused = asyncio.run(failed(ValueError(NAN)))
    assert isinstance(refused, StartRefusedError) and str(refused) == f"rank 0, build: ValueError: {NAN}"
    for error in (RuntimeError("NCCL error"), DeviceMemoryError("no GPU memory for graphs"), OSError("No space left")):
        assert type(asyncio.run(failed(error))) is WorkerGroupError


@pytest.mark.parametrize("error,attempts", [(StartRefusedError(NAN), 1), (WorkerGroupError("NCCL"), 4)])
def test_a_restart_that_is_refused_is_given_up_at_once(error: Exception, attempts: int) -> None:
    plan = SimpleNamespace(replica=plan_of(ARGS, MODELS), folder="/nonexistent")
    supervisor: Any = Supervisor(plan, "e", "p", lambda line: None)  # type: ignore[arg-type]
    tried = []

    async def bring_up() -> None:
        tried.append(error)
        raise error

    supervisor._bring_up = bring_up
    with pytest.raises(GaveUpError) as raised:
        asyncio.run(supervisor._restart())
    assert len(tried) == attempts
    if attempts == 1:
        assert str(raised.value) == f"engine e: gave up, because another start would fail in the same way: {NAN}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Ray's key-value store."""
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(engine, "_internal_kv_put", kept.__setitem__)
    monkeypatch.setattr(engine, "_internal_kv_get", kept.get)
    return kept


def test_a_refusal_is_remembered_for_the_same_start(
    store: dict[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = plan_of({"model": {"path": str(tmp_path)}}, tmp_path)
    assert engine.start_refusal("aerie", config) == ""
    engine.remember("aerie", config, NAN)
    assert engine.start_refusal("aerie", config) == engine.start_refusal("aerie") == NAN
    assert engine.start_refusal("another", config) == ""
    other = plan_of({"model": {"path": str(tmp_path), "max_model_len": 64}}, tmp_path)
    assert engine.start_refusal("aerie", other) == ""
    (tmp_path / "model.safetensors").write_text("mended")
    assert engine.start_refusal("aerie", config) == ""
    monkeypatch.setattr(engine, "FRESH_S", 0.0)
    assert engine.start_refusal("aerie") == ""


def applications(status: str = "DEPLOYING", message: str = "") -> dict[str, Application]:
    return {"aerie": Application(status, message)}


def test_the_command_sees_a_refusal_and_what_serve_gave_up(store: dict[bytes, bytes]) -> None:
    assert failure({}) == failure(applications()) == failure(applications("RUNNING")) == ""
    gave_up = failure(applications("DEPLOY_FAILED", message="Failed to update.\nOSError: No space left"))
    assert gave_up == "Serve gave up application aerie: OSError: No space left"
    engine.remember("aerie", plan_of(ARGS, MODELS), NAN)
    assert failure(applications()) == f"the engine could not start: {NAN}"
    assert failure(applications(), since=time.time() + 1) == "", "another command's start was refused"


def test_the_watch_looks_no_further_once_the_application_runs(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [applications(), applications("RUNNING"), applications("DEPLOY_FAILED")]
    monkeypatch.setattr(watches, "read_applications", lambda: shown.pop(0))
    watch = StartWatch()
    watch.period_s = 0.001
    watch.start()
    watch._thread.join(10)
    assert not watch._thread.is_alive() and watch.reason == "" and len(shown) == 1


def test_an_update_is_watched_while_the_former_application_runs(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "read_applications", lambda: applications("RUNNING"))
    replaced = {"aerie"}
    watch = StartWatch(["aerie"], replaced)
    watch.look()
    assert not watch._stopped.is_set()
    replaced.clear()
    watch.look()
    assert watch._stopped.is_set()
