"""The documentation site (`make docs`), as far as it can be checked without mkdocs: links are `test_names`' part."""

import ast
import re
from collections.abc import Iterator

import pytest

from aerie.deploy.arguments import parser
from tests.support import DOCS, ROOT

NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
HOOK = ast.parse((DOCS / "outside_pages.py").read_text())


def _outside() -> dict[str, str]:
    """Page of the repository -> page of the site."""
    for node in HOOK.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "OUTSIDE":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise AssertionError("the hook has no OUTSIDE")


def test_navigation_lists_every_page_once() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} | set(_outside().values())
    listed = re.findall(r"([\w-]+\.md)$", NAV, re.MULTILINE)
    assert sorted(listed) == sorted(pages)


def test_pages_outside_exist() -> None:
    assert not [source for source in _outside() if not (ROOT / source).is_file()]


def test_reference_names_what_exists() -> None:
    named = re.findall(r"^::: ([\w.]+)\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert named
    for module, name in named:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, name


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("add-a*.md")))
def test_a_seam_is_one_short_page_with_an_example_that_a_test_runs(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(text.split()) <= 600
    assert "```python" in text
    tests = [ROOT / name for name in re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", text)]
    assert any(page in test.read_text() for test in tests), "no test that the page names runs its example"


def _commands() -> Iterator[tuple[str, str, list[str]]]:
    """Page, line and words of each `aerie COMMAND ...` that stands in a block of code, or alone in backticks."""
    for path in (*DOCS.glob("*.md"), *(ROOT / source for source in _outside())):
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ {4}(?:[\w./]+/)?(aerie [a-z].*)$|`(aerie [a-z][^`]*)`", text, re.MULTILINE):
            found = line[0] or line[1]
            words = re.sub(r" #.*| \.\.\..*|\s*#\s.*$", "", found).split()
            yield path.name, found, words


def test_commands_on_pages_have_their_options() -> None:
    (commands,) = parser()._subparsers._group_actions  # type: ignore[union-attr]
    known = {name: set(command._option_string_actions) for name, command in commands.choices.items()}  # type: ignore[union-attr,arg-type]
    wrong, seen = [], 0
    for page, line, words in _commands():
        if page in ("changelog.md", "CHANGELOG.md", "experiments.md", "EXPERIMENTS.md", "roadmap.md"):
            continue
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        seen += 1
        if words[1] not in known or not options <= known[words[1]]:
            wrong.append(f"{page}: {line}")
    assert seen > 100 and not wrong
