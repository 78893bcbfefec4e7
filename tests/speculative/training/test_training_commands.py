"""Both commands from their arguments to saved folders, and their refusals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.cli import main
from speculative.training import loop
from speculative.training.arguments import choose_device
from speculative.training.errors import TrainingError
from tests.speculative.training.conftest import run

SMALL = "--layers 7 --hidden-size 32 --heads 4 --kv-heads 2 --intermediate-size 48 --vocab-size 300 --max-positions 128"


def test_a_target_then_its_draft_are_trained_and_measured(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.2"
    assert run(f"train-target {common} --output {target} --steps 3 {SMALL} --preview Hello") == 0
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "validation_loss" in capsys.readouterr().out
    made = f"--regenerate --max-new-tokens 9 --draft-vocab 64 --ttt-length 3 --max-length 128 --measure {rows}"
    assert run(f"train-draft {common} --target {target} --output {draft} --steps 3 {made}") == 0
    said = capsys.readouterr().out
    assert "greedy chain of 3: acceptance_length" in said and "depth_3" in said
    saved = ["checkpoint.pt", "config.json", "model.safetensors", "regenerated.jsonl"]
    assert sorted(path.name for path in draft.iterdir()) == saved


def test_a_training_is_not_overwritten(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint.pt").touch()
    with pytest.raises(ValueError, match=r"holds a training's checkpoint; add --resume"):
        run(f"train-target --data {rows} --output {tmp_path}/out")


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.pt does not exist; start without --resume"):
        run(f"train-target --data {rows} --output {tmp_path}/out --resume")


def test_a_target_folder_without_a_model_is_refused(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config.json; give the folder of a Hugging Face model"):
        run(f"train-draft --target {tmp_path} --data {rows} --output {tmp_path}/out")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--batch-tokens 5", "batch_tokens=5: must be at least 64"),
        ("--val-fraction 1", "val_fraction=1.0: must be at least 0 and under 1"),
        ("--heads 5", "heads=5: must divide hidden_size=512"),
    ],
)
def test_a_number_out_of_range_is_refused(tmp_path: Path, rows: Path, flags: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(f"train-target --data {rows} --output {tmp_path}/out {flags}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device=cuda: no CUDA device here; use --device cpu"):
        choose_device("cuda")


def test_a_finished_training_goes_on_with_more_steps(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that both have are computed once, and what is saved is what the longer training made."""
    out = tmp_path / "target"
    train = f"train-target --data {rows} --batch-tokens 512 --val-fraction 0 --output {out} {SMALL}"
    assert run(f"{train} --steps 3") == 0
    first = torch.load(out / "checkpoint.pt", weights_only=True)
    weights = (out / "model.safetensors").read_bytes()
    assert run(f"{train} --steps 5 --resume") == 0
    second = torch.load(out / "checkpoint.pt", weights_only=True)
    assert (first["step"], second["step"]) == (3, 5) and second["losses"][:3] == first["losses"]
    assert (out / "model.safetensors").read_bytes() != weights
    with pytest.raises(TrainingError, match=r"steps=4: the training in .*target has done 5; give more with --steps"):
        run(f"{train} --steps 4 --resume")
    assert run(f"{train} --steps 5 --resume --no-keep-checkpoint") == 0
    assert not (out / "checkpoint.pt").exists()


def test_ctrl_c_keeps_what_is_trained_and_a_resume_equals_an_unbroken_run(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, whole = tmp_path / "target", tmp_path / "draft", tmp_path / "whole"
    assert run(f"train-target --data {rows} --output {target} --steps 1 {SMALL}") == 0
    small = "--steps 5 --draft-vocab 64 --ttt-length 2 --measure-rows 1 --max-new-tokens 2 --max-length 128"
    train = f"train-draft --target {target} --data {rows} {small}"
    assert run(f"{train} --output {whole}") == 0
    rate, seen = loop.learning_rate, set[int]()

    def interrupted(step: int, *others: Any) -> float:
        if step == 2 and step not in seen:  # asked for each group of parameters
            os.kill(os.getpid(), signal.SIGINT)  # within the third step
        seen.add(step)
        return rate(step, *others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "learning_rate", interrupted)
        capfd.readouterr()
        assert main(f"{train} --output {draft}".split()) == 130
    said = capfd.readouterr().err
    kept = f"draft: stopped after step 3 of 5; {draft}/checkpoint.pt keeps it: the same command with --resume goes on"
    assert said.splitlines()[-1] == kept and "loss=" in said and "Traceback" not in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(f"{train} --output {draft} --resume") == 0
    assert (draft / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_saved_models_can_be_read_by_whom_the_umask_lets(tmp_path: Path, rows: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    before = os.umask(0o027)
    try:
        assert run(f"train-target --data {rows} --output {target} --steps 1 {SMALL}") == 0
        small = "--draft-vocab 64 --ttt-length 1 --measure-rows 1 --max-new-tokens 2 --max-length 128"
        assert run(f"train-draft --target {target} --data {rows} --output {draft} --steps 1 {small}") == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for folder in (target, draft) for path in folder.iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o640}, modes
