"""Trainings of a target and of drafts from their arguments to saved folders, and their refusals."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.attention.distribution import install_command
from aerie.deploy import train_draft
from aerie.deploy.cli import main
from aerie.speculative.training import TrainingError, TrainingInterrupted, layers
from aerie.speculative.training.commands import choose_device
from tests.speculative.training.conftest import run, train_small
from tests.support.targets import llama
from tests.support.targets.__main__ import main as train_target

SMALL = "--layers 7 --hidden-size 32 --heads 4 --kv-heads 2 --intermediate-size 48 --vocab-size 300 --max-positions 128"


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_target_then_its_draft_are_trained_and_measured(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str], umask: None
) -> None:
    """Also: whoever the umask lets can read what is saved; safetensors' own files are private."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.2"
    assert train_small(f"llama {common} --output {target} --steps 3 {SMALL} --preview Hello") == 0
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "validation_loss" in capsys.readouterr().out
    made = f"--regenerate --max-new-tokens 9 --draft-vocab 64 --ttt-length 3 --max-length 128 --measure {rows}"
    assert run(f"train-draft {common} --target {target} --output {draft} --steps 3 {made}") == 0
    said = capsys.readouterr().out
    assert "greedy chain of 3: acceptance_length" in said and "depth_3" in said
    saved = ["checkpoint-3", "config.json", "model.safetensors", "regenerated.jsonl"]
    assert sorted(path.name for path in draft.iterdir()) == saved
    files = [path for folder in (target, draft) for path in folder.iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_a_training_is_not_overwritten(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-3" / "trainer_state.json").touch()
    with pytest.raises(TrainingError, match=r"holds a training's checkpoint; add --resume"):
        train_small(f"llama --data {rows} --output {tmp_path}/out")


def test_resume_without_a_whole_checkpoint_is_refused(tmp_path: Path, rows: Path) -> None:
    """A process that is killed while it saves leaves a folder without the state, which is written last."""
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"out holds no checkpoint; start without --resume"):
        train_small(f"llama --data {rows} --output {tmp_path}/out --resume")


def test_a_target_folder_without_a_model_is_refused(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config.json; give the folder of a Hugging Face model"):
        run(f"train-draft --target {tmp_path} --data {rows} --output {tmp_path}/out")


def test_heads_that_do_not_fit_are_refused(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(TrainingError, match="heads=5: must divide hidden_size=512"):
        train_small(f"llama --data {rows} --output {tmp_path}/out --heads 5")


def test_training_without_accelerate_says_what_to_install(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_draft, "find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=re.escape(f"which is not installed: {install_command('train')}")):
        run(f"train-draft --target {tmp_path} --data {rows} --output {tmp_path}/out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device=cuda: no such CUDA device here; use --device cpu"):
        choose_device("cuda")


def test_a_finished_training_goes_on_with_more_steps(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that both have are computed once, and what is saved is what the longer training made."""
    out = tmp_path / "target"
    train = f"llama --data {rows} --batch-tokens 512 --val-fraction 0 --output {out} {SMALL}"
    assert train_small(f"{train} --steps 3") == 0
    first = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    weights = (out / "model.safetensors").read_bytes()
    assert train_small(f"{train} --steps 5 --resume") == 0
    second = json.loads((out / "checkpoint-5" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in second] == [1, 3, 5] and second[: len(first)] == first
    assert (out / "model.safetensors").read_bytes() != weights
    with pytest.raises(TrainingError, match=r"steps=4: the training in .*target has done 5; give more --steps"):
        train_small(f"{train} --steps 4 --resume")
    with pytest.raises(
        TrainingError, match=r"lr=0.2: the checkpoint .*checkpoint-5 was made with 0.001; give the same"
    ):
        train_small(f"{train} --steps 5 --resume --lr 0.2")
    assert train_small(f"{train} --steps 5 --resume --no-keep-checkpoint") == 0
    assert not list(out.glob("checkpoint-*"))


def test_ctrl_c_keeps_what_is_trained_and_a_resume_equals_an_unbroken_run(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a target with dropout, and for a draft; to the last bit."""
    common = f"--steps 5 --data {rows} --val-fraction 0.1 --device cpu --warmup-steps 1 --output"
    made = f"llama --batch-tokens 512 {SMALL} {common}".split()
    target, whole = tmp_path / "target", tmp_path / "whole target"
    kept = "{0}: stopped after step 3 of 5; {1}/checkpoint-3 is its checkpoint: repeat the command with --resume to "
    kept += "continue"
    with monkeypatch.context() as patched, pytest.raises(TrainingInterrupted) as ended:
        patched.setattr(llama, "target_loss", _interrupting(llama.target_loss, call=3))
        train_target([*made, str(target)])
    assert str(ended.value) == kept.format("target", target)
    assert train_target([*made, str(target), "--resume"]) == train_target([*made, str(whole)]) == 0
    assert (target / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

    small = "--draft-vocab 64 --ttt-length 2 --measure-rows 1 --max-new-tokens 2 --max-length 128"
    made = f"train-draft --target {target} {small} {common}".split()
    head, whole = tmp_path / "draft", tmp_path / "whole draft"
    with monkeypatch.context() as patched:
        patched.setattr(layers, "draft_loss", _interrupting(layers.draft_loss, call=3))
        capfd.readouterr()
        assert main([*made, str(head)]) == 130
    said = capfd.readouterr().err
    assert said.splitlines()[-1] == kept.format("draft", head) and "loss=" in said and "Traceback" not in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main([*made, str(head), "--resume"]) == main([*made, str(whole)]) == 0
    assert (head / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def _interrupting(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, with a Ctrl-C within its call of that number."""
    calls = itertools.count(1)

    def interrupting(*arguments: Any, **others: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments, **others)

    return interrupting


@pytest.mark.slow
def test_two_processes_train_one_draft(tmp_path: Path, rows: Path) -> None:
    """Under torchrun, with half of the batches each; the first regenerates and saves."""
    common = f"--data {rows} --steps 3 --batch-tokens 512 --val-fraction 0"
    assert train_small(f"llama {common} --output {tmp_path}/target {SMALL}") == 0
    text = "--regenerate --max-new-tokens 5 --draft-vocab 64 --max-length 128 --ttt-length 2"
    train = f"train-draft {common} --target {tmp_path}/target --output {tmp_path}/draft {text}"
    started = "torch.distributed.run --nproc-per-node 2 -m aerie.deploy.cli"
    line = [sys.executable, "-m", *f"{started} {train} --device cpu".split()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved to") == 1
    saved = tmp_path / "draft" / "checkpoint-3"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 3
    assert {path.name for path in saved.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    with pytest.raises(TrainingError, match=r"processes=1: the checkpoint .* was made with 2; give the same"):
        run(f"{train} --resume")
