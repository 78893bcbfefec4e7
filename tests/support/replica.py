"""Engines with random weights, opened up for tests that compare two of them: see `tests.support.replay`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.attention.config import CacheConfig, DraftAttention, TargetAttention
from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.speculative.build import EngineSpec, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.decoding import SpeculativeDecoding
from aerie.speculative.tree_table import TreeTable
from aerie.workers.config import GraphCapture, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.decoding import Autoregressive, DecodingStrategy
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.slots import SlotTable
from tests.support.engine_plans import build_worker

NUM_FAVOURITES = 8  # tokens that most choices fall on, so that a random draft guesses some of them
MAX_TOKENS = 60
ROOM = MAX_TOKENS + 8  # tokens that max_model_len must leave after the longest context
IN_FLIGHT = 128  # positions after max_model_len that steps in flight may touch, of any shape here


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of the random target and its EAGLE-3 head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    draft_vocab: int
    layers: int = 4


def write_config(folder: Path, size: Dimensions, max_position: int, capture: Sequence[int] | None = None) -> Path:
    """config.json of target and draft under `folder`; the weights are dummies. capture: layers that the head reads,
    instead of the usual ones."""
    common: dict[str, Any] = {
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.mlp,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": max_position,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    target = {**common, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": size.layers}
    draft = {
        **common,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": size.draft_vocab,
    }
    if capture is not None:
        draft["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(capture)}
    for kind, config in (("target", target), ("draft", draft)):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Arm:
    """One kind of engine.

    tree: (num_steps, top_k, width), None decodes plainly.
    acceptance: synthetic, None is real.
    longest: the longest context that a request has when it comes.
    adaptive: whether it has smaller shapes too.
    backends: attention of the target's rounds, and of the draft's accepted rows and steps.
    """

    tree: tuple[int, int, int] | None
    page_size: int
    acceptance: float | None = None
    dtype: str = "bfloat16"
    num_slots: int = 16
    longest: int = 32768
    adaptive: bool = False
    backends: tuple[str, str, str] = ("auto", "auto", "auto")

    def spec(self, folder: Path, device: str, cuda_graphs: bool) -> EngineSpec:
        """Every slot can hold the longest context at once."""
        max_len = self.longest + ROOM
        pages = self.num_slots * -(-(max_len + IN_FLIGHT) // self.page_size)
        worker = WorkerConfig(
            ModelSource(str(folder / "target"), "dummy", self.dtype, device, max_len),  # type: ignore[arg-type]
            CacheConfig(self.page_size, num_pages=pages, prefix_cache=False),
            SchedulerConfig(max_running=self.num_slots),
            attention=TargetAttention(decode=self.backends[0]),
            cuda_graphs=cuda_graphs,
            graph_capture=GraphCapture(limit_s=math.inf, limit_gb=0.0),  # all rounds at once, and nothing else
        )
        if self.tree is None:
            return EngineSpec(worker)
        draft = SpeculativeConfig(
            str(folder / "draft"),
            "eagle3",
            *self.tree,
            synthetic_acceptance_length=self.acceptance,
            adaptive=self.adaptive,
        )
        return EngineSpec(worker, draft, DraftAttention(extend=self.backends[1], decode=self.backends[2]))


@dataclass(frozen=True)
class Replica:
    """An engine's rank, opened up.

    strategy: as it was built, with graphs on a GPU.
    inner: what it captures.
    """

    strategy: DecodingStrategy
    inner: Autoregressive | SpeculativeDecoding
    slots: SlotTable
    pools: tuple[KVPool, ...]
    trees: TreeTable | None
    layout: EngineLayout

    def state(self) -> dict[str, Tensor]:
        """Return what rounds change, padding left out: slots by name and trees [num_slots, ...]."""
        table, count = self.slots, self.slots.padding_slot
        state = {"seq_len": table.seq_len, "bonus": table.bonus, "finished": table.finished}
        if self.trees is not None:
            state |= {f"trees.{name}": t for name, t in vars(self.trees.trees).items()}
        return {name: tensor[:count] for name, tensor in state.items()}


def build_replica(spec: EngineSpec) -> Replica:
    """Ready for rounds, its slots and KV empty; two of one spec have the same weights."""
    engine = plan_engine(spec)
    worker = build_worker(spec, engine)
    strategy = worker._strategy
    inner = strategy._inner if isinstance(strategy, GraphedDecoding) else strategy
    assert isinstance(inner, (Autoregressive, SpeculativeDecoding))
    models: list[Any] = [inner._target.model]
    pools, trees = [inner._target.pool], None
    if isinstance(inner, SpeculativeDecoding):
        models.append(inner._draft.model)
        pools.append(inner._draft.pool)
        trees = inner._trees
    for model in models:
        model.lm_head.method.dense_weight().data[:NUM_FAVOURITES] *= 8.0  # in place: graphs hold its address
        if worker._slots.device.type == "cpu":
            model.lm_head.finish(GEMMOptions())  # the CPU's GEMM holds a copy
    return Replica(strategy, inner, worker._slots, tuple(pools), trees, engine.layout)
