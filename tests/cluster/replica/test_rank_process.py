"""A rank that is begun before Ray: who gets it, and that both ends go together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from aerie.cluster.config import parse, read_args
from aerie.cluster.placement import NodeResources
from aerie.cluster.plan import Plan, RankPlan, resolve
from aerie.cluster.replica import rank_process
from aerie.cluster.replica.rank_process import RankLostError, attach
from aerie.deploy import checks
from aerie.deploy.config.files import PACKAGED, find_config
from aerie.deploy.nodes import LocalGpus
from aerie.deploy.serve.check_process import CheckProcess, Task
from tests.support import ROOT

LIMIT_S = 120.0  # for what takes seconds


@dataclass
class Begun:
    """process: the one that has forked the ranks. plan: as the actors have it."""

    process: CheckProcess
    folder: Path
    plan: RankPlan


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    """The embedded pair's two ranks, begun as `aerie serve` begins them."""
    path, process = find_config("eagle"), CheckProcess()
    config = parse(read_args(path), PACKAGED)
    process.begin(Task(str(path), config.model_dump_json(), True, str(tmp_path)), print)
    max_model_len = process.checked()
    assert max_model_len == 2048
    plan = resolve(config, max_model_len, [NodeResources("n", "10.0.0.1", 4.0, 0.0)])
    yield Begun(process, tmp_path, Plan.from_args(plan.to_args()).replica.rank)
    process.close()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def runs(process: psutil.Process) -> bool:
    """Not ended, also not while this looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_who_gets_a_rank_and_when_it_ends(begun: Begun) -> None:
    assert attach(None, begun.plan, 0) is None, "no server has begun any"
    ranks = psutil.Process(begun.process.pid).children()
    assert len(ranks) == 2
    until(lambda: sorted(process.name() for process in ranks) == ["aerie-rank-0", "aerie-rank-1"])
    until(lambda: all(process.nice() == max(10, os.nice(0)) for process in ranks))
    other = replace(begun.plan, speculative=None)
    assert attach(begun.folder, other, 0) is None, "it is made for another engine"
    until(lambda: sum(runs(process) for process in ranks) == 1)
    assert attach(begun.folder, begun.plan, 0) is None, "it is gone"

    rank = attach(begun.folder, begun.plan, 1)
    assert rank is not None and attach(begun.folder, begun.plan, 1) is None, "only one actor has it"
    facts = rank.facts()
    assert facts.pid in [process.pid for process in ranks] and facts.device == "cpu, 1 thread(s)"
    status = Path(f"/proc/{facts.pid}/status").read_text()
    assert int(status.partition("FDSize:")[2].split()[0]) >= 4096, "the table of open files would grow beside threads"
    os.kill(begun.process.pid, signal.SIGKILL)  # the server's end is that of its ranks
    with pytest.raises(RankLostError):
        rank.build()


def test_a_rank_that_outlives_its_actor_prints_no_error() -> None:
    """Both hear of a server's end at once: the outcome of its loop may come when nobody waits for it any more."""
    rank, actor = Pipe()
    rank_process._answer(rank, "stopped")
    assert actor.recv() == "stopped"
    actor.close()
    rank_process._answer(rank, "stopped")


def test_checks_leave_one_thread_so_that_ranks_can_be_forked() -> None:
    """GGUF files are checked with operations of torch that would start its threads."""
    script = (
        "import os, torch; from aerie.cluster.config import parse, read_args; from aerie.deploy import checks\n"
        "from aerie.deploy.config.files import PACKAGED, find_config; from aerie.deploy.nodes import LocalGpus\n"
        "config = parse(read_args(find_config('eagle')), PACKAGED)\n"
        "def check(found): torch.ones(2**22).mul_(2); print(len(os.listdir('/proc/self/task')), 'thread')\n"
        "checks.check_and_start_ranks('eagle', config, lambda: LocalGpus(0), '', check)"
    )
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables
    )
    assert "1 thread\n" in done.stdout, done


def test_the_server_goes_on_while_the_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(checks, "_print_plan", lambda *plan: seen.append("plan"))
    config = parse(read_args(find_config("eagle")), PACKAGED)
    checks.check_and_start_ranks("eagle", config, lambda: LocalGpus(0), "", seen.append)
    assert seen == [2048, "plan"]
