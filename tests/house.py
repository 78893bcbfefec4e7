"""Counts habits that creep back: `python -m tests.house`, as `make check` does.

- Device tests: a module above kernels and attention backends asks a device what it can do
  (`aerie.kernels.capability.Capability`), not what it is.
- Imports inside functions: they hide what a module needs.
- Long files and full folders: a room is one that a reader can look over.
- Test modules of one name: pytest imports those in folders without `__init__.py` by their name, so that the second ends
  the collection.

Prints each place, and fails above the limits below. Lower a limit when you have removed some.
"""

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support import ROOT

FLOORS = ("kernels", "attention", "workers", "speculative", "cluster", "deploy", "aerie")
MAX_DEVICE_TESTS = 8
MAX_INNER_IMPORTS = 23
MAX_MODULES = 20  # of a folder, without its subfolders
MAX_LINES = 400  # of a product file
MAX_LONG_FILES = 0
_ASKS = ("is_cuda", "is_cpu", "is_meta", "is_gpu", "is_available", "get_device_capability")
_TYPES = ("cpu", "cuda", "meta")


def asks_for_device(path: Path) -> bool:
    """Whether the module's business is to know devices: it may ask."""
    return path.parts[0] == "kernels" or "backends" in path.parts


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
                if any(name.split(".")[0] == "aerie" for name in names):
                    yield node.lineno


def places(find: Callable[[ast.AST], Iterator[int]], leave_out: Callable[[Path], bool]) -> list[str]:
    """Each line that `find` names, as "path:line: code"."""
    found = []
    for path, (text, tree) in parsed().items():
        if not leave_out(path):
            lines = text.splitlines()
            found += [f"{path}:{number}: {lines[number - 1].strip()}" for number in sorted(set(find(tree)))]
    return found


@functools.cache
def parsed() -> dict[Path, tuple[str, ast.AST]]:
    """Text and syntax tree of each product file, by its path in the repository."""
    texts = {path: path.read_text() for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))}
    return {path.relative_to(ROOT): (text, ast.parse(text)) for path, text in texts.items()}


def full_folders() -> list[str]:
    """Folders of the repository with more than `MAX_MODULES` modules."""
    folders = {path.parent for floor in (*FLOORS, "tests") for path in (ROOT / floor).rglob("*.py")}
    counts = {folder.relative_to(ROOT): len(list(folder.glob("*.py"))) for folder in sorted(folders)}
    return [f"{folder}: {count} modules" for folder, count in counts.items() if count > MAX_MODULES]


def long_files() -> list[str]:
    """Product files with more than `MAX_LINES` lines."""
    counts = {path: text.count("\n") for path, (text, _) in parsed().items()}
    return [f"{path}: {count} lines" for path, count in counts.items() if count > MAX_LINES]


def repeated_test_modules() -> list[str]:
    """Test modules in folders without `__init__.py` whose name stands twice."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    counts = Counter(path.name for path in paths)
    return sorted(str(path.relative_to(ROOT)) for path in paths if counts[path.name] > 1)


def main() -> int:
    devices = places(device_tests, asks_for_device)
    imports = places(inner_imports, lambda path: False)
    counted = (
        ("device tests outside kernels and backends", devices, MAX_DEVICE_TESTS),
        ("imports of ours inside functions", imports, MAX_INNER_IMPORTS),
        (f"folders with more than {MAX_MODULES} modules", full_folders(), 0),
        (f"files with more than {MAX_LINES} lines", long_files(), MAX_LONG_FILES),
        ("test modules with another's name", repeated_test_modules(), 0),
    )
    for name, found, most in counted:
        print(f"{len(found)} {name} (at most {most})")
        if len(found) > most or "-v" in sys.argv:
            print(*(f"    {place}" for place in found), sep="\n")
    return int(any(len(found) > most for _, found, most in counted))


if __name__ == "__main__":
    sys.exit(main())
