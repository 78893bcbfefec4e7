"""Models by their names on a hub, which is one of our own on the loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from aerie.cluster.config import ConfigError
from aerie.deploy.config import hub as hub_module
from aerie.deploy.config.files import starting_point
from aerie.deploy.config.hub import is_hub_name, missing_files, model_folder, with_downloads
from tests.deploy.config.fake_hub import COMMIT, REVISION, FakeHub, checkpoint, running_hub
from tests.support import MODELS, ROOT

SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w", "weights.bin": b"x"}
SMALL |= {"original/model.safetensors": b"again", "consolidated.safetensors": b"again"}
PARTS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """With "tiny/pair", "tiny/gated", and "tiny/torso", which has not all of its weights."""
    torso = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(PARTS).encode()}
    repositories = {"tiny/pair": SMALL, "tiny/gated": SMALL, "tiny/torso": torso | {"model-1.safetensors": b"w"}}
    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    hub_module._downloaded.cache_clear()
    with running_hub(FakeHub(repositories, frozenset({"tiny/gated"}))) as running:

        def from_here(name: str, **options: Any) -> str:
            return download(name, endpoint=running.url, cache_dir=tmp_path / "hub", **options)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", from_here)
        yield running
    hub_module._downloaded.cache_clear()


def test_a_name_is_downloaded_once_without_what_no_checkpoint_needs(hub: FakeHub) -> None:
    folder = model_folder("tiny/pair", None)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    hub_module._downloaded.cache_clear()  # another process
    hub.asked.clear()
    assert model_folder("tiny/pair", None) == folder
    assert not any(path.startswith("/tiny/pair/resolve") for path in hub.asked)


def test_what_was_downloaded_serves_while_the_hub_is_down(hub: FakeHub) -> None:
    folder = model_folder("tiny/pair", None)
    hub_module._downloaded.cache_clear()
    hub.is_down = True
    assert model_folder("tiny/pair", None) == folder


@pytest.mark.parametrize(("given", "revision"), [(f"tiny/pair@{REVISION}", None), ("tiny/pair", REVISION)])
def test_the_revision_is_asked_for(given: str, revision: str | None, hub: FakeHub) -> None:
    assert model_folder(given, revision).name == COMMIT
    assert hub.asked[0] == f"/api/models/tiny/pair/revision/{REVISION}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tiny/other", r"tiny/other: no such folder, and .* has no such model: check the name; .*`hf auth login`"),
        ("tiny/pair@v9", r"tiny/pair@v9: .* has no revision v9 of it"),
        ("tiny/gated", r"tiny/gated: .* does not give it to this user: accept its terms .*HF_TOKEN"),
        ("tiny/torso", r"tiny/torso: .* has no model-2.safetensors; a download that broke off goes on"),
        ("a/b/c", "no such folder, and no name on the hub"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(given: str, message: str, hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=message):
        model_folder(given, None)


def test_without_a_hub_the_error_says_where_a_folder_goes(hub: FakeHub, tmp_path: Path) -> None:
    hub.is_down = True
    args = {"model": {"path": "tiny/pair"}}
    with pytest.raises(ConfigError) as error:
        with_downloads(args, tmp_path)
    text = str(error.value)
    assert text.startswith("model.path=tiny/pair: cannot be downloaded from ") and "503" in text
    assert "has no copy; without a network put config.json, the tokenizer's files and *.safetensors into a fold" in text
    assert text.endswith(f"a relative path would start at {tmp_path}")


def test_names_in_a_file_become_folders_and_the_served_name(hub: FakeHub, tmp_path: Path) -> None:
    args = {"model": {"path": f"tiny/pair@{REVISION}", "seed": 3}, "speculative": {"path": "tiny/pair"}}
    found = with_downloads(args, tmp_path)
    folder = found["speculative"]["path"]
    assert Path(folder).name == COMMIT and found["model"] == {"path": folder, "seed": 3}
    assert found["ingress"] == {"served_model_name": "tiny/pair"}
    assert args["model"]["path"] == f"tiny/pair@{REVISION}"
    assert (
        with_downloads(args | {"ingress": {"served_model_name": "x"}}, tmp_path)["ingress"]["served_model_name"] == "x"
    )


@pytest.mark.parametrize(
    ("path", "is_name"),
    [
        ("owner/name", True),
        ("owner/name@main", True),
        ("models/name", False),  # where packaged configurations keep theirs
        ("here/name", False),
        ("./owner/name", False),
        ("../name", False),
        ("~/name", False),
        ("/owner/name", False),
        ("a/b/c", False),
        ("name", False),
        ("owner/", False),
    ],
)
def test_folders_are_not_taken_for_names(path: str, is_name: bool, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert is_hub_name(path, tmp_path) == is_name


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert missing_files(tmp_path) == ["config.json", "*.safetensors"]
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert missing_files(tmp_path) == []
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(PARTS))
    assert missing_files(tmp_path) == ["model-1.safetensors", "model-2.safetensors"]


def test_a_gated_name_is_downloaded_with_the_token_of_the_environment(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (Path(model_folder("tiny/gated", None)) / "config.json").exists()


@pytest.mark.slow  # names in a file, and the token of a gated one: above
def test_a_file_that_names_models_is_planned_with_the_hubs_token(tmp_path: Path) -> None:
    """The command as a user runs it: a mirror, a cache and a token of the environment, a gated repository."""
    content = yaml.safe_load(starting_point("eagle"))
    args = content["applications"][0]["args"]
    args["model"]["path"], args["speculative"]["path"] = "tiny/target", "tiny/dspark"
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content))
    repositories = {f"tiny/{name}": checkpoint(MODELS / name) for name in ("target", "dspark")}
    with running_hub(FakeHub(repositories, frozenset({"tiny/target"}))) as running:
        variables = os.environ | {
            "HF_ENDPOINT": running.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": running.token,
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "aerie.deploy.cli", "plan", "my.yaml", "--cpus", "4", "--gpus", "0"]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"target      {tmp_path}/home/hub/models--tiny--target/snapshots/{COMMIT}" in done.stdout
    assert "dspark, tree of top 4 from one block, depth 8" in done.stdout
