"""What the repository defines, read from its sources without importing them, and the names that its prose mentions.

For `tests/test_names.py`. A name is resolved as far as folders and modules go, then by what the module binds, then by
what the class binds (in its body, on `self`, and in the bases that are of this repository)."""

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import ROOT

FLOORS = ("kernels", "attention", "workers", "speculative", "cluster", "deploy")  # folders, imported from `aerie`
PACKAGES = (*FLOORS, "tests")
ANY = "*"  # among a class's names: it has a base from elsewhere, so that nothing can be said of them

HIDDEN = (".ci", ".github")  # hidden folders that are sources
_BUILT = re.compile(r"\.|__pycache__$|build$|dist$|.*\.egg-info$")
_TICKED = re.compile(r"(?<!`)(`{1,2})([^`]+?)\1(?!`)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def files() -> frozenset[str]:
    """Every file of the checkout, and the folders they lie in, with a slash at their end; nothing that was built."""
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name in HIDDEN or not _BUILT.match(name)]
        found |= {str((Path(folder) / name).relative_to(ROOT)) for name in names}
    return frozenset(found | {f"{folder}/" for name in found for folder in map(str, Path(name).parents)})


@cache
def imports(name: str) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """(module, level, names) of each import in a module's file, in functions and for types too; an `import a` has no
    names. A module of ours is named by its `place`."""
    found: list[tuple[str, int, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            found += [(place(alias.name), 0, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((place(node.module or ""), node.level, tuple(alias.name for alias in node.names)))
    return tuple(found)


def place(dotted: str) -> str:
    """The dotted name of a module of ours by its place in the repository, without `aerie`; another name as it is."""
    package, _, rest = dotted.partition(".")
    return rest if package == "aerie" and rest.partition(".")[0] in FLOORS else dotted


@dataclass(frozen=True)
class _Module:
    """What a source file defines and says. Kept instead of its syntax tree: the trees of all files take hundreds of MB.

    bound: see `bindings`.
    classes: (name, what it binds) of each class, nested ones too.
    docstrings: (line, text).
    """

    bound: dict[str, set[str]]
    classes: list[tuple[str, set[str]]]
    docstrings: list[tuple[int, str]]


@cache
def _module(name: str) -> _Module:
    body = ast.parse((ROOT / name).read_text()).body
    every = list(_statements(body, ast.stmt))
    of_class = {node: _class_names(node) for node in every if isinstance(node, ast.ClassDef)}
    words = [
        (node.lineno, node.value.value)
        for node in every
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return _Module(_bound(body, of_class), [(node.name, names) for node, names in of_class.items()], words)


def bindings(module: str) -> dict[str, set[str]]:
    """name -> what can follow it after a dot, of a module's file; ANY where that cannot be told."""
    return _module(module).bound


def _bound(body: list[ast.stmt], of_class: dict[ast.ClassDef, set[str]]) -> dict[str, set[str]]:
    bound: dict[str, set[str]] = {}
    for node in _statements(body):
        if isinstance(node, ast.ClassDef):
            bound[node.name] = of_class[node]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bound[node.name] = set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update({(alias.asname or alias.name).partition(".")[0]: {ANY} for alias in node.names})
        else:
            bound.update({name: {ANY} for name in _targets(node)})
    return bound


@cache
def classes() -> dict[str, set[str]]:
    """Every class of the repository by its bare name -> its attributes, those of its bases included."""
    found: dict[str, set[str]] = {}
    for name in files():
        if name.endswith(".py") and "class " in (ROOT / name).read_text():
            for of, names in _module(name).classes:
                found.setdefault(of, set()).update(names)
    for _ in range(4):  # the depth of our class trees
        for names in found.values():
            bases = {name for name in names if name.startswith("<")}
            for base in bases:
                names.discard(base)
                names |= found.get(base.strip("<>"), {ANY})
    return found


def is_defined(dotted: str) -> bool:
    """Whether `a.b.c` or `a.b:c` is a folder, a module, or something that one binds."""
    if dotted.partition(".")[0] in FLOORS:
        return False  # there is no module of that name: it is in `aerie`
    parts = place(dotted.replace(":", ".")).split(".")
    for count in range(len(parts), 0, -1):
        stem, rest = "/".join(parts[:count]), parts[count:]
        module = next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in files()), None)
        if not rest and (module or f"{stem}/" in files()):
            return True
        if module is not None:
            return _binds(bindings(module), rest)
    return False


def has_attribute(class_name: str, attribute: str) -> bool:
    """Whether a class of that name has it, as far as can be told."""
    names = classes()[class_name]
    return attribute in names or ANY in names


def is_path(path: str) -> bool:
    """Whether a path of the repository, or the end of one (`scheduler.py`), exists; it may be a pattern."""
    path = path.removeprefix("./")
    if "*" in path:
        return any(ROOT.glob(path))
    return path in files() or f"{path}/" in files() or any(name.endswith(f"/{path}") for name in files())


def prose(name: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what a file says in words: docstrings and comments of .py, comments of .yaml, all of .md but its
    code."""
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        yield 1, _FENCED.sub(lambda fence: "\n" * fence.group().count("\n"), text)
    elif name.endswith(".py"):
        if re.search("#.*`", text):  # tokens take long, and comments are read for what stands in backticks
            yield from _comments(text)
        yield from _module(name).docstrings
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            _, mark, comment = line.partition("#")
            if mark:
                yield number, comment


def ticked(name: str) -> Iterator[tuple[int, str]]:
    """(line, text) of everything between backticks in a file's prose."""
    for line, text in prose(name) if "`" in (ROOT / name).read_text() else ():
        for match in _TICKED.finditer(text):
            yield line + text.count("\n", 0, match.start()), " ".join(match.group(2).split())


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Runs of comment lines as one text each: a name may stand in backticks that open and close on different lines."""
    run: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if run and token.start[0] != last + 1:
                yield start, "\n".join(run)
                run = []
            start = start if run else token.start[0]
            last = token.start[0]
            run.append(token.string.lstrip("# "))
    if run:
        yield start, "\n".join(run)


def _binds(bound: dict[str, set[str]], rest: list[str]) -> bool:
    first, *more = rest
    if first not in bound:
        return False
    names = bound[first] | (classes().get(first, set()) if bound[first] and bound[first] != {ANY} else set())
    return not more or ANY in names or more[0] in names


def _statements(body: list[ast.stmt], inside: Any = ast.If | ast.Try | ast.With) -> Iterator[ast.stmt]:
    """Those of a module, and within its statements of the kinds `inside`."""
    for node in body:
        yield node
        if isinstance(node, inside):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []), inside)


def _targets(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for part in ast.walk(target) if target is not None else ():
            if isinstance(part, ast.Name):
                yield part.id


def _class_names(node: ast.ClassDef) -> set[str]:
    """Return what a class binds, and its bases as "<Base>"."""
    names = {f"<{ast.unparse(base).rpartition('.')[2].partition('[')[0]}>" for base in node.bases}
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
            for part in ast.walk(child):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    names.add(part.attr)
        else:
            names.update(_targets(child))
    return names
