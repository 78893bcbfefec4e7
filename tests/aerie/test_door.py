"""`import aerie`: its names, and that it is the one name of ours that others see."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import aerie
from aerie.attention.distribution import NAME, version
from aerie.deploy.offline import llm, sampling_params
from tests.support import DOCS, ROOT
from tests.support.repository.names import FLOORS, files

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
    program = "import aerie, sys; print({'torch', 'ray', 'aerie.deploy'} & set(sys.modules), aerie.__version__)"
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


@pytest.mark.parametrize("name", FLOORS)
def test_no_module_of_a_user_hides_one_of_ours(tmp_path: Path, name: str) -> None:
    """API projects have folders of these names, and PyPI has packages `attention` and `cluster`."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('the user\\'s')")
    path = f"{tmp_path}:{ROOT}"
    command = _run(COMMAND, tmp_path, path, "config", "eagle")
    assert command.returncode == 0, command.stderr
    assert command.stdout.startswith("#")
    library = _run(f"import aerie, aerie.{name}; print(aerie.SamplingParams().n)", tmp_path, path)
    assert library.stdout == "1\n", library.stderr


def test_only_one_name_is_imported() -> None:
    """In a checkout `import workers` would work by accident, and in an installation fail."""
    for name in (name for name in files() if name.endswith(".py")):
        bare = re.findall(rf"^\s*(?:from|import) (?:{'|'.join(FLOORS)})\b.*", (ROOT / name).read_text(), re.MULTILINE)
        assert not bare, f"{name}: {bare[0].strip()}: write `aerie.` before it"
