"""Hostile grammars at a served engine, 32 at a time, beside plain streams. `make test-hostile` runs it."""

import json
from pathlib import Path

import pytest

from tests.e2e.serve_process import serve_process
from tests.load.hostile.grammars import attack

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TARGET_MS = 100.0
SECONDS = 60.0


@pytest.mark.parametrize("number", [0])
async def test_plain_streams_notice_nothing(tmp_path: Path, number: int) -> None:
    with serve_process(tmp_path, scheduler={"itl_target_ms": TARGET_MS}) as server:
        report = await attack(server.url, "target", SECONDS, number, server=server.process.pid)
        report.judge(TARGET_MS)
        print(json.dumps(report.summary(TARGET_MS), ensure_ascii=False))
        assert server.status("/health") == 200
    assert report.faults == []
    assert report.endings and report.gaps_ms
