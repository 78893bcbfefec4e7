"""GGUF files as models of the command line, of files and of `aerie.LLM`; those of a hub are on the loopback."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.config import hub as hub_module
from aerie.deploy.config.files import with_tokenizer
from aerie.deploy.config.hub import model_folder, with_downloads
from aerie.deploy.config.model import model_args, names_model, use_options
from tests.deploy.config.fake_hub import FakeHub, running_hub
from tests.support import MODELS
from tests.support.targets.gguf_files import write_gguf
from tests.support.tiny_models import make_target


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_target(folder / "target", num_hidden_layers=2), folder / "Tiny.Q4_K_M.gguf")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "aerie" / "gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path) -> Iterator[FakeHub]:
    """With "tiny/gguf", which has files of several types, one of them in two cases and one with an image part."""
    content = file.read_bytes()
    names = ("Tiny.Q4_K_M.gguf", "Tiny.Q4_K_S.gguf", "tiny-q8_0.gguf", "tiny-x-q8_0.gguf", "mmproj-Tiny-F16.gguf")
    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    hub_module._downloaded.cache_clear()
    with running_hub(FakeHub({"tiny/gguf": dict.fromkeys(names, content) | {"README.md": b"x"}})) as running:

        def from_here(name: str, **options: Any) -> str:
            return download(name, endpoint=running.url, cache_dir=tmp_path / "hub", **options)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", from_here)
        yield running
    hub_module._downloaded.cache_clear()


def test_a_file_is_a_model_named_after_it(file: Path, cache: Path) -> None:
    assert names_model(str(file)) and names_model("missing.gguf")
    args = model_args(str(file), "suffix", None)
    folder = Path(args["model"]["path"])
    assert folder.is_relative_to(cache) and args["ingress"]["served_model_name"] == folder.name == "Tiny.Q4_K_M"
    assert args["speculative"] == {"method": "suffix"}
    with pytest.raises(ConfigError, match=r"^missing\.gguf: no such file$"):
        model_args("missing.gguf", None, None)


def test_a_config_file_may_name_one_beside_it(file: Path) -> None:
    found = with_downloads({"model": {"path": file.name}}, file.parent)
    assert Path(found["model"]["path"]).name == "Tiny.Q4_K_M" and "ingress" not in found


def test_a_hubs_file_is_chosen_by_its_type(hub: FakeHub) -> None:
    assert names_model("tiny/gguf:q4_k_m")
    args = model_args("tiny/gguf:q4_k_m", None, None)
    assert Path(args["model"]["path"]).name == "Tiny.Q4_K_M"
    assert args["ingress"]["served_model_name"] == "tiny/gguf:q4_k_m"
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert fetched == {"Tiny.Q4_K_M.gguf"}
    assert Path(model_folder("tiny/gguf:tiny-q8_0.gguf", None)).name == "tiny-q8_0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tiny/gguf:Q6_K", "tiny/gguf:Q6_K: its repository has no GGUF file of Q6_K; look up the types on its page"),
        ("tiny/gguf:Q8_0", "several files are of Q8_0; give one of tiny-q8_0.gguf, tiny-x-q8_0.gguf after the colon"),
        ("tiny/gguf:F16", "its repository has no GGUF file of F16"),
        ("tiny/gguf", r"no checkpoint in safetensors \(of GGUF files name one, as in tiny/gguf:Q4_K_M\)"),
    ],
)
def test_what_a_hub_lacks_is_said_with_its_remedy(hub: FakeHub, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_folder(given, None)


def test_another_tokenizer_replaces_the_files_own(file: Path, tmp_path: Path) -> None:
    args = use_options(model_args(str(file), None, None), {"tokenizer": str(MODELS / "target")})
    folder = Path(args["model"]["path"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (MODELS / "target" / name).read_bytes()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match=r"--tokenizer .*: has no tokenizer\.json; give the folder of a model"):
        with_tokenizer(folder, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    with pytest.raises(ConfigError, match=r"full/aerie: cannot be written \(.*\); set XDG_CACHE_HOME"):
        model_folder(str(shutil.copy(file, tmp_path / "own.gguf")), None)
