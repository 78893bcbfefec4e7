"""What `aerie plan` says of models in use: rows of published/plans.md beside the printed plan.

`published/NAME.json` is a config.json as published, without fields that no decoder reads. There are no weights. Two of
Granite have their cards' sizes alone (3.1-3b-a800m, 4.0-micro). Llama 4's `attn_*` and `floor_scale` are transformers'
defaults.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from aerie.deploy.cli import main
from tests.support import MODELS, ROOT

PUBLISHED = Path(__file__).parent / "published"
# Rows: name -> served by, GB of weights, bytes of KV per token, longest request.
ROWS = {
    cells[0]: tuple(cells[1:])
    for line in (PUBLISHED / "plans.md").read_text().rpartition("| model | served by |")[2].splitlines()[2:]
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
}
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.json"))
# Quick: one of each class, and one of the adapter's models: building one takes a second or more, on the meta device.
CLASSES = {
    json.loads((PUBLISHED / f"{n}.json").read_text())["architectures"][0]: n for n in NAMES if ROWS[n][0] == "own"
}
QUICK = {*CLASSES.values(), "Phi-4-mini-instruct"}


def test_every_published_model_has_a_row() -> None:
    assert sorted(ROWS) == NAMES and len(NAMES) >= 20
    assert set(NAMES) > QUICK


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_the_plan_says_what_the_page_says(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(PUBLISHED / f"{name}.json", folder / "config.json")
    for file in (MODELS / "target").glob("*token*"):
        shutil.copy(file, folder)
    served, weights, kv, limit = ROWS[name]
    status = main(["plan", str(folder), "--cpus", "64", "--gpus", "8"])
    printed = capsys.readouterr()
    if served.startswith("refused: "):
        (line,) = (line for line in printed.err.splitlines() if line.startswith(f"model {folder}: "))
        assert status != 0 and served.removeprefix("refused: ") in line
        return
    assert status == 0
    assert ("served by" in printed.out) == (served == "adapter") and served in ("own", "adapter")
    found = re.search(r"^weights +([\d.]+) GB of the target(?: and ([\d.]+) GB of the draft)?", printed.out, re.M)
    assert found is not None and weights == " + ".join(part for part in found.groups() if part)
    per_token, _, per_request = kv.partition(" + ")
    assert f"KV takes {per_token} bytes per token of each" in printed.out
    assert (f", and {per_request} per request\n" in printed.out) == bool(per_request)
    assert ("windows     a token takes" in printed.out) == bool(per_request)
    assert f"requests of up to {limit} tokens" in printed.out


def test_docs_have_the_memory_that_the_page_has() -> None:
    """docs/models.md rounds it."""
    table = (ROOT / "docs" / "models.md").read_text().partition("| family |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert len(lines) >= 15
    for line in lines:
        found = re.search(r"`aerie serve \S+/([^ `]+).*` \| (\S+) GB, (\d+) MB(?: \+ (\d+) MB)? \|$", line)
        assert found is not None, line
        name, *shown = found.groups()
        _, weights, kv, _ = ROWS[name]
        per_token, _, per_request = kv.partition(" + ")
        window = f"{float(per_request.removesuffix(' MB')):.0f}" if per_request else None
        assert shown == [f"{sum(map(float, weights.split(' + '))):.1f}", f"{int(per_token) / 1000:.0f}", window], name
