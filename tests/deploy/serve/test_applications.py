"""What Serve says of its applications is read beside a thread that deploys one."""

import threading
from typing import Any

import pytest
import ray.serve.config
import ray.serve.context
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import ApplicationDetails, DeploymentDetails, DeploymentSchema, ReplicaDetails

from aerie.deploy.serve import applications
from aerie.deploy.serve.applications import Application, read_applications
from aerie.deploy.serve.watches import StartWatch


class Client:
    """As Serve's: one application, whose details have been through the controller's `model_dump`."""

    def get_serve_details(self) -> dict[str, Any]:
        replicas = [
            ReplicaDetails(replica_id=f"r{i}", state=state, pid=1, start_time_s=0.0)
            for i, state in enumerate([ReplicaState.RUNNING, ReplicaState.STARTING, ReplicaState.RUNNING])
        ]
        engine = DeploymentDetails(
            name="Engine",
            status=DeploymentStatus.UPDATING,
            status_trigger=DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
            message="waits",
            deployment_config=DeploymentSchema(name="Engine", request_router_config=RequestRouterConfig()),
            target_num_replicas=3,
            required_resources={},
            replicas=replicas,
        )
        details = ApplicationDetails(
            name="aerie",
            route_prefix="/llm",
            docs_path=None,
            status="DEPLOYING",
            message="line",
            last_deployed_time_s=0.0,
            deployed_app_config=None,
            source="imperative",
            deployments={"Engine": engine},
            deployment_topology=None,
            external_scaler_enabled=False,
        )
        return {"applications": {"aerie": details.model_dump(exclude_unset=True)}}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Serve runs, with one application."""
    found = Client()
    prepared = found.get_serve_details()  # building it is the controller's work, in another process
    monkeypatch.setattr(found, "get_serve_details", lambda: prepared)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    for module in (ray.serve.context, serve.api):
        monkeypatch.setattr(module, "_get_global_client", lambda **options: found)
    return found


def test_states_messages_and_prefixes_are_read(client: Client) -> None:
    engine = applications.DeploymentStatus("Engine", "UPDATING", "waits", {"RUNNING": 2, "STARTING": 1})
    assert read_applications() == {"aerie": Application("DEPLOYING", "line", "/llm", [engine])}


def test_without_ray_nothing_is_read_and_no_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch may look once more after a start has failed and Ray was left."""
    monkeypatch.setattr(serve.context.ray, "init", lambda **options: pytest.fail("Serve starts a Ray of its own"))
    assert not ray.is_initialized() and read_applications() == {}


def test_nothing_runs_where_serve_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.serve.context, "_get_global_client", lambda **options: None)
    assert read_applications() == {}


def test_a_start_is_watched_while_another_thread_builds_a_deployment(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch looks exactly between the constructor's registration of a module and its end (Ray 2.60)."""
    dumps, is_first = ray.serve.config.cloudpickle.dumps, True

    def dumps_slowly(value: object) -> bytes:
        nonlocal is_first
        if is_first:
            is_first = False
            thread = threading.Thread(target=StartWatch(names=["another"]).look)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        done: bytes = dumps(value)
        return done

    monkeypatch.setattr(ray.serve.config.cloudpickle, "dumps", dumps_slowly)
    serve.deployment(Client, name="Other")
    assert not is_first, "Ray no longer pickles the router here: `serve.status` may be called again"
