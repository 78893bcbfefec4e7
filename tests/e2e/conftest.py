"""One Ray for all tests that deploy applications on it, one after another. `test_across_nodes`, which starts a cluster
of its own, runs before them."""

from collections.abc import Iterator

import pytest

from tests.e2e.serving import ray_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files come in any order, for instance in that of a folder."""
    items.sort(key=lambda item: item.path.name != "test_across_nodes.py")


@pytest.fixture(scope="session")
def ray_port() -> Iterator[int]:
    """Where Serve listens."""
    with ray_cluster() as port:
        yield port
