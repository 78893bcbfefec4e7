"""`aerie plan MODEL` and `serve MODEL`: the file that options amount to, and models by their names on the hub."""

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ConfigError
from deploy import model_config
from deploy.cli import main

MODELS = Path(__file__).resolve().parents[2] / "deploy" / "models"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")


def test_a_model_and_options_amount_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "my.yaml"
    options = [
        "--draft",
        DRAFT,
        "--tensor-parallel",
        "2",
        "--set",
        "cache.memory_gb=0.5",
        "--set",
        "deterministic=true",
    ]
    assert main(["plan", TARGET, *options, "--save", str(saved), "--cpus", "8", "--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(saved.read_text()) and "1 x 2 ranks on cpu" in printed
    (application,) = yaml.safe_load(saved.read_text())["applications"]
    assert application["args"] == {
        "model": {"path": TARGET},
        "ingress": {"served_model_name": "target"},
        "speculative": {"method": "eagle3", "path": DRAFT},
        "parallel": {"tensor_parallel": 2},
        "cache": {"memory_gb": 0.5},
        "deterministic": True,
    }
    assert main(["plan", str(saved), "--cpus", "8", "--gpus", "0"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TARGET, "--set", "cache.memory_gb"], "must be KEY=VALUE"),
        ([TARGET, "--set", "cache.memory=1"], "cache.memory: unknown key; did you mean cache.memory_gb?"),
        ([TARGET, "--set", "model.path.x=1"], "path is no section"),
        (["eagle", "--draft", DRAFT], "--draft: only beside a model"),
        (["nothing.yaml"], "nothing.yaml: no such file"),
    ],
)
def test_errors_name_the_option_and_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--nodes", "0"]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub on the loopback with one repository, "tiny/pair", the embedded target's small files; gives the paths that
    were asked for."""
    asked: list[str] = []
    files = {name: (MODELS / "target" / name).read_bytes() for name in ("config.json", "tokenizer_config.json")}

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            name = self.path.rpartition("/")[2]
            if self.path.startswith("/api/models/tiny/pair/tree/"):
                entries = [
                    {"type": "file", "path": each, "size": len(content), "oid": "0" * 40}
                    for each, content in [*files.items(), ("weights.bin", b"")]
                ]
                body = json.dumps(entries).encode()
            elif self.path.startswith("/api/models/tiny/pair"):
                siblings = [{"rfilename": each} for each in [*files, "weights.bin"]]
                body = json.dumps({"id": "tiny/pair", "sha": "0" * 40, "siblings": siblings}).encode()
            elif self.path.startswith("/tiny/pair/resolve/") and name in files:
                body = files[name]
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", f'"{name}"')
            self.send_header("x-repo-commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    import huggingface_hub.constants as constants

    endpoint = f"http://127.0.0.1:{server.server_port}"
    download = model_config.snapshot_download
    monkeypatch.setattr(
        model_config,
        "snapshot_download",
        lambda name, **options: download(name, endpoint=endpoint, cache_dir=tmp_path / "hub", **options),
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_name_is_downloaded_once_without_what_no_checkpoint_needs(hub: list[str]) -> None:
    folder = model_config.model_folder("tiny/pair", None)
    assert json.loads((folder / "config.json").read_text())["vocab_size"]
    assert not any("weights.bin" in path for path in hub)
    hub.clear()
    assert model_config.model_folder("tiny/pair", None) == folder
    assert not any(path.startswith("/tiny/pair/resolve") and "config.json" in path for path in hub[2:])


def test_what_is_missing_is_said_with_where_a_folder_goes(hub: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"tiny/other: cannot be downloaded .*give a folder that holds config.json"):
        model_config.model_folder("tiny/other", None)
    with pytest.raises(ConfigError, match="no such folder, and no name on the hub"):
        model_config.model_folder("a/b/c", None)


def test_heads_are_told_apart(tmp_path: Path) -> None:
    shutil.copy(MODELS / "draft" / "config.json", tmp_path / "config.json")
    assert model_config._head_method(tmp_path) == "eagle3"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert model_config._head_method(tmp_path) == "eagle"
