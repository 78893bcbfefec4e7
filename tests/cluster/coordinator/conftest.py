"""A bed for the coordinator: real ZeroMQ sockets, scripted ranks in threads."""

import pytest

from tests.support.cluster import TestBed


@pytest.fixture
def make_bed(tmp_path):
    beds = []

    def make(**options):
        beds.append(TestBed(tmp_path, **options))
        return beds[-1]

    yield make
    for bed in beds:
        bed.close()
