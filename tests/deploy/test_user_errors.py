"""`aerie train-draft` and `eval-draft`: what the user can put right is one line on stderr that says
how, and exit status 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from aerie.deploy.cli import main
from aerie.speculative.training.samples import LENGTH_STEP
from tests.support import MODELS

ROW = {"question": "What is 1 plus 1?", "answer": "2"}
TRAIN = ("train-draft", "--target", MODELS / "target", "--device", "cpu")
SMALL = ("--draft-vocab=300", "--intermediate-size=48", "--ttt-length=1", "--batch-tokens=64", "--val-fraction=0")

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """The line that a command is refused with. Above it there may be a bar of what was loaded until then."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        said = capfd.readouterr().err.splitlines()
        lines = [line for line in said if line and not line.startswith("Loading weights")]
        assert len(lines) == 1, lines
        return lines[0]

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW | {"question": f"What is {n} plus 1?"}) for n in range(9)))
    return path


def _config(folder: Path, **changes: object) -> Path:
    """The embedded pair's configuration, in another folder and with one rank."""
    content = yaml.safe_load((MODELS.parent / "eagle.yaml").read_text())
    args = content["applications"][0]["args"]
    args["model"]["path"] = str(MODELS / "target")
    args["speculative"]["path"] = str(MODELS / "dspark")
    args["parallel"]["tensor_parallel"] = 1
    for section, values in changes.items():
        args[section] = args.get(section, {}) | values
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no such file or folder; give a .json or .jsonl file"),
        (b'{"question": "q", "answer": "a"}\n{"question": "q", "answ', ":2: not valid JSON"),
        (b'{"text": "only this"}', ":1: keys ['text'] fit no known format; use one of"),
        (b'["a list"]', ":1: a row must be a JSON object"),
        (b'{"question": "\xff", "answer": "a"}', "not UTF-8"),
        (b"", "holds no rows"),
    ],
    ids=["missing", "cut off", "unknown form", "list", "not text", "empty"],
)
def test_data_that_cannot_be_read(refused: Refused, tmp_path: Path, content: bytes | None, text: str) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_bytes(content)
    for command in (
        [*TRAIN, "--output", tmp_path / "out", "--data", data],
        ["eval-draft", _config(tmp_path), "--prompts", data],
    ):
        line = refused(*command)
        assert text in line and str(data) in line, line


def test_target_that_is_no_model(refused: Refused, tmp_path: Path, rows: Path) -> None:
    def train(target: Path) -> str:
        return refused("train-draft", "--target", target, "--output", tmp_path / "out", "--data", rows)

    assert "no config.json; give the folder of a Hugging Face model" in train(tmp_path / "absent")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(MODELS / "target" / "config.json", bare)
    assert f"target={bare}: cannot be loaded" in train(bare)
    (bare / "config.json").write_text("{")
    assert f"target={bare}: cannot be loaded" in train(bare)


def test_target_whose_weights_are_another_models(refused: Refused, tmp_path: Path, rows: Path) -> None:
    """transformers fills what is missing with random numbers, and a draft would be trained for those."""
    mixed = tmp_path / "mixed"
    shutil.copytree(MODELS / "target", mixed)
    shutil.copy(MODELS / "draft" / "model.safetensors", mixed)
    line = refused("train-draft", "--target", mixed, "--output", tmp_path / "out", "--data", rows)
    assert "its weights lack" in line and "download it again" in line


def test_checkpoint_to_resume_that_is_absent_or_damaged(
    refused: Refused, capfd: pytest.CaptureFixture[str], tmp_path: Path, rows: Path
) -> None:
    train = [*TRAIN, "--output", tmp_path / "out", "--data", rows, *SMALL, "--steps", 1]
    assert "holds no checkpoint; start without --resume" in refused(*train, "--resume")
    assert main(list(map(str, train))) == 0
    capfd.readouterr()
    assert "holds a training's checkpoint; add --resume" in refused(*train)
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
        path = tmp_path / "out" / "checkpoint-1" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert main([*map(str, train), "--resume", "--steps", "2"]) == 2
        *_, line = capfd.readouterr().err.splitlines()  # after the progress bar
        assert line.startswith(f"resume: {path.parent} cannot be read")
        path.write_bytes(whole)


def test_output_that_is_a_file(refused: Refused, tmp_path: Path, rows: Path) -> None:
    (tmp_path / "out").touch()
    train = [*TRAIN, "--output", tmp_path / "out", "--data", rows, *SMALL, "--steps", 1]
    assert f"{tmp_path}/out" in refused(*train)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--steps 0", "argument --steps: 0: must be at least 1"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--epochs 0", "argument --epochs: 0: must be above 0"),
        ("--checkpoint-every 0", "argument --checkpoint-every: 0: must be at least 1"),
        ("--lr nan", "argument --lr: nan: must be above 0"),
        ("--val-fraction 1", "argument --val-fraction: 1: must be at least 0 and under 1"),
        ("--batch-tokens 63", f"argument --batch-tokens: 63: must be at least {LENGTH_STEP}"),
    ],
)
def test_number_out_of_range(capfd: pytest.CaptureFixture[str], tmp_path: Path, flags: str, text: str) -> None:
    """The parser says so, before anything is imported or read."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, TRAIN), "--output", str(tmp_path / "out"), "--data", "absent", *flags.split()])
    assert ended.value.code == 2 and text in capfd.readouterr().err.splitlines()[-1]


def test_device_that_does_not_exist(refused: Refused, tmp_path: Path, rows: Path) -> None:
    assert "device=tpu9: " in refused(*TRAIN[:3], "--output", tmp_path, "--data", rows, "--device", "tpu9")


def test_loss_that_is_not_finite(capfd: pytest.CaptureFixture[str], tmp_path: Path, rows: Path) -> None:
    train = [*TRAIN, "--output", tmp_path / "out", "--data", rows, *SMALL, "--steps", 20]
    torch.set_num_threads(1)
    assert main([*map(str, train), "--lr", "1e30", "--warmup-steps", "0"]) == 2
    *_, line = capfd.readouterr().err.splitlines()  # after the progress bar
    assert line.startswith("loss: not finite near step") and "lower --lr" in line
    assert not list((tmp_path / "out").glob("checkpoint-*")), "a checkpoint that no resume can use"


def test_evaluation_of_what_is_not_there(refused: Refused, tmp_path: Path, rows: Path) -> None:
    assert "no such file" in refused("eval-draft", tmp_path / "absent.yaml", "--prompts", rows)
    path = _config(tmp_path, speculative={"path": str(tmp_path / "absent")})
    assert f"{tmp_path}/absent has no config.json" in refused("eval-draft", path, "--prompts", rows)
    path = _config(tmp_path, speculative={"path": str(MODELS / "target")})
    said = refused("eval-draft", path, "--prompts", rows)
    assert f"target {MODELS}/target (architecture LlamaForCausalLM) has no module for drafting" in said


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_evaluation_of_a_draft_without_weights(
    refused: Refused, tmp_path: Path, rows: Path, tensor_parallel: int
) -> None:
    """With two ranks it is a child process that finds out."""
    draft = tmp_path / "draft"
    draft.mkdir()
    shutil.copy(MODELS / "dspark" / "config.json", draft)
    parallel = {"tensor_parallel": tensor_parallel}
    path = _config(tmp_path, speculative={"path": str(draft)}, parallel=parallel)
    assert f"path={draft}: has no *.safetensors" in refused("eval-draft", path, "--prompts", rows)


def test_evaluation_with_numbers_out_of_range(capfd: pytest.CaptureFixture[str], tmp_path: Path, rows: Path) -> None:
    for flags in ("--concurrency 0", "--limit 0", "--max-tokens 0", "--temperature -1"):
        with pytest.raises(SystemExit) as left:
            main(["eval-draft", str(_config(tmp_path)), "--prompts", str(rows), *flags.split()])
        assert left.value.code == 2 and "must be at least" in capfd.readouterr().err


def test_prompt_longer_than_the_model(refused: Refused, tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps(ROW | {"question": "seven " * 4000}))
    line = refused("eval-draft", _config(tmp_path), "--prompts", prompts)
    assert "prompt" in line and "2048" in line
