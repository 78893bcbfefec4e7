"""`aerie config --keys`, and the tables that `make docs` adds to docs/configuration.md: every key, with its default and
the description from its docstring."""

import re

import pytest

from aerie.cluster.config import AerieConfig
from aerie.deploy.cli import main
from aerie.deploy.config.keys import keys, with_tables
from tests.support import DOCS


def test_every_key_has_a_default_and_a_meaning() -> None:
    found = [key for section in AerieConfig.model_fields for key in keys(section)]
    assert len({key.name for key in found}) == len(found) > 80
    assert not [key.name for key in found if not key.default or len(key.meaning) < 4 or key.meaning.endswith(".")]
    assert "cache.page_size" in {key.name for key in found}


def test_page_has_a_table_for_every_section() -> None:
    text = (DOCS / "configuration.md").read_text()
    page = with_tables(text)
    named = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert named and {name.split(".")[0] for name in named} == set(AerieConfig.model_fields)
    assert len(set(named)) == len(named) == sum(len(keys(section)) for section in AerieConfig.model_fields)
    rows = [line for line in page.splitlines() if re.match(r"\| `\w+\.?\w*` \|", line)]
    assert not [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 4]


def test_command_prints_the_sections_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--keys", "cache", "deterministic"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cache.page_size: 16" in lines and "deterministic: false" in lines
    assert not [line for line in lines if line.startswith("model.")] and max(map(len, lines)) <= 100
    assert main(["config", "--keys"]) == 0
    assert "\ntracing.sample_ratio: 1\n" in capsys.readouterr().out


def test_command_refuses_a_section_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--keys", "caches"]) == 2
    assert "--keys caches: no such section; there are model, " in capsys.readouterr().err
