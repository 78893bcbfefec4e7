"""What `aerie serve` prints of a start: its own steps by one clock; what others write goes to the log."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from aerie.cluster.start_log import MARK, READY, Progress, StartLog, Step, read_line
from aerie.deploy.serve.console import Console, log_path, show_ray_lines

# Prints as `aerie serve` does: steps of three processes, Ray's lines, and what a child and C code write to fd 1 and 2.
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from aerie.cluster.start_log import StartLog
from aerie.deploy.serve.console import Console

began_s = time.time() - 2.0
with Console(began_s, Path(sys.argv[1])) as console:
    print("Ray's INFO line")
    subprocess.run(["sh", "-c", "echo a child; echo a warning >&2"], check=True)
    rank = StartLog("rank 0", began_s + 1.0, lambda line: console.receive("aerie| " + line, "(WorkerActor pid=7) "))
    rank.done("target loaded")
    rank.progress("target loaded", 12.5, 140.0, "GB")
    StartLog("rank 1", began_s, lambda line: console.receive("aerie| " + line)).done("target loaded")
    console.receive("aerie| rank  node  pid", "(Engine pid=8) ")
    console.receive("INFO 2026-11-24 serve 8882 -- started", "(ServeController pid=9) ")
    time.sleep(float(sys.argv[2]))
print("after")
"""


def _run(log: Path, terminal: bool = False) -> str:
    program = [sys.executable, "-c", PROGRAM, str(log), "0.5" if terminal else "0"]
    if not terminal:
        return subprocess.run(program, capture_output=True, text=True, check=True).stdout
    main, end = os.openpty()
    variables = os.environ | {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    with subprocess.Popen(program, stdout=end, stderr=end, env=variables) as process:
        os.close(end)
        found = b""
        while True:
            try:
                part = os.read(main, 4096)
            except OSError:  # the terminal's other end is closed
                break
            if not part:
                break
            found += part
        assert process.wait(20) == 0
    os.close(main)
    return found.decode().replace("\r\n", "\n")


def test_a_file_gets_plain_lines_by_one_clock_and_the_log_all_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps = _run(log).splitlines()
    assert len(steps) == 4 and steps[2:] == ["rank  node  pid", "after"]
    loaded = re.fullmatch(r" +([0-9.]+) s  rank 0        target loaded +([0-9.]+) s", steps[0])
    assert loaded is not None and float(loaded[1]) >= 2.0
    assert float(loaded[2]) == pytest.approx(float(loaded[1]) - 1.0, abs=0.11), (
        "one clock, which this rank joined later"
    )
    assert re.fullmatch(r" +[0-9.]+ s  rank 0        target loaded {21}12\.5 of 140 GB", steps[1])
    logged = log.read_text()
    for line in (
        "Ray's INFO line\n",
        "a child\n",
        "a warning\n",
        "(ServeController pid=9) INFO 2026",
        "rank 1 ",
        "rank  node",
    ):
        assert line in logged


def test_a_terminal_has_a_live_line_that_is_gone_afterwards(tmp_path: Path) -> None:
    shown = _run(tmp_path / "log", terminal=True)
    assert "target loaded" in shown and "12.5 of 140 GB" in shown and "INFO" not in shown
    assert shown.rstrip().endswith("after") and "\x1b[?25h" in shown, "the cursor is back"


def test_verbose_shows_what_others_write(capfd: pytest.CaptureFixture[str]) -> None:
    with Console(time.time(), None) as console:
        console.receive("INFO serve -- started", "(ServeController pid=9) ")
        console.receive(MARK + "ours")
    assert capfd.readouterr().out == "(ServeController pid=9) INFO serve -- started\nours\n"


def test_rays_lines_come_to_the_console_without_its_colours(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    former = list(dispatcher.handlers)
    try:
        with Console(time.time(), tmp_path / "log") as console:
            show_ray_lines(console)
            dispatcher.emit({"lines": [MARK + "engine: restarting"], "pid": 5, "actor_name": "WorkerActor", "ip": "x"})
            dispatcher.emit({"lines": ["raw"], "pid": 5, "actor_name": "WorkerActor", "ip": "x"})
            dispatcher.emit({"lines": ["Autoscaler status"], "pid": "autoscaler", "ip": "x"})
            console.end_server()
            dispatcher.emit({"lines": [MARK + "rank 0 is lost"], "pid": 5, "actor_name": "WorkerActor", "ip": "x"})
    finally:
        dispatcher.handlers = former
    assert capfd.readouterr().out == "engine: restarting\n"
    logged = (tmp_path / "log").read_text()
    assert "(WorkerActor pid=5) raw\n" in logged and "rank 0 is lost" in logged and "Autoscaler" not in logged


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
def test_a_full_disk_and_a_closed_pipe_stop_no_reader_of_other_processes() -> None:
    program = PROGRAM.replace("time.sleep", "[console.receive(f'aerie| {n}') for n in range(2000)] and time.sleep")
    program = "\n".join(line for line in program.splitlines() if "print(" not in line and "subprocess.run" not in line)
    command = [sys.executable, "-c", program, "/dev/full", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(30) == 0, said
    assert "Traceback" not in said


def test_an_engine_that_is_ready_is_noticed(tmp_path: Path) -> None:
    with Console(time.time(), tmp_path / "log") as console:
        StartLog("rank 0", report=lambda line: console.receive(MARK + line)).done(READY)
        assert not console.ready.is_set()
        StartLog("engine", report=lambda line: console.receive(MARK + line)).done(READY)
        assert console.ready.is_set()


def test_the_log_before_is_kept_and_others_cannot_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = log_path("serve-8000")
    first.write_text("first")
    second = log_path("serve-8000")
    assert second == first and second.read_text() == "" and second.stat().st_mode & 0o077 == 0
    assert second.with_suffix(".log.1").read_text() == "first"
    assert log_path("serve-8001") != second


def test_lines_of_a_start_are_read_back() -> None:
    lines: list[str] = []
    log = StartLog("rank 0", time.time() - 3.0, lines.append)
    log.took("3 graphs, 4 follow", 1.25)
    log.progress("loading", 1.0, 4.0, "GB")
    log.progress("loading", 2.0, 4.0, "GB")  # a moment later: left out
    step, progress = map(read_line, lines)
    assert isinstance(step, Step) and (step.process, step.what, step.took_s) == ("rank 0", "3 graphs, 4 follow", 1.2)
    assert abs(step.at_s - time.time()) < 5
    assert isinstance(progress, Progress) and (progress.done, progress.total, progress.unit) == (1.0, 4.0, "GB")
    assert read_line("rank  node       pid   device") is None
