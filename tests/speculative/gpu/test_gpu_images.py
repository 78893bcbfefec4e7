"""Images on a GPU: towers, also in parts, M-RoPE in the RoPE kernel, DeepStack, attention within images, and rounds
after images in CUDA graphs."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from tests.support.simulation.states import COSTS
from tests.support.target_answers import TREE, head_for
from tests.support.targets.image_models import MAX_TOKENS, ImagePrompts, make_image_model
from tests.workers.vision.test_images_greedy import NUM_TOKENS, prompts, requests_of, worker_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("kind", "drafts", "parts"),
    [
        ("qwen2_5_vl", False, False),
        ("qwen3_vl", True, False),
        ("qwen3_vl", False, True),
        ("gemma3", True, False),
        ("gemma4", False, True),
    ],
)
def test_tokens_are_those_of_transformers_on_a_gpu(tmp_path: Path, kind: str, drafts: bool, parts: bool) -> None:
    """In float32, where a near tie in 70 tokens of a random model is rare; TF32 is off."""
    target = tmp_path / "target"
    model, of = make_image_model(target, kind), ImagePrompts(target)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    speculative = None
    if drafts:
        head = head_for(read_target_config(ModelSource(path=str(target)), 1), tmp_path)
        speculative = SpeculativeConfig(str(head), "eagle3", *TREE)
    worker = worker_of(target, step_tokens=2 + MAX_TOKENS.get(kind, 25) if kind.startswith("gemma") else 24)
    source = dataclasses.replace(worker.model, device="cuda", dtype="float32")
    worker = dataclasses.replace(worker, model=source, debug=False)
    assert not torch.backends.cuda.matmul.allow_tf32
    with local_engine(EngineSpec(worker, speculative)) as engine:
        if parts:
            costs = msgspec.structs.replace(COSTS, image_patches=(16, 640), image_ms=(100.0, 100.0))
            engine.scheduler.use_costs(costs)
        for turn in range(2):
            requests = requests_of(target, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
