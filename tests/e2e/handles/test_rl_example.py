"""`examples/rl/grpo.py`: an engine and a trainer on one Ray cluster, with and without drafts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

ROWS = [{"question": f"Tom has {n} pens and buys 2. How many?", "answer": f"So #### {n + 2}"} for n in range(8)]
STEPS = 2


def trained(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What the example says of each step."""
    data, out = folder / "train.jsonl", folder / "out.json"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    script = [sys.executable, str(ROOT / "examples" / "rl" / "grpo.py"), str(data), "--steps", str(STEPS)]
    subprocess.run([*script, "--out", str(out), *options], check=True, timeout=900, cwd=folder)
    steps: list[dict[str, Any]] = json.loads(out.read_text())
    return steps


@pytest.mark.ray
@pytest.mark.slow
def test_answers_are_equal_with_and_without_drafts_while_weights_change(tmp_path: Path) -> None:
    """Log-probabilities of engine and trainer differ by float32's rounding, so the engine has the trainer's weights."""
    folders = tmp_path / "with", tmp_path / "without"
    for folder in folders:
        folder.mkdir()
    drafted, plain = trained(folders[0]), trained(folders[1], "--no-draft")
    for number, (one, other) in enumerate(zip(drafted, plain, strict=True)):
        assert one["texts"] == other["texts"] and one["reward"] == other["reward"]
        assert one["versions"] == other["versions"] == [f"step-{number}" if number else "0"]
        assert max(one["logprob_difference"], other["logprob_difference"]) < 1e-4
        assert one["acceptance"] > 1.5 and other["acceptance"] is None
    assert drafted[0]["gradient"] > 0 and drafted[0]["texts"] != drafted[1]["texts"]
