"""Keys of the configuration are declared once: docs/add-an-option.md."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from aerie.attention.setting import Setting, check_settings
from tests.deploy.config import declared_option
from tests.support import DOCS, MODELS, ROOT


def test_one_declaration_brings_an_option_from_the_command_line_to_a_rank(tmp_path: Path) -> None:
    """The process sees the sources with two more lines, which declare and describe `cache.warm_pages`."""
    command = [sys.executable, "-m", declared_option.__name__, str(tmp_path), str(MODELS / "target")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["args"] == [{"warm_pages": 5}, {"warm_pages": 4}, {"warm_pages": 6}] and all(seen["notes"])
    assert seen["from the file"] == 0
    assert "cache.warm_pages=12: must be at least 0 and at most 9" in seen["high"]
    assert "cache.warm_page: unknown key; did you mean cache.warm_pages?" in seen["near"]
    assert "--warm-pages many: must be a whole number" in seen["text"]
    assert "--warm-page: unknown option; did you mean --warm-pages?" in seen["typo"]
    assert re.search("--warm-pages( N)?, --num-warm N", seen["help"]), "Python 3.13 names the value once"
    assert "cache.warm_pages: pages that are read ahead" in " ".join(seen["help"].split())
    assert "cache.warm_pages: 3\n    pages that are read ahead; 0: none; `--warm-pages`; `--num-warm`\n" in seen["keys"]
    assert seen["page"] == [
        "| `cache.warm_pages` | 3 | pages that are read ahead; 0: none; `--warm-pages`; `--num-warm` |"
    ]
    assert seen["plan"] == 7


def test_the_page_shows_the_declaration_that_is_tested() -> None:
    page = (DOCS / "add-an-option.md").read_text()
    assert declared_option.FIELD in page and declared_option.MEANING in page


class Section:
    """A section of one key."""

    wait_s: Annotated[float | None, Setting(gt=0)]
    share: Annotated[float | str, Setting(ge=0, le=1, rule="a share")]

    def __init__(self, wait_s: float | None, share: float | str) -> None:
        self.wait_s, self.share = wait_s, share


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ((0.0, "auto"), "^wait_s=0.0: must be above 0 seconds$"),
        ((1.0, 2.0), "^share=2.0: must be a share$"),
        ((None, 1), None),
        ((1, "auto"), None),
    ],
)
def test_numbers_are_checked_and_words_are_not(values: tuple[Any, Any], fault: str | None) -> None:
    if fault is None:
        check_settings(Section(*values))
        return
    with pytest.raises(ValueError, match=fault):
        check_settings(Section(*values))
