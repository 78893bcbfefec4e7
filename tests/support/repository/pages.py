"""The code of a page in `docs/`, so that tests run what a reader copies."""

import re
import sys
from types import ModuleType

from tests.support import DOCS

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_code(page: str) -> ModuleType:
    """A module with all Python blocks of the page, in order. Tracebacks name the page and its lines."""
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    module = ModuleType(f"docs.{path.stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    for block in _BLOCK.finditer(text):
        lines_above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_above + block.group(1), str(path), "exec"), module.__dict__)
    return module
