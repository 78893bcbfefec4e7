"""One Ray for all tests that deploy applications on it, one after another. `test_across_nodes`, which starts a cluster
of its own, is named so that it comes before them."""

from collections.abc import Iterator

import pytest

from tests.e2e.serving import ray_cluster


@pytest.fixture(scope="session")
def ray_port() -> Iterator[int]:
    """Where Serve listens."""
    with ray_cluster() as port:
        yield port
