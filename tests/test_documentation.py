"""The documentation site (`make docs`), as far as it can be checked without mkdocs: links are `test_names`' part."""

import ast
import re

import pytest

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
