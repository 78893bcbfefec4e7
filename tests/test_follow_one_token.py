"""docs/follow-one-token.md: every function that it names exists, and leads to the next one."""

import ast
import re
from dataclasses import dataclass

from tests.support import DOCS, ROOT

PAGE = DOCS / "follow-one-token.md"
_STEP = re.compile(r"^## (\d+)\. ", re.MULTILINE)
_PLACE = re.compile(r"^- `([\w/]+\.py)` `([\w.]+)`(?: by `(\w+)`)?$", re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """A function of the walk. by: the name that leads from it to the next one; empty at the end."""

    path: str
    function: str
    by: str

    def __str__(self) -> str:
        return f"{self.path} {self.function}"


def _places() -> list[Place]:
    return [Place(*match.groups(default="")) for match in _PLACE.finditer(PAGE.read_text())]


def _mentions(place: Place) -> set[str]:
    """The names in a function's signature and body, and its own and its class's."""
    node: ast.AST = ast.parse((ROOT / place.path).read_text())
    for name in place.function.split("."):
        found = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name
        ]
        assert found, f"{place}: there is no {name}"
        node = found[0]
    names = set(place.function.split("."))
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            names.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            names.add(inner.attr)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            names |= set(re.findall(r"^\w+$", inner.value))  # a quoted annotation
    return names


def test_walk_has_twelve_steps_each_with_a_function() -> None:
    steps = _STEP.split(PAGE.read_text())[1:]
    assert steps[::2] == [str(number) for number in range(1, 13)]
    assert all(_PLACE.search(text) for text in steps[1::2])


def test_each_function_leads_to_the_next() -> None:
    places = _places()
    assert [place.by for place in places].count("") == 1 and not places[-1].by
    for place, following in zip(places, places[1:], strict=False):
        assert place.by in _mentions(place), f"{place} has no {place.by}"
        assert place.by in _mentions(following), f"{following} has no {place.by}, by which {place} leads to it"
