"""Local engines of the embedded pair."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.attention.config import CacheConfig
from aerie.cluster.config import read_content
from aerie.deploy.config.files import make_portable
from aerie.speculative.build import EngineSpec
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from tests.support import MODELS

CHAIN = SpeculativeConfig(str(MODELS / "draft"), num_steps=3, top_k=1, num_draft_tokens=4)
TREE = SpeculativeConfig(str(MODELS / "draft"), num_steps=5, top_k=4, num_draft_tokens=16)
BLOCK_TREE = SpeculativeConfig(str(MODELS / "dspark"), "dspark", num_steps=8, top_k=4, num_draft_tokens=16)
DFLASH2_TREE = SpeculativeConfig(str(MODELS / "dflash2"), "dflash2", num_steps=7, top_k=4, num_draft_tokens=16)


def embedded_spec(
    speculative: SpeculativeConfig | None,
    tensor_parallel: int = 1,
    page_size: int = 16,
    max_running: int = 16,
    debug: bool = True,
) -> EngineSpec:
    """An engine of the embedded pair on this machine's CPU."""
    model = ModelSource(path=str(MODELS / "target"), device="cpu")
    cache = CacheConfig(page_size=page_size, num_pages=16384 // page_size)
    scheduler = SchedulerConfig(max_running=max_running, max_step_tokens=512)
    worker = WorkerConfig(model, cache, scheduler, tensor_parallel=tensor_parallel, measure_costs=False, debug=debug)
    return EngineSpec(worker, speculative)


def measured_spec(
    speculative: SpeculativeConfig | None,
    tensor_parallel: int = 1,
    max_running: int = 16,
    model: Path = MODELS / "target",
    device: str = "cpu",
    measure_costs: bool = True,
) -> EngineSpec:
    """An engine whose speed is measured: without debug checks and prefix cache, and with pages for 2,048 tokens of each
    request. model: the folder of another target than the embedded one."""
    spec = embedded_spec(speculative, tensor_parallel, max_running=max_running, debug=False)
    worker = replace(
        spec.worker,
        model=replace(spec.worker.model, path=str(model), device=device),
        cache=replace(spec.worker.cache, prefix_cache=False, num_pages=max(1024, max_running * 128)),
        measure_costs=measure_costs,
    )
    return replace(spec, worker=worker)


def eos_token_ids(model: Path = MODELS / "target") -> tuple[int, ...]:
    """The token ids that end the answers of the embedded target, or of the model in another folder."""
    value = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    return tuple(value) if isinstance(value, list) else (value,)


def read_config_file(path: Path) -> dict[str, Any]:
    """A file's content, with absolute folders, and digests instead of API keys. Raises ConfigError."""
    content, _ = read_content(path)
    make_portable(content, path.resolve().parent)
    return content
