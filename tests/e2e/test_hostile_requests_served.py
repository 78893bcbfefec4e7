"""Hostile requests at all routes of a served engine, beside plain streams. `make test-hostile` runs it."""

import json
from pathlib import Path

import pytest

from tests.e2e.serve_process import serve_process
from tests.load.hostile.requests import attack

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECONDS = 60.0


@pytest.mark.parametrize("number", [0])
async def test_every_request_is_answered_or_refused(tmp_path: Path, number: int) -> None:
    with serve_process(tmp_path) as server:
        report = await attack(server.url, SECONDS, number)
        print(json.dumps(report.statuses.most_common()))
        assert server.status("/health") == 200
    assert report.faults == []
    assert len(report.statuses) > 3
