"""Two habits that creep back, counted: `python -m tests.house`, as `make check` does.

A module above operations and attention backends asks a device for what it can do (`attention.capability.Capability`),
not for what it is; and imports stand at the top, since one inside a function hides what a module needs. Prints each
place of either, and fails where there are more than the limits below. Lower a limit when you removed some.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support import ROOT

FLOORS = ("attention", "workers", "speculative", "cluster", "deploy", "aerie")
MAX_DEVICE_TESTS = 8
MAX_INNER_IMPORTS = 25
_ASKS = ("is_cuda", "is_cpu", "is_meta", "is_gpu", "is_available", "get_device_capability")
_TYPES = ("cpu", "cuda", "meta")


def asks_for_device(path: Path) -> bool:
    """Whether the module's business is to know devices: it may ask."""
    return "ops" in path.parts or "backends" in path.parts or path.parts[-2:] == ("attention", "capability.py")


def device_tests(tree: ast.AST) -> Iterator[int]:
    """Lines that ask what a device is: an attribute such as `is_cuda`, or a comparison with its type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _ASKS:
            yield node.lineno
        elif isinstance(node, ast.Compare):
            values = {part.value for part in (node.left, *node.comparators) if isinstance(part, ast.Constant)}
            if values & set(_TYPES):
                yield node.lineno


def inner_imports(tree: ast.AST) -> Iterator[int]:
    """Lines that import a module of ours inside a function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if any(name.split(".")[0] in FLOORS for name in names):
                    yield node.lineno


def places(find: Callable[[ast.AST], Iterator[int]], leave_out: Callable[[Path], bool]) -> list[str]:
    """Each line that `find` names, as "path:line: code"."""
    found = []
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        if not leave_out(path.relative_to(ROOT)):
            text = path.read_text()
            lines = text.splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{number}: {lines[number - 1].strip()}"
                for number in sorted(set(find(ast.parse(text))))
            ]
    return found


def main() -> int:
    devices = places(device_tests, asks_for_device)
    imports = places(inner_imports, lambda path: False)
    for name, found, most in (
        ("device tests outside ops, backends and capability", devices, MAX_DEVICE_TESTS),
        ("imports of ours inside functions", imports, MAX_INNER_IMPORTS),
    ):
        print(f"{len(found)} {name} (at most {most})")
        if len(found) > most or "-v" in sys.argv:
            print(*(f"    {place}" for place in found), sep="\n")
    return int(len(devices) > MAX_DEVICE_TESTS or len(imports) > MAX_INNER_IMPORTS)


if __name__ == "__main__":
    sys.exit(main())
