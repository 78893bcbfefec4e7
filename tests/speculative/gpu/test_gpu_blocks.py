"""A round of a block draft on a GPU is one launch, with one copy of its result."""

from pathlib import Path

import pytest

from aerie.speculative.build import EngineSpec, local_engine
from tests.bench.models import configured, published
from tests.bench.prompts import random_prompts
from tests.bench.round import Setting, engine_spec, write_checkpoints
from tests.bench.trace import figures, profile, start

pytestmark = pytest.mark.gpu
SHAPES = ("block-8", "block-tree")


def small(kind: str, shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """An engine of four layers and a head of two of Qwen3-8B's sizes, dummy weights and three requests."""
    target = published.CONFIGS["qwen3-8b"] | {"num_hidden_layers": 4, "vocab_size": 32768}
    ids = {"mask_token_id": 9, "target_layer_ids": [0, 1, 2]}
    sizes = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_target_layers": 4, "vocab_size": 32768}
    draft = published.DRAFTS["qwen3-8b"] | sizes | {"dflash_config": ids}
    monkeypatch.setitem(configured.CONFIGS, "qwen3-8b", target)
    monkeypatch.setitem(published.DRAFTS, "qwen3-8b", draft)
    write_checkpoints(folder, "qwen3-8b", block_draft=kind)
    return engine_spec(folder, shape, 3, Setting(), 1, cuda_graphs=True)


@pytest.mark.parametrize("kind", published.BLOCK_DRAFTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_is_one_launch(kind: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small(kind, shape, tmp_path, monkeypatch)
    with local_engine(spec) as engine:
        start(engine, random_prompts(spec.worker.model, 3, 512), 256)
        seen = figures(profile(engine, 10), 10)
    assert seen["graph_launches"] == 1 and seen["copies_to_host"] <= 1  # the result, which nothing waits for
