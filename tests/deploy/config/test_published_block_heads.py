"""`aerie plan TARGET --draft HEAD` of published block heads with their targets, and of heads that are not served."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aerie.deploy.cli import main
from tests.deploy.config.test_published_models import PUBLISHED
from tests.support import MODELS
from tests.support.drafts.published_blocks import BLOCKS, REFUSED


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A checkpoint in bfloat16 whose data is a hole in the file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        first, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def plan(
    tmp_path: Path, target: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> int:
    folders = tmp_path / target, tmp_path / "head"
    for folder in folders:
        folder.mkdir()
    shutil.copy(PUBLISHED / f"{target}.json", folders[0] / "config.json")
    for file in (MODELS / "target").glob("*token*"):
        shutil.copy(file, folders[0])
    (folders[1] / "config.json").write_text(json.dumps(dict(config)))
    if shapes is not None:
        write_header(folders[1] / "model.safetensors", shapes)
    return main(["plan", str(folders[0]), "--draft", str(folders[1]), "--cpus", "64", "--gpus", "8"])


@pytest.mark.parametrize("name", BLOCKS)
def test_the_plan_has_the_whole_block_and_the_heads_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of the draft: its own tensors in 16 bits; a head that shares the target's tables adds none for them."""
    head = BLOCKS[name]
    assert plan(tmp_path, head.target, head.config, head.shapes()) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^draft .*\({head.method}, .*depth {head.depth}, ", printed, re.M), printed
    found = re.search(r"^weights +[\d.]+ GB of the target and ([\d.]+) GB of the draft", printed, re.M)
    counted = {key: shape for key, shape in head.shapes().items() if not key.startswith("confidence_head")}
    assert found is not None
    assert float(found[1]) == pytest.approx(sum(map(math.prod, counted.values())) * 2 / 1e9, abs=0.02)


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_are_not_served_are_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, config, message = REFUSED[name]
    assert plan(tmp_path, target, config) != 0
    assert message in capsys.readouterr().err
