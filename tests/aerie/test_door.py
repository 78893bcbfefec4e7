"""`import aerie`: its names, and what says that other modules hide Aerie's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import aerie
from aerie.shadows import ROOT
from attention.distribution import NAME, version
from deploy.offline import llm, sampling_params
from tests.support import DOCS

COMMAND = "import sys; from aerie.command import main; sys.exit(main())"


def _run(program: str, folder: Path, python_path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, *arguments]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": python_path, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_names_are_those_of_the_offline_engine() -> None:
    assert aerie.LLM is llm.LLM
    assert aerie.SamplingParams is sampling_params.SamplingParams
    assert aerie.__version__ == version()
    assert set(dir(aerie)) >= {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "__version__"}
    with pytest.raises(AttributeError, match="it has LLM"):
        aerie.Database  # noqa: B018


def test_importing_it_imports_nothing_heavy(tmp_path: Path) -> None:
    program = "import aerie, sys; print({'torch', 'ray', 'deploy'} & set(sys.modules), aerie.__version__)"
    done = _run(program, tmp_path, str(ROOT))
    assert done.stdout == f"set() {version()}\n", done.stderr


def test_texts_name_the_distribution_and_no_other_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nname = "{NAME}"\n' in project
    texts = [path.read_text() for folder in (*ROOT.glob("[a-z]*/"),) for path in folder.rglob("*.py")]
    texts += [path.read_text() for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md"))]
    stranger = re.compile(
        r"(?<!un)install '?" + r"aerie(?![-_]serve)\b|aerie" + r"\[|install '?aerie-" + "serve" + r"(?!\S* @)"
    )
    assert not [found.group() for text in texts if (found := stranger.search(text))]  # no package index has it


@pytest.mark.parametrize("entry", ["", "."])
def test_command_starts_in_a_folder_of_modules_with_its_names(tmp_path: Path, entry: str) -> None:
    for name in ("deploy/__init__.py", "cluster.py", "workers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('the user\\'s')")
    current = str(tmp_path) if entry == "." else entry  # of PYTHONPATH: both mean the current folder
    done = _run(COMMAND, tmp_path, f"{current}:{ROOT}", "config", "eagle")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#")


def test_hidden_packages_are_told_in_one_line(tmp_path: Path) -> None:
    hiding, work = tmp_path / "hiding", tmp_path / "work"
    work.mkdir()
    (hiding / "cluster").mkdir(parents=True)
    (hiding / "cluster" / "__init__.py").touch()
    path = f"{hiding}:{ROOT}"
    done = _run(COMMAND, work, path, "plan")
    assert done.returncode == 2
    assert done.stderr == (
        f"aerie: {hiding}/cluster/__init__.py hides Aerie's own package `cluster` ({ROOT}/cluster): rename it, or take "
        f"{hiding} off Python's path (PYTHONPATH, or the folder of the script)\n"
    )
    library = _run("import aerie; aerie.LLM", work, path)
    assert library.stderr.endswith("ImportError: " + done.stderr)
