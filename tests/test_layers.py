"""The folders' import rules: kernels <- attention <- workers <- speculative <- cluster <- deploy <- aerie; Ray only on
top."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import ROOT
from tests.support.repository.names import imports

LAYERS = ("kernels", "attention", "workers", "speculative", "cluster", "deploy", "aerie")
ABOVE_RAY = ("cluster", "deploy")
READS_ENVIRONMENT = ("cluster/environment.py", "deploy/", "aerie/")


def _modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    for module, level, _ in imports(str(path.relative_to(ROOT))):
        assert level == 0, f"{path}: relative import"
        yield module


def test_modules_import_only_their_own_and_lower_layers() -> None:
    found = []
    for path in _modules():
        relative = path.relative_to(ROOT)
        for name in _imports(path):
            top = name.partition(".")[0]
            is_higher = top in LAYERS and LAYERS.index(top) > LAYERS.index(relative.parts[0])
            if top == "tests" or is_higher or (top == "ray" and relative.parts[0] not in ABOVE_RAY):
                found.append(f"{relative} imports {name}")
    assert not found


def test_environment_is_read_only_at_the_edge() -> None:
    found = []
    for path in _modules():
        relative, text = str(path.relative_to(ROOT)), path.read_text()
        if relative.startswith(READS_ENVIRONMENT) or not re.search("environ|getenv|putenv", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                found.append(f"{relative}:{node.lineno} touches the environment")
    assert not found


@cache
def _graph() -> dict[str, set[str]]:
    """Which modules of ours each module of ours imports, in functions and for types too."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in _modules()}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    ours = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        found = set(_imports(path))
        for module, _, imported in imports(str(path.relative_to(ROOT))):
            found |= {f"{module}.{each}" for each in imported}
        graph[name] = (found & ours) - {name} - _packages_of(found & ours)
    return graph


def _packages_of(modules: set[str]) -> set[str]:
    """Packages that `from package import module` names beside the module that is meant."""
    return {module.rpartition(".")[0] for module in modules}


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {node: reached(node) for node in graph}
    circles: list[set[str]] = []
    for node in sorted(graph):
        if node in reach[node] and not any(node in circle for circle in circles):
            circles.append({other for other in reach[node] if node in reach.get(other, set())})
    return circles


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert _circles(_graph()) == []


def test_rooms_of_a_folder_import_in_one_direction() -> None:
    """A room is a folder in one of the six and `aerie`, or a module beside the folders."""
    rooms: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        room = ".".join(module.split(".")[:2])
        others = {".".join(other.split(".")[:2]) for other in imported if other.split(".")[0] == module.split(".")[0]}
        rooms.setdefault(room, set()).update(others - {room})
    assert _circles(rooms) == []


def test_a_circle_is_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [{"b", "c"}, {"d"}]
    assert _circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
