"""Every command that the pages print for a running server, as printed, on a cluster of `aerie start`; the user's own
token stays as it was. `aerie serve` without an address: `test_aerie_serve`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.serve_process import until
from tests.e2e.serving import free_port
from tests.support import ROOT
from tests.support.embedded import read_config_file
from tests.support.repository.printed import printed_commands, run_printed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent


def _is_well(variables: Mapping[str, str]) -> bool:
    """Whether the exit status is 0: after an update it is 1 until the new engine is ready."""
    done = subprocess.run([BIN / "aerie", "status", "--json"], env=variables, capture_output=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["is_well"] is (done.returncode == 0)
    return done.returncode == 0


def _health(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("has_token", [False, True])
def test_printed_commands_run_on_a_cluster(tmp_path: Path, has_token: bool) -> None:
    home, folder = tmp_path / "home", tempfile.mkdtemp(prefix="pc", dir="/tmp")
    (home / ".ray").mkdir(parents=True)
    token = home / ".ray" / "auth_token"
    if has_token:
        token.write_text("5" * 64)
        token.chmod(0o600)
    before = token.stat() if has_token else None
    variables = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")} | {
        "HOME": str(home),
        "TMPDIR": folder,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    port, head = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    content = read_config_file(ROOT / "deploy" / "eagle.yaml")
    content["http_options"]["port"] = port
    content["applications"][0]["args"]["parallel"]["tensor_parallel"] = 1
    for section, name in (("model", "target"), ("speculative", "dspark")):
        content["applications"][0]["args"][section]["path"] = str(ROOT / "deploy" / "models" / name)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content))
    log = tmp_path / "log"
    server = None
    try:
        start = [BIN / "aerie", "start", "--head", f"--port={head}", "--node-ip=127.0.0.1", "--num-cpus=8"]
        subprocess.run(start, env=variables, check=True, timeout=180)
        with log.open("w") as output:
            command = [BIN / "aerie", "serve", "cluster.yaml", "--address", f"127.0.0.1:{head}", "--no-haproxy"]
            server = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
        until(lambda: _health(url), 180, log.read_text)
        for printed in printed_commands():
            print(f"$ {printed}\n{run_printed(printed, variables, tmp_path)}")
            until(lambda: _is_well(variables), 180, log.read_text)
        assert token.exists() == has_token
        if before is not None:
            after = token.stat()
            assert (after.st_mode, after.st_mtime_ns, after.st_ino) == (
                before.st_mode,
                before.st_mtime_ns,
                before.st_ino,
            )
    finally:
        if server is not None:
            server.terminate()
            server.wait(120)
        subprocess.run([BIN / "aerie", "stop", "--now"], env=variables, check=True, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)
