"""Mixes of attention backends that cannot work are refused by `aerie plan`, with the reason and those that can; what
only a GPU's generation decides is refused where that is known."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.attention.config import BACKEND_NAMES, DraftAttention, TargetAttention
from aerie.cluster.config import ConfigError, parse
from aerie.deploy.checks import check_checkpoints, check_device
from aerie.deploy.cli import main
from aerie.deploy.nodes import LocalGpus
from tests.support import MODELS
from tests.support.tiny_models import make_target

Section = Mapping[str, Any]
HEADS = {"path": str(MODELS / "target")}
DRAFT = {"method": "eagle3", "path": str(MODELS / "draft")}


@pytest.fixture
def plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    def run(gpus: int = 8, **sections: Section) -> str:
        args = {"model": HEADS, "speculative": DRAFT} | sections
        path = tmp_path / "serve.yaml"
        path.write_text(yaml.safe_dump({"applications": [{"import_path": "aerie.deploy.app:build", "args": args}]}))
        capfd.readouterr()
        code = main(["plan", str(path), "--cpus", "8", "--gpus", str(gpus)])
        refused = capfd.readouterr().err
        assert (code == 2) == bool(refused), refused
        return refused

    return run


def test_what_no_model_and_no_device_can_have(plan: Any) -> None:
    for gpus in (0, 8):
        line = plan(gpus, draft_attention={"prefill": "trtllm"})
        assert line == (
            "draft_attention.prefill=trtllm: trtllm attends to rounds only; choose one of auto, torch, triton, "
            "flashinfer\n"
        )
        line = plan(gpus, draft_attention={"extend": "fa9"})
        assert line.startswith("draft_attention.extend=fa9: there is no such backend; choose one of auto, torch")
    assert plan(attention={"prefill": "trtllm"}).startswith("attention.prefill=trtllm: ")


def test_what_the_device_cannot(plan: Any) -> None:
    for name in set(BACKEND_NAMES) - {"torch"}:
        line = plan(0, attention={"decode": name})
        assert line.startswith(f"attention.decode={name}: {name} cannot serve decode: device=cpu: it needs a GPU"), line
    assert plan(8, attention={"decode": "triton"}) == ""


def test_what_the_draft_method_and_the_shapes_cannot(plan: Any) -> None:
    tree = DRAFT | {"num_steps": 3, "top_k": 4, "num_draft_tokens": 8}
    line = plan(8, speculative=tree, draft_attention={"decode": "trtllm"})
    assert line.startswith("draft_attention.decode=trtllm: trtllm cannot serve draft_decode: a tree's draft rows"), line
    line = plan(8, attention={"decode": "trtllm"}, cache={"page_size": 8})
    assert "attention.decode=trtllm: trtllm cannot serve decode: page_size=8: must be one of 16, 32, 64" in line
    line = plan(8, speculative=DRAFT | {"window": 256}, draft_attention={"extend": "flashinfer"})
    assert "draft_attention.extend=flashinfer: " in line and "speculative.window=256" in line
    line = plan(8, model=HEADS | {"dtype": "float32"}, attention={"prefill": "flashinfer"})
    assert "dtype=float32: must be bfloat16 or float16" in line


def test_deterministic_is_refused_where_it_cannot_be_kept(plan: Any) -> None:
    line = plan(8, deterministic=True, attention={"decode": "flashinfer"})
    assert line.startswith("deterministic=true: not possible with attention.decode=flashinfer"), line


@pytest.mark.parametrize("capability,works", [((8, 0), False), ((9, 0), True), ((10, 0), False), (None, True)])
def test_a_known_generation_decides(
    capability: tuple[int, int] | None, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree is verified by trtllm on Hopper alone of these; of an unknown GPU the start decides."""
    monkeypatch.setattr("aerie.attention.registry.is_installed", lambda package: True)
    speculative = DRAFT | {"num_steps": 3, "top_k": 4, "num_draft_tokens": 8}
    args = {"model": HEADS, "speculative": speculative, "attention": {"decode": "trtllm"}}
    config = parse(args, MODELS)
    check_checkpoints(config)
    if works:
        check_device(config, "cuda", capability, here=True)
    else:
        with pytest.raises(ConfigError, match=r"attention.decode=trtllm: trtllm cannot serve"):
            check_device(config, "cuda", capability, here=True)


def test_experts_that_no_gpu_multiplies_are_refused(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "moe", architecture="Qwen3Moe")
    from aerie.workers.config import ModelSource

    config = parse({"model": {"path": str(folder), "dtype": "float16"}}, tmp_path)
    with pytest.raises(ConfigError, match="experts on a GPU are multiplied in bfloat16, not in float16"):
        check_device(config, "cuda")
    config = config.model_copy(update={"model": dataclasses.replace(config.model, dtype="bfloat16")})
    assert isinstance(config.model, ModelSource)
    check_device(config, "cuda")
    with pytest.raises(ConfigError, match=r"experts need a GPU of compute capability 9.x or 10.x, this one has 8.0"):
        check_device(config, "cuda", (8, 0))


def test_a_mix_that_is_allowed_is_planned(plan: Any) -> None:
    for decode in ("auto", "triton", "flashinfer", "torch"):
        assert plan(8, attention={"decode": decode}, draft_attention={"extend": decode, "decode": decode}) == "", decode


def test_names_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValueError, match=r"^extend=fa9: there is no such backend"):
        DraftAttention(extend="fa9")
    with pytest.raises(ValueError, match=r"^prefill=trtllm: trtllm attends to rounds only"):
        TargetAttention(prefill="trtllm")


def test_gpus_are_counted_with_their_generation() -> None:
    assert LocalGpus.listed("9.0\n9.0\n") == LocalGpus(2, (9, 0))
    assert LocalGpus.listed("9.0\n10.0\n") == LocalGpus(2, None)
    assert LocalGpus.listed("") == LocalGpus(0, None) == LocalGpus.listed("NVIDIA-SMI has failed\n")
