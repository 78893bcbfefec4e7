"""What a first-time user gives as a model: folders of the hub's cache, copies that are not whole, files that are no
configuration. `aerie plan` understands it, or refuses it with one line."""

import json
import shutil
from pathlib import Path

import pytest

from aerie.deploy.cli import main
from aerie.deploy.config.model import model_args
from aerie.workers.models.weights import checkpoint_files
from tests.support import MODELS

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "target", tmp_path / "mödel ü"))


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A model's folder in the hub's cache: links in snapshots to blobs."""
    folder = tmp_path / "models--tiny--pair"
    snapshot, blobs = folder / "snapshots" / "abc", folder / "blobs"
    for each in (snapshot, blobs, folder / "refs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc\n")
    for number, file in enumerate((MODELS / "target").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return folder


def refused(capfd: pytest.CaptureFixture[str], *line: object) -> str:
    """The one line that a command line of `aerie plan` is refused with."""
    capfd.readouterr()
    try:
        code = main(["plan", *map(str, line), "--cpus", "8", "--gpus", "0"])
    except SystemExit as end:
        code = int(end.code or 0)
    lines = capfd.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, lines
    return lines[0]


def test_a_folder_of_the_hubs_cache_is_its_snapshot_under_the_hubs_name(cached: Path) -> None:
    snapshot = cached / "snapshots" / "abc"
    for given in (cached, snapshot, f"{cached}/"):
        args = model_args(str(given), None, None)
        assert args == {"model": {"path": str(snapshot)}, "ingress": {"served_model_name": "tiny/pair"}}
    assert main(["plan", str(cached), "--cpus", "8", "--gpus", "0"]) == 0
    (cached / "refs" / "main").unlink()  # of a revision
    assert model_args(str(cached), None, None)["model"] == {"path": str(snapshot)}


def test_a_link_to_a_file_that_is_gone_is_named(cached: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = cached / "snapshots" / "abc" / WEIGHTS
    weights.resolve().unlink()
    assert f"{WEIGHTS} links to a file that is missing; download it again" in refused(capfd, weights.parent)


def test_the_second_copy_in_mistrals_format_is_left_out(copy: Path) -> None:
    (copy / "consolidated.safetensors").write_bytes(b"other names")
    assert checkpoint_files(copy) == [copy / WEIGHTS]


@pytest.mark.parametrize(
    "values", [{"top_p": 2}, {"repetition_penalty": 0}, {"min_p": 1.5}, {"top_k": float("nan")}, {"temperature": 1e9}]
)
def test_recommended_sampling_that_no_request_could_use_is_refused_before_a_start(
    copy: Path, capfd: pytest.CaptureFixture[str], values: dict[str, float]
) -> None:
    (copy / "generation_config.json").write_text(json.dumps(values))
    line = refused(capfd, copy)
    assert "generation_config.json" in line and next(iter(values)) in line and "correct" in line


def test_what_is_no_model_is_refused_by_what_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("bare", "models--a--b/snapshots"):
        (tmp_path / name).mkdir(parents=True)
        assert "is a folder without config.json" in refused(capfd, tmp_path / name.partition("/")[0])
    assert "is no text; give a Serve config file, or a model's folder" in refused(capfd, MODELS / "target" / WEIGHTS)
    assert "no such file or folder; give a model (its folder" in refused(capfd, tmp_path / "gone")
    for line in ([""], ["--model", ""]):
        assert "the model's name is empty" in refused(capfd, *line)
