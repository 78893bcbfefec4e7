"""`aerie serve --address` on a cluster with another team's applications, which answer throughout."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file

from aerie.cluster.config import ConfigError
from aerie.deploy.serve import guest
from aerie.deploy.serve.applications import Application
from aerie.deploy.serve.guest import Guest
from aerie.workers.distributed.ports import free_port
from tests.support import ROOT
from tests.support.embedded import read_config_file

BIN = Path(sys.executable).parent
LIMIT_S = 180.0
_OTHERS = """
import sys
import ray
from ray import serve
from starlette.requests import Request

ray.init(sys.argv[1], namespace="serve")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])}, proxy_location="HeadOnly")

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    def __init__(self, broken: bool) -> None:
        if broken:
            raise ValueError("another team's fault")

    async def __call__(self, request: Request) -> str:
        return "another team's"

serve.run(Other.bind(False), name="other", route_prefix="/other")
try:
    serve.run(Other.bind(True), name="broken", route_prefix="/broken")
except RuntimeError:
    print("deployed", flush=True)
"""


def _guest(replaces: bool = False, **application: Any) -> Guest:
    return Guest(
        {"applications": [{"name": "aerie", "import_path": "aerie.deploy.app:build_planned", **application}]}, replaces
    )


def test_an_application_of_the_same_name_is_replaced_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "read_applications", lambda: {"aerie": Application("RUNNING")})
    with pytest.raises(
        ConfigError, match=r"application aerie is on this cluster already \(RUNNING\).*--name.*--replace"
    ):
        _guest().check()
    monkeypatch.setattr(guest, "recorded", lambda name: {"args": {}})
    update, second = _guest(replaces=True), _guest(name="second")
    update.check()
    second.check()
    assert update.replaced == {"aerie": {"args": {}}} and not second.replaced and second.own == ["second"]
    assert update.own == []
    nameless = Guest({"applications": [{"import_path": "others:app"}]}, replaces=False)
    nameless.check()
    assert nameless.names == ["default"]
    with pytest.raises(ConfigError, match="applications: runtime_env of second does not work with --address"):
        _guest(name="second", runtime_env={"env_vars": {"A": "1"}}).check()


@contextlib.contextmanager
def _cluster(folder: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Another team's Ray; its address, and the environment of its processes."""
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": folder,
        "RAY_raylet_start_wait_time_s": "120",
    }
    port = free_port()
    command = [BIN / "ray", "start", "--head", f"--port={port}", "--num-cpus=4", "--include-dashboard=false", "--block"]
    command += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    log = Path(folder, "ray.log")
    with log.open("w") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait(lambda: "Ray runtime started" in log.read_text(), head, log)
        yield f"127.0.0.1:{port}", environment
    finally:
        children = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        _, alive = psutil.wait_procs([psutil.Process(head.pid), *children], timeout=20)
        for process in alive:
            process.kill()
        head.wait()


def _wait(condition: Any, process: "subprocess.Popen[Any]", log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


class Asking(threading.Thread):
    """Asks another team's application again and again until the `with` ends. wrong: what it answered instead."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._over = threading.Event()
        self.num_right = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self._over.wait(0.05):
            try:
                text = httpx.get(self._url, timeout=30).text
            except httpx.HTTPError as error:
                text = repr(error)
            if text == "another team's":
                self.num_right += 1
            else:
                self.wrong.append(text)

    def __enter__(self) -> "Asking":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_others_applications_answer_through_start_refusal_crash_update_and_ctrl_c(tmp_path: Path) -> None:
    """One of them is broken for good: that ends nothing of ours. Ours outlives its command, and is replaced."""
    folder, port = tempfile.mkdtemp(prefix="gu", dir="/tmp"), free_port()
    models = f"http://127.0.0.1:{port}/v1/models"
    content = read_config_file(ROOT / "deploy" / "eagle.yaml")
    content["http_options"]["port"] = port
    args = content["applications"][0]["args"]
    args["parallel"]["tensor_parallel"] = 1
    for section, name in (("model", "target"), ("speculative", "dspark")):
        args[section]["path"] = str(ROOT / "deploy" / "models" / name)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))

    try:
        with _cluster(folder) as (address, environment):
            (tmp_path / "others.py").write_text(_OTHERS)
            deployed = subprocess.run(
                [sys.executable, tmp_path / "others.py", address, str(port)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert "deployed" in deployed.stdout, deployed.stderr[-3000:]
            command = [BIN / "aerie", "serve", tmp_path / "own.yaml", "--address", address, "--no-haproxy"]

            def started(number: int, *more: str) -> "subprocess.Popen[Any]":
                log = tmp_path / f"own-{number}.log"
                with log.open("w") as output:
                    own = subprocess.Popen([*command, *more], env=environment, stdout=output, stderr=output)
                _wait(lambda: "is ready after" in log.read_text(), own, log)
                assert httpx.get(models, timeout=30).json()["data"]
                return own

            with Asking(f"http://127.0.0.1:{port}/other") as others:
                own = started(1)
                for process in [*psutil.Process(own.pid).children(recursive=True), psutil.Process(own.pid)]:
                    process.kill()
                own.wait(60)
                again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
                assert again.returncode == 2 and "is on this cluster already" in again.stderr, again.stderr
                assert httpx.get(models, timeout=30).json()["data"]
                own = started(2, "--replace")
                own.send_signal(signal.SIGINT)
                own.wait(60)
                assert httpx.get(models, timeout=30).status_code == 404
            assert not others.wrong and others.num_right > 50, (others.num_right, others.wrong[:3])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_an_update_whose_engine_cannot_start_brings_the_former_application_back(tmp_path: Path) -> None:
    """The next checkpoint has NaN, which the load notices after Serve has stopped the former engine."""
    folder, port = tempfile.mkdtemp(prefix="gu", dir="/tmp"), free_port()
    content = read_config_file(ROOT / "deploy" / "eagle.yaml")
    content["http_options"]["port"] = port
    (args := content["applications"][0]["args"]).pop("speculative")
    args["parallel"]["tensor_parallel"] = 1
    files = {"good": ROOT / "deploy" / "models" / "target", "bad": tmp_path / "bad"}
    shutil.copytree(files["good"], files["bad"])
    weights = load_file(files["bad"] / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, files["bad"] / "model.safetensors")
    for name, path in files.items():
        args["model"]["path"] = str(path)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    question = {"model": "target", "prompt": "hi", "max_tokens": 4, "temperature": 0}

    def answer() -> str:
        try:
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=question, timeout=30)
        except httpx.HTTPError as error:
            return repr(error)
        return str(reply.json()["choices"][0]["text"]) if reply.status_code == 200 else reply.text

    try:
        with _cluster(folder) as (address, environment):
            first = tmp_path / "first.log"
            options = ["--address", address, "--no-haproxy"]
            with first.open("w") as output:
                command = [BIN / "aerie", "serve", tmp_path / "good.yaml", *options]
                own = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            _wait(lambda: "is ready after" in first.read_text(), own, first)
            before = answer()
            for process in [*psutil.Process(own.pid).children(recursive=True), psutil.Process(own.pid)]:
                process.kill()
            own.wait(60)
            update = subprocess.run(
                [BIN / "aerie", "serve", tmp_path / "bad.yaml", *options, "--replace"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert update.returncode == 2 and "weights are NaN" in update.stderr, (update.stdout, update.stderr)
            assert "application aerie: its former configuration starts again" in update.stdout
            deadline = time.monotonic() + LIMIT_S
            while (text := answer()) != before:
                assert time.monotonic() < deadline, text
                time.sleep(0.5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
