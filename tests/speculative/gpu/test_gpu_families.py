"""Every family of targets and every kind of draft on a GPU: answers are a CPU's, captured rounds are eager ones, and a
round waits for nothing. Tiny models in float32, so that only near ties may differ; experts in bfloat16, without near
ties of routers."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.gpu.test_gpu_hybrids import on_gpu
from tests.speculative.test_backends import RefuseHostReads, step_of
from tests.support.drafts.block_reference import head_for, make_block_head
from tests.support.engine_plans import build_worker
from tests.support.kernels.gpu_waits import refuse_gpu_waits
from tests.support.known_models import make_known
from tests.support.target_answers import head_for as head_for_streams
from tests.support.targets.clear_routers import check_greedy_in_bfloat16, clear_routers
from tests.support.tiny_models import VOCAB, make_eagle3, make_target
from tests.workers.models.test_gpt_oss import mxfp4

pytestmark = pytest.mark.gpu
CHAIN, TREE = (3, 1, 4), (4, 3, 10)
PLAIN = SamplingParams(32, 0.0)


def own(architecture: str) -> Callable[[Path], Path]:
    return lambda folder: make_target(folder / "target", calm=0.01, architecture=architecture)


def own_experts(architecture: str) -> Callable[[Path], Path]:
    return lambda folder: clear_routers(make_target(folder / "target", architecture=architecture))


def gpt_oss_in_mxfp4(folder: Path) -> Path:
    return mxfp4(clear_routers(make_target(folder / "source", architecture="GptOss")), folder / "target")


DENSE: dict[str, Callable[[Path], Path]] = {
    **{name: own(name) for name in ("Llama", "Qwen3", "Gemma2", "Gemma3")},
    "adapter": lambda folder: make_known(folder / "target", "seed_oss"),
}
ADAPTED = (  # each shows something that the others do not have
    "apertus",  # norms of q and k, an activation of its own
    "arcee",  # MLPs of two matrices
    "cohere2",  # LayerNorms, attention beside the MLP, rotated pairs, windows
    "exaone4",  # norms after attention and MLP, windows
    "gemma",  # norms of 1 + weight, GELU, scaled embeddings
    "glm4",  # rotated pairs, gate_up in one matrix
    "gpt_neox",  # qkv in one matrix, rotated in part
    "hunyuan_v1_dense",  # norms after RoPE
    "minicpm3",  # latent attention: keys and values of other sizes
    "smollm3",  # layers without RoPE
    "starcoder2",  # biases, windows
    "youtu",  # values of another size than keys
)
EXPERTS: dict[str, Callable[[Path], Path]] = {  # which a GPU multiplies in bfloat16 only
    **{name: own_experts(name) for name in ("GptOss", "Glm4Moe", "Qwen2Moe")},
    "gpt-oss in MXFP4": gpt_oss_in_mxfp4,
    "adapter": lambda folder: clear_routers(make_known(folder / "target", "mixtral")),
}


def spec_of(target: Path, speculative: SpeculativeConfig | None) -> EngineSpec:
    model = ModelSource(path=str(target), device="cpu", max_model_len=160)
    return EngineSpec(WorkerConfig(model, CacheConfig(16, 300), SchedulerConfig(6, 64)), speculative)


def eagle3(folder: Path, target: Path, shape: tuple[int, int, int]) -> SpeculativeConfig:
    """A head of random weights that also reads the output of the last layer."""
    ids = [0, 2, read_target_config(ModelSource(path=str(target)), 1).num_layers]
    make_eagle3(folder / "draft", target, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    return SpeculativeConfig(str(folder / "draft"), "eagle3", *shape)


def blocks(kind: str) -> Callable[[Path, Path], SpeculativeConfig]:
    def make(folder: Path, target: Path) -> SpeculativeConfig:
        head = head_for(target, block=8, from_anchor=True, kind=kind)
        make_block_head(folder / "draft", target, head, copying=True)
        return SpeculativeConfig(str(folder / "draft"), kind, 7, 1, 8)  # type: ignore[arg-type]

    return make


DRAFTS: dict[str, Callable[[Path, Path], SpeculativeConfig]] = {
    "chain": lambda folder, target: eagle3(folder, target, CHAIN),
    "tree": lambda folder, target: eagle3(folder, target, TREE),
    "dflash": blocks("dflash"),
    "dspark": blocks("dspark"),
    "dflash2": blocks("dflash2"),
    "tree of a block": lambda folder, target: dataclasses.replace(
        blocks("dflash")(folder, target), num_steps=5, top_k=4, num_draft_tokens=20
    ),
    "suffix": lambda folder, target: SpeculativeConfig("", "suffix", 8, 1, 9),
    "suffix branch": lambda folder, target: dataclasses.replace(eagle3(folder, target, TREE), suffix_tokens=6),
}


def prompts() -> list[list[int]]:
    """Prompts of 3 to 67 tokens that end with their own first half. Windows have 12 tokens."""
    rng = Random(0)
    texts = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(2, 45))] for _ in range(10)]
    return [(text + text[: len(text) // 2]) for text in texts]


def answers(spec: EngineSpec, sampling: SamplingParams) -> list[Sequence[int]]:
    with local_engine(spec) as engine:
        return [request.output for request in engine.generate(prompts(), sampling, 6)]


def different(found: list[Sequence[int]], expected: list[Sequence[int]]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", DENSE)
def test_a_familys_answers_are_those_of_a_cpu(tmp_path: Path, name: str) -> None:
    target = DENSE[name](tmp_path)
    expected = answers(spec_of(target, None), PLAIN)
    assert different(answers(on_gpu(spec_of(target, None)), PLAIN), expected) <= 1
    tree = eagle3(tmp_path, target, TREE)
    assert different(answers(on_gpu(spec_of(target, tree)), PLAIN), expected) <= 1


@pytest.mark.parametrize("kind", ADAPTED)
def test_graphs_of_the_adapter_emit_what_eager_rounds_emit(tmp_path: Path, kind: str) -> None:
    """By a tree of a head, which reads the streams between layers; and the tokens of a CPU without a draft."""
    target = make_known(tmp_path / "target", kind)
    config = read_target_config(ModelSource(path=str(target)), 1)
    assert config.served_by is not None
    spec = spec_of(target, SpeculativeConfig(str(head_for_streams(config, tmp_path)), "eagle3", *TREE))
    eager, graphed = (answers(on_gpu(spec, graphs), PLAIN) for graphs in (False, True))
    assert different(graphed, eager) <= 1
    assert different(graphed, answers(spec_of(target, None), PLAIN)) <= 1


@pytest.mark.parametrize("name", EXPERTS)
def test_rounds_over_experts_emit_what_transformers_finds_most_likely(tmp_path: Path, name: str) -> None:
    """Captured and eager. Answers of the two are not compared: products in bfloat16 round otherwise in batches of other
    sizes, and which requests share a batch depends on time."""
    target = EXPERTS[name](tmp_path)
    spec = spec_of(target, eagle3(tmp_path, target, TREE))
    exact = target / "plain" if (target / "plain").exists() else target
    for graphs in (False, True):
        check_greedy_in_bfloat16(prompts(), answers(on_gpu(spec, graphs, "bfloat16"), PLAIN), exact)


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_change_no_answer_and_graphs_none(tmp_path: Path, kind: str) -> None:
    target = make_target(tmp_path / "target", calm=0.01)
    spec = spec_of(target, DRAFTS[kind](tmp_path, target))
    assert different(answers(on_gpu(spec), PLAIN), answers(on_gpu(spec_of(target, None)), PLAIN)) <= 1
    sampled = SamplingParams(32, 0.8, seed=3)
    eager, graphed = (answers(on_gpu(spec, graphs), sampled) for graphs in (False, True))
    assert different(graphed, eager) <= 1


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_round_waits_for_nothing(tmp_path: Path, kind: str) -> None:
    target = make_target(tmp_path / "target", calm=0.01)
    eager = on_gpu(spec_of(target, DRAFTS[kind](tmp_path, target)), graphs=False)
    worker = build_worker(eager, plan_engine(eager))
    with refuse_gpu_waits(), RefuseHostReads():
        for index in range(len(worker._strategy.shapes)):
            step_of(worker, index)
