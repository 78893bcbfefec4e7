"""`aerie serve` as an operator runs it who has installed the wheel: a configuration made from the packaged one, served
from a folder that is no checkout, HAProxy where its wheel is installed, Ctrl-C at the end."""

import contextlib
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from aerie.cluster.replica.rank_process import NAME
from tests.deploy.processes.other_user import assert_closed_to_others
from tests.e2e.serving import free_port
from tests.support import ROOT
from tests.support.repository.printed import printed_commands, run_printed
from tests.support.repository.wheel import environment

pytestmark = pytest.mark.ray
# As the installed script does it.
AERIE = [sys.executable, "-P", "-c", "import sys; from aerie.command import main; sys.exit(main())"]
USERS_TOKEN = "the user's own, for another Ray"
READY_LIMIT_S = 120.0  # twice what a laptop may take
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
FEW_OPEN_FILES = ("sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh")  # the soft limit that shells and systemd have
# What a client's connection or a stream's socket costs a file in: the ingress, HAProxy, the engine's coordinator.
SERVING = "^ray::ServeReplica:aerie:Ingress|^ray::EagleCoordinator|haproxy.cfg"
# Notes each time that a process reads the user's file, or calls one of these functions.
COUNTING = """
import importlib.machinery, os, sys

def note(what):
    with open(os.environ["AERIE_TEST_COUNTS"], "a") as file:
        file.write(what + "\\n")

def read(event, arguments):
    if event == "open" and str(arguments[0]).endswith("my.yaml") and "/work/" in os.path.abspath(arguments[0]):
        note("read")

class Finder:
    def find_spec(self, name, path, target=None):
        counted = {"aerie.cluster.config": "parse", "aerie.cluster.plan": "resolve"}.get(name)
        if counted is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            function = getattr(module, counted)
            setattr(module, counted, lambda *args, **kwargs: note(counted) or function(*args, **kwargs))
        spec.loader.exec_module = exec_module
        return spec

sys.addaudithook(read)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def running(tmp_path: Path, installed: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    port = free_port()
    work = tmp_path / "work"
    work.mkdir()
    for name in ("deploy/__init__.py", "cluster.py", "json.py"):  # a user's own, which no process may import
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(f"raise ImportError('a user\\'s {name}')")
    folder = tempfile.mkdtemp(prefix="ae", dir="/tmp")
    os.chmod(folder, 0o755)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(COUNTING)
    scripts, home = tmp_path / "bin", tmp_path / "home"
    for place in (scripts, home / ".ray"):
        place.mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(USERS_TOKEN)
    (scripts / "aerie").write_text(f'#!/bin/sh\nexec {shlex.join(AERIE)} "$@"\n')
    (scripts / "aerie").chmod(0o755)
    variables = environment(installed, str(tmp_path / "hook")) | {
        "AERIE_TEST_COUNTS": str(tmp_path / "counts"),
        "RAY_TMPDIR": folder,
        "XDG_STATE_HOME": str(tmp_path),
        "HOME": str(home),
        "PATH": os.pathsep.join((str(scripts), str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    variables.pop("RAY_AUTH_MODE", None)
    (tmp_path / "variables").write_text(json.dumps(variables))
    printed = subprocess.run([*AERIE, "config"], cwd=work, env=variables, stdout=subprocess.PIPE, check=True).stdout
    content = yaml.safe_load(printed)
    content["applications"][0]["args"]["engine"]["drain_timeout_s"] = 90  # for a stream of 400 tokens
    (work / "my.yaml").write_text(yaml.safe_dump(content))
    log = tmp_path / "log"
    with log.open("wb") as console:
        command = [*FEW_OPEN_FILES, *AERIE, "serve", "my.yaml", "--port", str(port)]
        process = subprocess.Popen(command, cwd=work, env=variables, stdout=console, stderr=subprocess.STDOUT)
    yield process, f"http://127.0.0.1:{port}", log
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                child.kill()
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def test_embedded_pair_answers_and_ctrl_c_drains_and_leaves_nothing(
    running: tuple[subprocess.Popen[bytes], str, Path], installed: Path
) -> None:
    process, url, log = running
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    counts = Counter((log.parent / "counts").read_text().split())
    assert counts == {"read": 1, "parse": 1, "resolve": 1}, "of the configuration, in all processes of the start"
    body = {"model": "target", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"]
    # The draft was trained for this target: two tokens a round on ordinary text, 1 if it were not used.
    assert answer["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1.2
    example = [sys.executable, str(ROOT / "examples" / "openai_client.py"), url]
    assert "pens" in subprocess.run(example, capture_output=True, text=True, check=True, timeout=60).stdout
    missing = httpx.get(f"{url}/no/such/route", timeout=10)
    assert missing.status_code == 404 and "error" in missing.json()
    variables = json.loads((log.parent / "variables").read_text())
    assert_closed_to_others(Path(variables["RAY_TMPDIR"]))
    for command in printed_commands():
        if not command.startswith("serve run"):  # replaces the engine: `test_printed_commands`
            said = run_printed(command, variables, log.parent)
            assert command != "aerie status" or re.search(
                r"aerie at /: RUNNING\n(.*\n)*  engine [\w.]+: ready", said
            ), said

    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if child.name().startswith(NAME)]
    assert len(ranks) == 2 and all(rank.nice() >= 10 for rank in ranks)
    serving = [child for child in children if re.search(SERVING, " ".join(child.cmdline()))]
    assert len(serving) >= 3 and {_open_files(child) for child in (*ranks, *serving)} == {OPEN_FILES}
    others = [child for child in children if child not in ranks and child.cmdline()[:1] != []]
    answering = [child for child in others if "structured_output" not in " ".join(child.cmdline())]  # trials compute
    behind = [child for child in answering if child.nice() > os.nice(0)]
    assert not behind, "what answers clients comes before what computes"
    used_gb = sum(child.memory_full_info().pss for child in children if child.is_running()) / 1e9
    assert used_gb < 6
    long = {"model": "target", "prompt": "Count", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        refused = _when_draining(url)
        rest = [line for line in lines if line]
    assert refused.headers["retry-after"] == "1", refused.text
    assert refused.json()["error"]["message"] == "the engine is draining"
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert process.wait(timeout=90) == 0
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    token = log.parent / "home" / ".ray" / "auth_token"
    assert token.read_text() == USERS_TOKEN and os.listdir(token.parent) == [token.name]
    said = log.read_text().splitlines(keepends=True)
    console = "".join(line for line in said if not line.startswith("INFO ingress: request "))  # one for each request
    assert f"target      {installed}/aerie/deploy/models/target" in console
    for phase in ("placed, imported", "target loaded", "rank  node"):
        assert phase in console
    *start, ready, draining, stopping = console.splitlines()
    assert (
        ready.startswith(f"{url} is ready after ")
        and draining.startswith("draining: ")
        and stopping.startswith("stopping")
    ), console
    ends_s = [float(line[:6]) for line in start if re.match(r" *\d+\.\d s  ", line)]
    assert len(ends_s) > 10 and max(b - a for a, b in itertools.pairwise(ends_s)) > -2.0, "one clock for all processes"
    assert "\x1b" not in console and not re.search(r"INFO|pid=|serve \d+ --", console), "Ray's and Serve's own"
    assert "Started a local Ray instance" in Path(start[0].split()[5]).read_text()
    alarming = [line for line in console.splitlines() if re.search(r"WARN|ERROR|Traceback|\(raylet\)", line)]
    assert not alarming, "lines that are not ours to explain"


def _open_files(process: psutil.Process) -> int:
    """The soft limit."""
    return resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]


def _when_draining(url: str) -> httpx.Response:
    """The first answer other than 200 to a new request: the server's refusal, once the signal has reached it."""
    deadline = time.monotonic() + 10
    while True:
        short = {"model": "target", "prompt": "Count", "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=short, timeout=30)
        if answer.status_code != 200:
            assert answer.status_code == 503, answer.text
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.05)
