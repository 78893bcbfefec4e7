"""The folders' import rules: attention <- workers <- speculative <- cluster <- deploy; Ray only on top."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("attention", "workers", "speculative", "cluster", "deploy")
ABOVE_RAY = ("cluster", "deploy")
READS_ENVIRONMENT = ("cluster/config.py", "deploy/")


def _modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_its_own_and_lower_layers(path: Path) -> None:
    relative = path.relative_to(ROOT)
    own = LAYERS.index(relative.parts[0])
    for name in _imports(path):
        top = name.partition(".")[0]
        assert top != "tests", f"{relative} imports {name}"
        if top in LAYERS:
            assert LAYERS.index(top) <= own, f"{relative} imports {name} from a higher layer"
        if top == "ray":
            assert relative.parts[0] in ABOVE_RAY, f"{relative} imports {name}"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_environment_is_read_only_at_the_edge(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    if relative.startswith(READS_ENVIRONMENT):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        assert not named, f"{relative}:{getattr(node, 'lineno', 0)} touches the environment"
