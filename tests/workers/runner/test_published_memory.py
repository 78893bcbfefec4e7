"""Requests and KV tokens of published models on one H200, by arithmetic: the engine's layout and the bytes of its
weights are real, the GPU is only described (`tests.workers.runner.test_memory`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.attention.config import CacheConfig
from aerie.kernels.capability import Capability
from aerie.speculative.build import EngineSpec, plan_engine, plan_weights
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.engine_layout import EngineLayout
from tests.speculative.drafts.test_published_heads import flat, layer
from tests.workers.models.test_published_configs import HYBRID_FP8, LLAMA_8B, QWEN35_27B
from tests.workers.runner.test_memory import DescribedMemory, settled

H200 = 143_771 * 2**20  # bytes of its memory, as nvidia-smi names them
CHAIN, TREE = (3, 1, 4), (4, 4, 8)
LLAMA_HEAD = flat(layer(4096, 14336, 32, 8, 128256)) | {"architectures": ["LlamaForCausalLMEagle3"]}


def on_an_h200(
    folder: Path,
    model: dict[str, Any],
    cache: CacheConfig,
    max_running: int | str,
    shape: tuple[int, int, int],
    head: dict[str, Any] | None = None,
) -> EngineLayout:
    """Return the layout once memory is divided. As in `settled`, the largest step and graphs take 6.1 GB: an
    assumption. head: config.json of an EAGLE-3 head; None: the model's own module drafts."""
    for name, config in {"target": model, "head": head}.items():
        if config is not None:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config))
    path, method = ("", "mtp") if head is None else (str(folder / "head"), "eagle3")
    source = ModelSource(str(folder / "target"), load_format="dummy", max_model_len=16384)
    scheduler = SchedulerConfig(max_running=max_running, max_step_tokens=2048)  # type: ignore[arg-type]
    spec = EngineSpec(WorkerConfig(source, cache, scheduler), SpeculativeConfig(path, method, *shape))  # type: ignore[arg-type]
    engine = plan_engine(spec, Capability("cuda", (9, 0)))
    weights = plan_weights(spec, engine, multiplies_fp8=True)
    return settled(spec.worker, engine.layout, DescribedMemory(H200), weights.target + weights.draft)[0]


def tokens(layout: EngineLayout) -> int:
    return layout.num_pages * layout.cache.page_size


@pytest.mark.parametrize(
    "prefix_cache, snapshots, kept", [(False, 0, 771_000), (True, 73, 607_000)], ids=["KV alone", "and saved states"]
)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_27b_keeps_700000_tokens_beside_32_mtp_requests(
    tmp_path: Path, shape: tuple[int, int, int], prefix_cache: bool, snapshots: int, kept: int
) -> None:
    """At 0.8 of the memory, where vLLM 0.26.0 keeps 421,248 and SGLang 0.5.17 101,745. A running request has one state
    whatever its rows: chain and tree keep the same but for one token in 200. `cache.state_snapshots: auto` gives 21 %
    of the same bytes to saved states, which are evictable."""
    cache = CacheConfig(16, memory_share=0.8, prefix_cache=prefix_cache)
    layout = on_an_h200(tmp_path, QWEN35_27B, cache, 32, shape)
    assert layout.num_snapshots == pytest.approx(snapshots, abs=1)
    assert tokens(layout) == pytest.approx(kept, rel=0.005)
    assert tokens(layout) + layout.saved_bytes / (layout.bytes_per_page / 16) > 700_000
    assert layout.bytes_per_state < 1.1 * layout.bytes_per_snapshot


def test_27b_in_fp8_runs_128_requests(tmp_path: Path) -> None:
    """Each with 6,000 tokens of KV, besides saved states of the prefix cache; `auto` gives no fewer slots."""
    model = QWEN35_27B | {"quantization_config": HYBRID_FP8}
    layout = on_an_h200(tmp_path, model, CacheConfig(16), 128, TREE)
    assert tokens(layout) > 128 * 6000 and layout.num_snapshots > 64
    assert on_an_h200(tmp_path, model, CacheConfig(16), "auto", TREE).scheduler.num_slots >= 128
    # in bf16, 24 GB more, 64 have room for as many tokens each
    assert tokens(on_an_h200(tmp_path, QWEN35_27B, CacheConfig(16), 64, TREE)) > 64 * 6000


@pytest.mark.parametrize("draft_dtype, share", [("auto", 1.94), ("fp8_e4m3", 2.0)])
def test_kv_in_fp8_gives_80_percent_more_pages(tmp_path: Path, draft_dtype: str, share: float) -> None:
    """Llama-3.1-8B with an EAGLE-3 head, whose layer keeps 16 bits unless `draft_dtype` says otherwise."""
    model = {name: value for name, value in LLAMA_8B.items() if name != "quantization_config"}
    pages = {}
    for dtype in ("model", "fp8_e4m3"):
        cache = CacheConfig(16, dtype=dtype, draft_dtype=draft_dtype if dtype == "fp8_e4m3" else "auto")
        pages[dtype] = on_an_h200(tmp_path, model, cache, 64, CHAIN, LLAMA_HEAD).num_pages
    assert pages["fp8_e4m3"] / pages["model"] == pytest.approx(share, abs=0.01)
    assert pages["fp8_e4m3"] > 1.8 * pages["model"]
