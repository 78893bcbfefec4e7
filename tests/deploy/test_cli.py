"""The command line: quick help, errors on one line, a plan that starts nothing."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file

from aerie.deploy.cli import main
from aerie.deploy.config.files import packaged_names, starting_point
from aerie.workers.distributed.ports import free_port
from tests.support import MODELS, ROOT
from tests.support.embedded import read_config_file


def _config(tmp_path: Path, **changes: Any) -> Path:
    content = read_config_file(ROOT / "deploy" / "eagle.yaml")
    content["applications"][0]["args"] |= changes
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_reading_a_command_line_leaves_nothing(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("aerie.deploy.checks.print_plan", lambda *_: 0)
    monkeypatch.setattr("aerie.deploy.serve.launch.serve", lambda *_, **__: 0)
    assert main([command, str(MODELS / "target")]) == 0
    assert not list(tmp_path.iterdir())


def test_help_does_not_import_torch_or_ray() -> None:
    script = (
        "import sys; from aerie.deploy.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'ray', 'transformers', 'httpx', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    for command in (
        "serve",
        "plan",
        "doctor",
        "config",
        "chat",
        "bench",
        "train-draft",
        "token-map",
        "tekken",
        "quantize",
    ):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("eagle", "dspark, tree of top 4 from one block, depth 8, 16 nodes verified"),
        ("eagle3", "eagle3, chain, depth 3, 4 nodes verified"),
    ],
)
def test_plan_prints_ranks_draft_and_cluster(name: str, draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name, "--cpus", "8", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 x 2 ranks on cuda" in text and draft in text
    assert "1 node with 8 CPU and 2 GPU" in text


def test_plan_says_what_chats_can_do_and_refuses_a_parser_without_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "eagle", "--cpus", "8", "--gpus", "0"]) == 0
    lines = capsys.readouterr().out
    assert "chats       parser text; tools refused; reasoning_effort has no effect\n" in lines
    assert "chats       tools are refused: no parser reads the calls of this chat template\n" in lines
    shutil.copytree(MODELS / "target", tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    model = {"path": str(tmp_path / "plain")}
    refused = _config(tmp_path, ingress={"output_parser": "hermes"}, model=model)
    assert main(["plan", str(refused), "--cpus", "8", "--gpus", "0"]) == 2
    assert "ingress.output_parser=hermes: reads tool calls, but the chat template does not" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["eagle"], ["eagle.yaml"]], ids=["name", "file name"])
def test_packaged_configuration_is_found_from_any_folder(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments, "--cpus", "8", "--gpus", "0"]) == 0
    assert f"target      {ROOT}/deploy/models/target\n" in capsys.readouterr().out


def test_file_of_this_folder_goes_before_a_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _config(tmp_path, parallel={"tensor_parallel": 3}).rename(tmp_path / "eagle.yaml")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "eagle.yaml", "--cpus", "8", "--gpus", "0"]) == 2
    assert "tensor_parallel=3" in capsys.readouterr().err
    assert main(["plan", "eagle", "--cpus", "8", "--gpus", "0"]) == 0


@pytest.mark.parametrize("name", ["egle", "here/eagle.yaml"])
def test_file_that_is_not_there_is_refused_with_the_names_that_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", name]) == 2
    assert (
        f"{name}: no such file or folder; give a model (its folder, or OWNER/NAME), a Serve config"
        in capsys.readouterr().err
    )
    assert main(["config", name]) == 2
    assert f"{name}: no packaged configuration; there are deepseek-v3, eagle" in capsys.readouterr().err


def test_paths_start_at_the_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").symlink_to(MODELS)
    shutil.copy(ROOT / "deploy" / "eagle.yaml", tmp_path)
    assert main(["plan", str(tmp_path / "eagle.yaml"), "--cpus", "8", "--gpus", "0"]) == 0
    assert f"target      {tmp_path}/models/target" in capsys.readouterr().out


def test_plan_says_what_is_left_to_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "eagle", "--cpus", "8", "--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    assert "KV cache    0.1 of the free memory that is left, at most 1 GB per rank, 16 tokens per page" in printed
    assert "slots       8 to 32 (auto), 0.05 MB each per rank" in printed
    assert main(["plan", "eagle", "--cpus", "8", "--gpus", "2"]) == 0
    printed = capsys.readouterr().out
    assert "KV cache    what is left of 0.9 of each GPU's free memory, 16 tokens per page" in printed
    assert "scheduler   8 to 256 (auto) running" in printed


@pytest.mark.parametrize("name", packaged_names())
def test_printed_configuration_is_the_packaged_one_with_its_models_located(name: str) -> None:
    path = ROOT / "deploy" / f"{name}.yaml"
    printed = yaml.safe_load(starting_point(name))
    if name in ("eagle", "eagle3"):
        assert printed == read_config_file(path)
        assert starting_point(name).count("\n# ") == path.read_text().count("\n# ")
    else:  # its checkpoints are to be downloaded beside the copy
        assert printed == yaml.safe_load(path.read_text())


def test_plan_refuses_what_cannot_be_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _config(tmp_path, parallel={"tensor_parallel": 2, "replicas": 3})
    assert main(["plan", str(path), "--cpus", "2", "--gpus", "0"]) == 2
    assert "parallel.replicas=3: only 1 fit" in capsys.readouterr().err


def test_plan_refuses_a_degree_that_does_not_divide_the_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _config(tmp_path, parallel={"tensor_parallel": 3})
    assert main(["plan", str(path), "--cpus", "8", "--gpus", "0"]) == 2
    assert "tensor_parallel=3" in capsys.readouterr().err


def test_draft_of_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(MODELS / "draft", draft)
    config = (draft / "config.json").read_text()
    (draft / "config.json").write_text(config.replace('hidden_size": 512', 'hidden_size": 1024'))
    path = _config(tmp_path, speculative={"method": "eagle3", "path": str(draft)})
    assert main(["plan", str(path), "--cpus", "8", "--gpus", "0"]) == 2
    error = capsys.readouterr().err
    assert str(draft) in error and "made for a target of hidden_size=1024" in error and "hidden_size=512" in error


def test_unknown_key_stops_serve_before_ray_starts(tmp_path: Path) -> None:
    path, folder = _config(tmp_path, speculatve={}), tmp_path / "ray"
    done = subprocess.run(
        [sys.executable, "-m", "aerie.deploy.cli", "serve", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"RAY_TMPDIR": str(folder)},
        check=False,
    )
    assert done.returncode == 2 and "speculatve: unknown key; did you mean speculative?" in done.stderr
    assert not folder.exists()


@pytest.mark.ray
def test_checkpoints_that_do_not_fit_stop_serve_and_the_ray_that_it_started(tmp_path: Path) -> None:
    path = _config(tmp_path, parallel={"tensor_parallel": 3})  # does not divide the target's heads
    folder = tempfile.mkdtemp(prefix="ae", dir="/tmp")
    done = subprocess.run(
        [sys.executable, "-m", "aerie.deploy.cli", "serve", str(path), "--port", str(free_port())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"},
        check=False,
    )
    assert done.returncode == 2 and "tensor_parallel=3: " in done.stderr, done.stderr
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in left if folder in " ".join(command or [])]
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow  # the tensor: `test_finite`; refused starts: `tests.cluster.replica.test_refused_starts`
def test_weights_that_only_a_rank_can_refuse_end_the_first_start(tmp_path: Path) -> None:
    """NaN is found while weights are loaded: the command ends with the tensor's name, and no second start is tried."""
    model = Path(shutil.copytree(MODELS / "target", tmp_path / "target"))
    tensors = load_file(str(model / "model.safetensors"))
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, str(model / "model.safetensors"))
    path = _config(tmp_path, model={"path": str(model)}, parallel={"tensor_parallel": 1})
    folder = tempfile.mkdtemp(prefix="ae", dir="/tmp")
    done = subprocess.run(
        [sys.executable, "-m", "aerie.deploy.cli", "serve", str(path), "--port", str(free_port())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"},
        check=False,
        timeout=120,
    )
    shutil.rmtree(folder, ignore_errors=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("the engine could not start: rank 0"), done.stderr
    assert last.endswith(f"weights are NaN or infinite: {name} (model.safetensors); download the checkpoint again")
    assert (done.stdout + done.stderr).count("device opened") == 1


def test_taken_port_stops_serve_before_ray_starts(tmp_path: Path) -> None:
    path = _config(tmp_path)
    content = yaml.safe_load(path.read_text())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        content["http_options"]["port"] = taken.getsockname()[1]
        path.write_text(yaml.safe_dump(content))
        done = subprocess.run(
            [sys.executable, "-m", "aerie.deploy.cli", "serve", str(path)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2 and "is in use" in done.stderr


def test_doctor_prints_one_line_per_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(_config(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines), lines
    assert main(["doctor", str(_config(tmp_path, cache={"page_size": 24}))]) == 1
    assert "FAIL  configuration: cache.page_size=24" in capsys.readouterr().out
    assert main(["doctor", str(_config(tmp_path, attention={"decode": "trtllm"}))]) == 1
    assert "FAIL  configuration: attention.decode=trtllm: trtllm cannot serve decode: " in capsys.readouterr().out
