"""The wheel: it holds all that a server needs, and works from a folder that is no checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import MODELS, ROOT
from tests.support.repository.names import FLOORS
from tests.support.repository.wheel import environment
from tests.support.slow import slow

# Every module that an engine of the packaged pair and its command line import comes from the wheel.
ANSWERS = """
import sys
from pathlib import Path
import torch
from aerie.deploy.cli import main
from aerie import LLM, SamplingParams

torch.set_num_threads(1)
assert main(["plan", "--cpus", "8", "--gpus", "0"]) == 0
with LLM("eagle", tensor_parallel_size=1) as llm:
    question = {"role": "user", "content": "Mia has 3 boxes with 12 pens each. How many pens does she have?"}
    answer = llm.chat([question], SamplingParams(max_tokens=24, temperature=0.0))[0].outputs[0]
assert answer.text and answer.acceptance_length > 1.2, answer
checkout, installed = map(Path, sys.argv[1:3])
found = [Path(module.__file__) for module in sys.modules.values() if getattr(module, "__file__", None)]
assert not [path for path in found if checkout in path.parents and ".venv" not in path.parts], found
own = {path.relative_to(installed).parts[:2] for path in found if installed in path.parents}
assert own >= {("aerie", name) for name in sys.argv[3:]}
"""


def test_wheel_holds_every_module_configuration_and_file_of_the_embedded_pair(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path for folder in FLOORS for path in (ROOT / folder).rglob("*.py")} | {*(ROOT / "deploy").glob("*.yaml")}
    wanted |= {path for path in (ROOT / "cluster" / "http" / "page").rglob("*") if path.is_file()}
    for model in ("target", "draft", "dspark"):
        wanted |= {path for path in (MODELS / model).iterdir() if path.is_file()}
    names = {f"aerie/{path.relative_to(ROOT)}" for path in wanted if "__pycache__" not in path.parts}
    names |= {f"aerie/{name}" for name in ("__init__.py", "command.py", "py.typed")}
    assert len(names) > 130 and "aerie/deploy/models/target/model.safetensors" in names
    assert not names - held


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    """No tests, and no checkpoint that somebody downloaded beside the embedded pair."""
    others = [name for name in zipfile.ZipFile(wheel).namelist() if name.partition("/")[0] != "aerie"]
    assert all(".dist-info/" in name for name in others), others


@pytest.mark.slow  # `tests.e2e.test_aerie_serve` serves from it
def test_installed_wheel_plans_and_answers_from_any_folder(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ANSWERS, str(ROOT), str(installed), *FLOORS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(installed), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{installed}/aerie/deploy/models/target" in done.stdout


@pytest.mark.parametrize(
    ("name", "draft"), slow(("eagle", "dspark"), ("eagle3", "draft"))
)  # and as `tests.e2e.test_aerie_serve` does it
def test_a_configuration_to_start_from_names_the_installed_models(
    name: str, draft: str, installed: Path, tmp_path: Path
) -> None:
    """As `tests.e2e.test_aerie_serve` begins."""
    aerie = [sys.executable, "-m", "aerie.deploy.cli"]
    printed = subprocess.run(
        [*aerie, "config", name],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (tmp_path / "my.yaml").write_text(printed)
    plan = [*aerie, "plan", "my.yaml", "--nodes", "0"]
    done = subprocess.run(plan, cwd=tmp_path, env=environment(installed), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"path: {installed}/aerie/deploy/models/{draft}" in printed
