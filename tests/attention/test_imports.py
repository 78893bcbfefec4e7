"""Who imports whom in `attention`, imports inside functions and for types included."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABOVE = ("workers", "speculative", "cluster", "deploy", "ray", "tests")


def imports() -> dict[str, set[str]]:
    """Modules of `attention`, and the names that each imports, with those of what is taken from a module."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "attention").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_attention_imports_nothing_from_above() -> None:
    for module, names in imports().items():
        above = {name for name in names if name.split(".")[0] in ABOVE}
        assert not above, f"{module} imports {sorted(above)}"


def test_attention_has_no_circle() -> None:
    found = imports()
    # a package's own file is but a map: to import a module runs it, and it imports nothing
    modules = {name for name in found if found[name] or not any(other.startswith(name + ".") for other in found)}
    left = {name: found[name] & modules for name in modules}
    while left:
        free = {name for name, needed in left.items() if not needed & left.keys()}
        assert free, f"a circle within {sorted(left)}"
        left = {name: needed for name, needed in left.items() if name not in free}
