"""The benchmark of draft adapters shows what a trained one gains."""

from pathlib import Path

import pytest

from tests.bench.quality.draft_adapters import measure


@pytest.mark.slow
def test_an_adapter_of_the_draft_accepts_more_of_its_targets_adapter(tmp_path: Path) -> None:
    found = measure(tmp_path, rows=64, target_steps=40, draft_steps=40, prompts=12)
    assert found["both"] > found["target's alone"] + 0.1
