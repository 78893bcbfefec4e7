"""The rooms of `cluster/`: which may import which, and a map in every room."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT
from tests.support.repository.names import imports

CLUSTER = ROOT / "cluster"

# A room, or a module beside the rooms, and all of `cluster` that it may import. From the bottom up: a line names only
# lines above it.
BELOW: dict[str, set[str]] = {
    "linux": set(),
    "environment": set(),
    "start_log": {"linux"},
    "transport": {"linux"},
    "http": {"linux", "start_log", "transport"},
    "learning": {"transport"},
    "coordinator": {"linux", "transport", "learning"},
    "parallel": set(),
    "config": {"http", "parallel", "learning"},
    "placement": {"config"},
    "plan": {"linux", "http", "learning", "parallel", "config", "placement"},
    "assembly": {"config", "plan"},
    "replica": {
        "linux",
        "environment",
        "transport",
        "learning",
        "coordinator",
        "config",
        "placement",
        "plan",
        "start_log",
        "assembly",
    },
    "ingress": {"linux", "transport", "http", "plan", "start_log"},
}


def _modules() -> list[Path]:
    return sorted(path for path in CLUSTER.rglob("*.py") if path.parent != CLUSTER or path.name != "__init__.py")


def _name(path: Path) -> str:
    """The dotted name of a module's file; a package's is its `__init__.py`."""
    return ".".join(path.relative_to(CLUSTER.parent).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of the modules of `cluster` that a module imports, also inside functions and for types only."""
    for module, _, _ in imports(str(path.relative_to(ROOT))):
        if module.partition(".")[0] == "cluster":
            assert module != "cluster", f"{path}: name the room"
            yield module


def test_the_order_of_the_rooms_is_one() -> None:
    order = list(BELOW)
    for number, (room, below) in enumerate(BELOW.items()):
        assert below <= set(order[:number]), f"{room} names what does not stand above it"
    assert set(order) == {_name(path).split(".")[1] for path in _modules()}


def test_modules_import_only_their_room_and_rooms_below() -> None:
    found = []
    for path in _modules():
        own = _name(path).split(".")[1]
        found += [
            f"{_name(path)} imports {name}" for name in _imports(path) if name.split(".")[1] not in {own, *BELOW[own]}
        ]
    assert not found


def test_a_rooms_map_has_a_line_for_each_of_its_modules() -> None:
    for init in CLUSTER.rglob("__init__.py"):
        head = ast.get_docstring(ast.parse(init.read_text())) or ""
        named = set(re.findall(r"^ *(\w+)  +\S", head, re.MULTILINE))
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        assert named == modules | folders, init
