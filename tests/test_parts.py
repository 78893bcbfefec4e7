"""The parts that pull requests and commits are tested in: together they are all, and what they call is there."""

import re
import shlex
import tomllib
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


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def _runs(workflow: str) -> list[str]:
    return [step["run"] for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"] if "run" in step]


def test_workflows_call_what_exists() -> None:
    for run in (run for workflow in WORKFLOWS for run in _runs(workflow)):
        words = shlex.split(run)
        if words[0] == "make":
            assert words[-1] in TARGETS | {".venv/.installed-test"}, run
        if words[0].startswith(".ci/"):
            assert (ROOT / words[0]).stat().st_mode & 0o111, run


def test_every_declared_python_is_tested_and_served_before_a_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [name[len(PYTHON) :] for name in project["classifiers"] if re.fullmatch(rf"{PYTHON}3\.\d+", name)]
    assert declared[0] == project["requires-python"].removeprefix(">=")
    for jobs, name in ((CI, "rooms"), (CI, "clusters"), (RELEASE, "serve"), (RELEASE, "resolve")):
        assert jobs[name]["strategy"]["matrix"]["python"] == declared, name


def test_a_release_is_served_from_before_it_is_published() -> None:
    assert set(RELEASE["release"]["needs"]) == {"serve", "resolve"} and RELEASE["publish"]["needs"] == "release"
    assert RELEASE["publish"]["environment"] == "pypi"  # which the owner approves
    assert RELEASE["publish"]["permissions"] == {"id-token": "write"}


def test_the_newest_of_every_bounded_package_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounded = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"] if "<" in each}  # type: ignore[index]
    tried = WORKFLOWS["newest"]["jobs"]["newest"]["strategy"]["matrix"]["packages"]
    assert bounded <= {name.partition("[")[0] for each in tried for name in each.split()}


def test_pages_and_manifests_name_the_present_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    named = re.compile(r"(?:aerie_serve-|\baerie:|newTag: )(\d+\.\d+\.\d+)")
    pages = [path for folder in ("docs", "deploy", "examples") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {
        path: path.read_text() for path in pages if path.suffix in (".md", ".yaml", "") and "models" not in path.parts
    }
    found = {(path.name, each) for path, text in texts.items() for each in named.findall(text)}
    assert len(found) > 6 and {each for _, each in found} == {version}
    changes = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert version in [part.split()[0] for part in changes[1:3]]  # the first part, or behind what is unreleased


RELEASE = WORKFLOWS["release"]["jobs"]
PYTHON = "Programming Language :: Python :: "
