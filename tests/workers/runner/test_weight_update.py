"""Models of all families loaded again in place: they hold what a model loaded from the new checkpoint holds, at the
addresses that they had."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.models.loading import allocate_target, load_target, read_target_config, weight_names
from aerie.workers.models.weights import CheckpointTensor, checkpoint_tensors
from aerie.workers.runner.weight_update import META, RunningModel
from tests.support.int_checkpoints import awq, quantise
from tests.support.tiny_models import FAMILY_SETTINGS, make_target
from tests.workers.layers.test_block_fp8 import quantised

CPU = torch.device("cpu")
QUICK = ("DeepseekV3", "Gemma3", "GptOss", "Qwen3Next")
OTHERS = ("Llama", "OPT", "Cohere", *FAMILY_SETTINGS)


def running(folder: Path, group: TPGroup) -> RunningModel:
    source = ModelSource(path=str(folder), device="cpu")
    config = read_target_config(source, group.size)
    model = load_target(source, config, group, CPU, 64)
    names = weight_names(config, "model x")
    return RunningModel(
        "model x", model, names, lambda: allocate_target(config, group, META, 64, (), torch.float32, "model x")
    )


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, whoever has them."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        if isinstance(module, DenseLinearMethod):
            found[f"{path}.dense"] = module.dense_weight()
        elif isinstance(module, VocabEmbedding):
            found[f"{path}.dense"] = module.dense_weight
    return found


@pytest.mark.parametrize(
    ("family", "on_host"),
    [
        *((name, False) for name in QUICK),
        ("Gemma3", True),
        ("DeepseekV3", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in OTHERS if name not in QUICK),
    ],
)
def test_a_model_loaded_again_is_the_new_one_at_its_old_addresses(
    family: str, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """on_host: with the products for CPUs, which have weights in their own layout and move them."""
    if not on_host:
        monkeypatch.setattr("aerie.kernels.gemm.workspace.compiles", lambda here: False)
    group = SOLO if family == "OPT" else TPGroup(1, 2)  # the second of two ranks; nothing is exchanged
    first, second = (make_target(tmp_path / str(seed), seed=seed, architecture=family) for seed in (0, 1))
    old, new = running(first, group), running(second, group)
    addresses = {name: each.data_ptr() for name, each in tensors_of(old.model).items()}
    assert any(not torch.equal(each, tensors_of(new.model)[name]) for name, each in tensors_of(old.model).items())
    read = partial(checkpoint_tensors, second)
    assert old.check(read) == ()
    old.load(read)
    wanted = tensors_of(new.model)
    for name, each in tensors_of(old.model).items():
        assert torch.equal(each, wanted[name]), name
        assert on_host or each.data_ptr() == addresses[name], name


@pytest.mark.parametrize(("kind", "message"), [("fp8", "FP8 in blocks of 16 x 24"), ("awq", "AWQ|4-bit|int")])
def test_converted_weights_are_refused_by_name_and_the_others_are_not(kind: str, message: str, tmp_path: Path) -> None:
    plain = make_target(tmp_path / "plain")
    folder = quantised(plain, tmp_path / kind) if kind == "fp8" else quantise(plain, tmp_path / kind, awq())
    model = running(folder, SOLO)
    with pytest.raises(ValueError, match=rf"_proj.*is stored as .*{message}"):
        model.check(partial(checkpoint_tensors, folder))

    def norms(device: torch.device) -> list[CheckpointTensor]:
        return [each for each in checkpoint_tensors(folder, device) if "norm" in each.name]

    assert model.check(norms)
    model.load(norms)
