"""The parts that pull requests and commits are tested in: together they are all, and what they call is there."""

import re
import shlex
from pathlib import Path

import yaml

from tests.support import ROOT

CI = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
RAY = "mark.ray"


def test_every_test_is_in_one_part() -> None:
    """Rooms by their folder; tests that start clusters by what the file names."""
    rooms = [word for part in CI["rooms"]["strategy"]["matrix"]["room"] for word in part.split()]
    found = [path for room in rooms for path in ROOT.glob(room)]
    files = [file for path in found for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    assert len(files) == len(set(files))
    missing = set((ROOT / "tests").rglob("test_*.py")) - set(files)
    assert not [str(path) for path in missing if RAY not in path.read_text()]


def test_every_part_runs_a_target_that_exists() -> None:
    runs = [step["run"] for job in CI.values() for step in job["steps"] if "run" in step]
    assert {shlex.split(run)[-1] for run in runs} == {"check", "test-rooms", "test-clusters", "docs"} <= TARGETS


def test_every_hook_before_a_commit_is_there() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]:
        program, *arguments = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/") and hook["language"] == "system"
        files = [word for word in arguments if word.startswith("tests/")]
        files += [word.replace(".", "/") + ".py" for word in arguments if word.startswith("tests.")]
        assert all((ROOT / Path(file)).is_file() for file in files), hook["entry"]


def test_constraints_leave_triton_to_torch() -> None:
    """Each torch for CUDA requires one version of it, another than torch for CPUs is tested with: with a pin, pip finds
    no solution on machines with a GPU."""
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "torch" in pinned and "triton" not in pinned
    assert "triton==" in (ROOT / "Makefile").read_text()
