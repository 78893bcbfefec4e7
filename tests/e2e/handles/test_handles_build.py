"""What `serve build` writes, deployed as `serve run FILE` does it: two models on one cluster."""

import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.e2e.serving import START_LIMIT_S, Server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def test_serve_runs_what_serve_build_writes(ray_port: int, tmp_path: Path) -> None:
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema
    from ray.serve.scripts import build

    path = tmp_path / "two.yaml"
    found = CliRunner().invoke(build, ["aerie.deploy.app:eagle", "aerie.deploy.app:eagle3", "-o", str(path)])
    assert found.exit_code == 0, found.output
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())), _blocking=False)
    try:
        deadline = time.monotonic() + 2 * START_LIMIT_S
        while {each.status for each in serve.status().applications.values()} != {"RUNNING"}:
            assert time.monotonic() < deadline, serve.status()
            time.sleep(0.5)
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "temperature": 0}
        for name in ("app1", "app2"):
            Server(ray_port, "target", f"/{name}").wait_healthy()
            reply = serve.get_app_handle(name).chat.remote(body).result(timeout_s=60)
            assert "help" in reply["choices"][0]["message"]["content"]
    finally:
        for name in ("app1", "app2"):
            serve.delete(name)
