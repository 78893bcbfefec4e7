"""One Ray for all tests that deploy applications on it, one after another. `test_across_nodes`, which starts a cluster
of its own, runs before them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checkpoint import make_tokenizer
from tests.e2e.serving import ray_cluster
from tests.support.scripted import VOCABULARY
from tests.support.tiny_models import make_target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files come in any order, for instance in that of a folder."""
    items.sort(key=lambda item: item.path.name != "test_across_nodes.py")


@pytest.fixture(scope="session")
def ray_port() -> Iterator[int]:
    """Where Serve listens."""
    with ray_cluster() as port:
        yield port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for scripted ranks, in `target`."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(make_target(folder / "target", vocab_size=VOCABULARY), VOCABULARY)
    return folder
