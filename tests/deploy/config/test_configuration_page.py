"""docs/configuration.md: every key of a configuration, with its default and the description from its docstring."""

from cluster.config import AerieConfig
from tests.support.repository.configuration_page import PAGE, listed, page


def test_page_is_what_the_docstrings_say() -> None:
    text = PAGE.read_text()
    assert text == page(text), "run `python -m tests.support.repository.configuration_page`"


def test_page_has_every_section() -> None:
    assert listed(PAGE.read_text()) == set(AerieConfig.model_fields)
