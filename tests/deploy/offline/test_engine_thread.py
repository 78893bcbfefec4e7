"""The thread of an engine: how it ends, and what its callers get then."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from aerie import EngineDeadError, SamplingParams
from aerie.deploy.offline.llm import LLM
from tests.support import ROOT
from tests.support.slow import slow

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aerie-engine"]


def test_close_ends_the_thread_and_running_calls_and_may_be_called_again() -> None:
    before = _threads()
    llm = LLM("eagle", tensor_parallel_size=1)
    (thread,) = set(_threads()) - set(before)
    faults: list[Exception] = []

    def generate() -> None:
        try:
            llm.generate("Count", LONG)
        except EngineDeadError as error:
            faults.append(error)

    caller = threading.Thread(target=generate)
    caller.start()
    while not llm._engine.thread.call(lambda engine: engine.scheduler.num_running).result():
        pass
    llm.close()
    caller.join(10)
    assert not thread.is_alive() and [str(each) for each in faults] == ["error: the engine was closed"]
    llm.close()
    with pytest.raises(EngineDeadError, match="^the engine was closed$"):
        llm.generate("x")


def test_an_engine_that_nobody_has_ends_with_its_memory() -> None:
    before = _threads()
    llm: Any = LLM("eagle", tensor_parallel_size=1)
    (thread,) = set(_threads()) - set(before)
    scheduler = weakref.ref(llm._engine.thread.call(lambda engine: engine.scheduler).result())
    llm.generate("x", SamplingParams(max_tokens=2))
    del llm
    gc.collect()
    thread.join(10)
    gc.collect()
    assert not thread.is_alive() and scheduler() is None


def test_a_fault_in_a_step_ends_all_calls_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("eagle", tensor_parallel_size=1) as llm:

        def broken(plan: object) -> None:
            raise RuntimeError("the device is gone")

        executor = llm._engine.thread.call(lambda engine: engine.executor).result()
        monkeypatch.setattr(executor, "submit", broken)
        with pytest.raises(EngineDeadError, match="the engine failed: RuntimeError: the device is gone"):
            llm.generate(["One", "Two"], LONG)
        with pytest.raises(EngineDeadError, match="^the engine failed: RuntimeError: the device is gone$"):
            llm.generate("One")


def test_a_fork_says_so_and_leaves_the_engine_alone() -> None:
    with LLM("eagle", tensor_parallel_size=1) as llm:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                llm.generate("x", SamplingParams(max_tokens=1))
            except EngineDeadError as error:
                os.write(write, str(error).encode())
                llm.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert b"this process is a fork of the one that built the engine" in os.read(read, 1000)
        assert llm.generate("x", SamplingParams(max_tokens=2))


BEGIN = """
import os, signal, sys, threading, torch
torch.set_num_threads(1)
from aerie import LLM, SamplingParams
llm = LLM("eagle", tensor_parallel_size=1)
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
"""
ENDS = {
    "nothing is closed": ('llm.generate("x", use_tqdm=False); print("end")', 0, "end\n"),
    "an exception": ('llm.generate("x", use_tqdm=False); 1 / 0', 1, ""),
    "a thread still generates": (
        'threading.Thread(target=lambda: llm.generate("x", LONG, use_tqdm=False), daemon=True).start(); print("end")',
        0,
        "end\n",
    ),
    "Ctrl-C": (
        'threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start(); llm.generate("x", LONG, use_tqdm=False)',
        -2,
        "",
    ),
}


@pytest.mark.parametrize("how", ["a thread still generates", *slow("nothing is closed", "an exception", "Ctrl-C")])
def test_the_interpreter_ends(how: str, tmp_path: Path) -> None:
    program, code, printed = ENDS[how]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
    assert "Fatal" not in done.stderr
