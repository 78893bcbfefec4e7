"""Gemma 4's assistant: logits of transformers' module over pages of the target's KV, the same answers with it as
without, and refusals."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.pool import KVPool
from aerie.deploy.config.drafts import draft_method
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.speculative.build import local_engine, plan_engine, plan_weights
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.drafter import TargetKVRunner
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.registry import read_draft
from aerie.workers.config import ModelSource, SchedulerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.forward_context import Attending, make_context
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.runner.layout import split_windows
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited
from tests.support.drafts.fuzzed_requests import Seen, serve_fuzzed
from tests.support.drafts.gemma4_assistant import Reference, make_assistant
from tests.support.drafts.mtp import FEW_PAGES, answers, check_answers
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB, make_target
from tests.workers.models.test_gemma4 import EXPERTS

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "per-layer": {"architecture": "Gemma4"},
    "dense": {"architecture": "Gemma4Unified"},
    "experts": EXPERTS,
}
TEXT, PAGE_SIZE = 31, 4  # more than twice the window


@pytest.mark.parametrize(
    ("name", "ordered"),
    [
        *((name, name == "per-layer") for name in KINDS),
        *slow(*((name, name != "per-layer") for name in KINDS)),
    ],
)
@torch.inference_mode()
def test_its_logits_are_those_of_transformers(tmp_path: Path, name: str, ordered: bool) -> None:
    """After a prompt, and of two steps after that: a chain, then two rows of a tree from states of their own. KV of
    layers with a window is in window pages."""
    target = make_target(tmp_path / "t", calm=8.0, **KINDS[name])
    assistant = make_assistant(tmp_path / "a", target, ordered)
    ids = torch.randint(2, VOCAB, (TEXT + 1,), generator=torch.Generator().manual_seed(0))
    reference = Reference(target, assistant, ids[:TEXT])

    source = ModelSource(path=str(target), device="cpu")
    config = read_target_config(source, 1)
    whole = load_target(source, config, SOLO, CPU, 64)
    draft = load_draft(read_draft("mtp", str(assistant), str(target), config), source, whole, SOLO, CPU, 64)
    assert draft.embed_tokens is whole.embed_tokens
    groups = split_windows(config, config.kv_groups(1, torch.float32), 12)
    pool = KVPool(groups, 10, PAGE_SIZE, CPU)
    pool.allocate(10, 10)
    assert pool.window_layers
    table = torch.tensor([[2, 4, 1, 3, 7, 6, 5, 8, 9, 10]], dtype=torch.int32)
    pool.attach(torch.arange(1, 11), torch.arange(10, 0, -1, dtype=torch.int32))
    backends = dict.fromkeys(Mode, TorchBackend())
    batch = PrefillBatch.from_lists((0,), (TEXT,), table)
    hidden = whole(ids[:TEXT], make_context(pool, backends, None, None, batch)).hidden
    # float32 in other orders: 1.5e-4 on CPUs without AVX-512, less on others
    torch.testing.assert_close(hidden, reference.hidden, rtol=5e-4, atol=5e-4)
    before = [each.clone() for each in _tensors(pool)]

    runner = TargetKVRunner(draft, pool, backends)
    attending = Attending(torch.tensor([TEXT - 1]), None, batch.last_rows())
    state = runner.extend(ids[1:], hidden, None, batch, attending)
    expected, their_state = reference.step(int(ids[TEXT]), reference.hidden[-1])
    _compare(draft.logits(state), expected, ordered)

    lengths = torch.tensor([TEXT], dtype=torch.int32)
    mask = causal_mask(1, 1, CPU)
    decode = DecodeBatch(Mode.DRAFT_DECODE, 1, 1, lengths, mask, table, TEXT + 8)
    second = draft.step(torch.tensor([7]), state, runner.context(decode))
    expected, their_second = reference.step(7, their_state)
    _compare(draft.logits(second), expected, ordered)

    masks = torch.tensor([[0b0101, 0b1010]])
    decode = DecodeBatch(Mode.DRAFT_DECODE, 2, 4, lengths, masks, table, TEXT + 8)
    states = draft.step(
        torch.tensor([9, 11]), torch.cat((second, state)), runner.context(decode, torch.tensor([33, 33]))
    )
    for token, row, theirs in ((9, 0, their_second), (11, 1, their_state)):
        _compare(draft.logits(states)[row : row + 1], reference.step(token, theirs)[0], ordered)
    assert all(torch.equal(one, other) for one, other in zip(before, _tensors(pool), strict=True))


def _tensors(pool: KVPool) -> list[Tensor]:
    return [each for tensors in pool.tensors for each in tensors]


def _compare(ours: Tensor, expected: Tensor, ordered: bool) -> None:
    """float32, sums of at most 128 numbers in another order, which the random layers amplify: 0.0036 on CPUs without
    AVX-512. Outside the best clusters transformers has a logit below all others, we have minus infinity."""
    if ordered:
        assert 0 < int(ours.isinf().sum()) < VOCAB
        assert torch.equal(ours[0].isinf(), expected == expected.min())
        expected = torch.where(ours[0].isinf(), ours[0], expected)
    torch.testing.assert_close(ours[0], expected, rtol=1e-3, atol=1e-2)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> tuple[Pair, Path]:
    """A target whose assistant is right about half the time."""
    folder = tmp_path_factory.mktemp("assistant")
    calm = 0.3 if request.param == "per-layer" else 2.0
    target = make_target(folder / "t", calm=calm, **KINDS[request.param])
    assistant = make_assistant(folder / "a", target, ordered=request.param == "per-layer", copying=True)
    return Pair(target, pair.eagle, pair.eagle3, pair.prompts[:6]), assistant


@pytest.fixture(scope="module")
def plain(served: tuple[Pair, Path]) -> list[list[int]]:
    return [request.output for request in answers(served[0], None)]


CHAIN, TREE = (3, 1, 4), (4, 3, 10)
CASES: dict[str, tuple[tuple[int, int, int], int, CacheConfig | None, dict[str, Any]]] = {
    "chain": (CHAIN, 1, None, {}),
    "chain of 1": ((1, 1, 2), 1, None, {}),
    "tree, pages of 1": (TREE, 1, CacheConfig(page_size=1, num_pages=1600), {}),
    "tree, few pages": (TREE, 1, FEW_PAGES, {}),
    "tree, 2 ranks": (TREE, 2, None, {}),
    "chain, 2 ranks": (CHAIN, 2, None, {}),
    "fixed tree": (TREE, 1, None, {"adaptive": False}),
    "tree and copies": (TREE, 1, None, {"suffix_tokens": 4}),
    "window of the draft": (CHAIN, 1, None, {"window": 64}),
}
QUICK = {("per-layer", "tree, few pages")}


@pytest.mark.parametrize(
    ("served", "case"),
    [
        pytest.param(kind, case, marks=() if (kind, case) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for case in CASES
    ],
    indirect=["served"],
)
def test_it_changes_no_token(served: tuple[Pair, Path], plain: list[list[int]], case: str) -> None:
    """Greedy and sampled, prompts longer than the windows."""
    (shape, ranks, cache, settings), (pair, assistant) = CASES[case], served
    drafted = answers(pair, SpeculativeConfig(str(assistant), "mtp", *shape, **settings), ranks, cache)
    check_answers(drafted, plain, cache)


STATIC = {"adaptive": False}
SAMPLINGS = (
    SamplingParams(20, 0.0),
    SamplingParams(12, 0.0, speculative=False),
    SamplingParams(16, 1.0, seed=5),
    SamplingParams(16, 0.8, top_k=8, frequency_penalty=0.3, seed=1 << 63),
)
# page size, pages, prompt tokens of a step, tree shape
FUZZED = ((4, 28, 16, TREE), (1, 900, 7, CHAIN), (16, 9, 64, TREE), (2, 56, 5, (2, 2, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("served", KINDS, indirect=True)
def test_neighbours_aborts_preemption_and_cached_prefixes_change_nothing(served: tuple[Pair, Path]) -> None:
    """Compare tokens and, of greedy requests that were not preempted, accepted tokens by round: a draft over the KV of
    another request, or placed elsewhere, is right less often. Prompts share more than two windows."""
    pair, assistant = served
    shared = pair.prompts[0][:2] * 15
    prompts = [shared + prompt[:17] for prompt in pair.prompts[1:5]]
    keys = [(i, k) for i in range(len(prompts)) for k in range(len(SAMPLINGS))]
    seen, cached, compared = Seen(), 0, 0
    for number, (page_size, num_pages, chunk, shape) in enumerate(FUZZED):
        speculative = SpeculativeConfig(str(assistant), "mtp", *shape, **STATIC)  # type: ignore[arg-type]
        with local_engine(pair.spec(speculative, CacheConfig(16, 300, prefix_cache=False))) as engine:
            alone = engine.generate([prompts[i] for i, _ in keys], [SAMPLINGS[k] for _, k in keys], 1)
        expected = dict(zip(keys, alone, strict=True))
        spec = pair.spec(speculative, CacheConfig(page_size, num_pages), SchedulerConfig(4, chunk))
        with local_engine(spec) as engine:
            for request, key in serve_fuzzed(engine, prompts, SAMPLINGS, Random(number), seen, 16):
                assert request.output == expected[key].output, (number, key)
                cached += request.cached_tokens > 0
                if key[1] == 0 and not request.num_preemptions:
                    assert request.acceptance_histogram == expected[key].acceptance_histogram, (number, key)
                    compared += 1
    assert min(vars(seen).values()) > 0 and cached > 8 and compared > 4, f"{seen}, {cached} cached, {compared} compared"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    target = make_target(folder / "t", **KINDS["dense"])
    return target, make_assistant(folder / "a", target, ordered=True)


def test_the_plan_counts_neither_kv_nor_the_targets_embedding(made: tuple[Path, Path], pair: Pair) -> None:
    target, assistant = made
    served = Pair(target, pair.eagle, pair.eagle3, pair.prompts)
    spec, alone = served.spec(SpeculativeConfig(str(assistant), "mtp")), served.spec()
    engine = plan_engine(spec)
    assert engine.speculation.kv_groups(torch.float32) == () and engine.layout.lookahead == 0
    assert engine.layout.bytes_per_page == plan_engine(alone).layout.bytes_per_page
    tensors = load_file(str(assistant / "model.safetensors"))
    assert not any(name.startswith("lm_head") for name in tensors)  # tied
    assert plan_weights(spec, engine, multiplies_fp8=False).draft == sum(each.nbytes for each in tensors.values())
    choices = {
        choice.use.mode: choice.use for choice in engine.speculation.attention(4, torch.float32, Capability("cpu"))
    }
    assert set(choices) == {Mode.PREFILL, Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE}
    assert choices[Mode.DRAFT_DECODE].scores == (ScoreRule(1.0, window=11, within_images=True), ScoreRule(1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 96}, "was made for a target of hidden_size=96, the target .* has hidden_size=64"),
        ({"num_centroids": 7}, "num_centroids=7, centroid_intermediate_top_k=5: the first must divide vocab_size=96"),
        ({"text_config": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers=2: all 4 layers of an assistant"),
        ({"text_config": {"sliding_window": 16}}, "sliding_window=16, the target has 12: must be equal"),
        ({"text_config": {"head_dim": 32}}, "layer 0 has 4 query heads of 32, the target's layer 2 2 K/V heads of 16"),
        ({"text_config": {"num_attention_heads": 3}}, "layer 0 has 3 query heads of 16, the target's layer 2 2 K/V"),
        ({"text_config": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input=8 is not supported in an"),
        ({"text_config": {"vocab_size": 48}, "use_ordered_embeddings": False}, "vocab_size=48, the target"),
    ],
)
def test_what_does_not_fit_is_refused(
    made: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    target, assistant = made
    raw = json.loads((assistant / "config.json").read_text())
    text = raw["text_config"] | changes.get("text_config", {})
    if "text_config" in changes:  # as published files have it
        text |= {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}
    folder = edited(assistant, tmp_path / "e", **(changes | {"text_config": text}))
    with pytest.raises(ValueError, match=message) as error:
        read_draft("mtp", str(folder), str(target), read_target_config(ModelSource(path=str(target)), 1))
    assert "\n" not in str(error.value)


def test_another_target_or_method_is_refused(made: tuple[Path, Path], pair: Pair) -> None:
    target, assistant = made
    other = read_target_config(ModelSource(path=str(pair.target)), 1)
    with pytest.raises(ValueError, match="is an assistant of Gemma 4, the target is LlamaForCausalLM; use a head"):
        read_draft("mtp", str(assistant), str(pair.target), other)
    own = read_target_config(ModelSource(path=str(target)), 1)
    with pytest.raises(ValueError, match="is an mtp head .*Gemma4UnifiedAssistantForCausalLM.*set method: mtp"):
        read_draft("eagle3", str(assistant), str(target), own)
    assert draft_method(assistant) == "mtp"


@pytest.mark.parametrize(
    ("speculative", "cache", "ranks", "message"),
    [
        ({"draft_tp": 1}, {}, 2, "speculative.draft_tp=1: draft .* attends to the target's KV"),
        ({"draft_vocab_size": 48}, {}, 1, "speculative.draft_vocab_size=48: draft .* has a head of its own; leave it"),
        ({}, {"draft_dtype": "fp8_e4m3"}, 1, "cache.draft_dtype=fp8_e4m3: draft .* has no KV of its own; leave it out"),
        ({}, {}, 3, "tensor_parallel=3: does not divide"),
    ],
)
def test_settings_that_it_would_ignore_are_refused(
    made: tuple[Path, Path], pair: Pair, speculative: dict[str, Any], cache: dict[str, Any], ranks: int, message: str
) -> None:
    target, assistant = made
    served = Pair(target, pair.eagle, pair.eagle3, pair.prompts)
    chosen = SpeculativeConfig(str(assistant), "mtp", **speculative)
    with pytest.raises(ValueError, match=message):
        plan_engine(served.spec(chosen, CacheConfig(page_size=4, num_pages=40, **cache), tensor_parallel=ranks))


def test_a_damaged_order_of_tokens_is_named(made: tuple[Path, Path], tmp_path: Path) -> None:
    target, assistant = made
    folder = edited(assistant, tmp_path / "d")
    tensors = load_file(str(assistant / "model.safetensors"))
    tensors["masked_embedding.token_ordering"][3] = 5
    (folder / "model.safetensors").unlink()
    save_file(tensors, str(folder / "model.safetensors"))
    source = ModelSource(path=str(target), device="cpu")
    config = read_target_config(source, 1)
    whole = load_target(source, config, SOLO, CPU, 64)
    with pytest.raises(ValueError, match="token_ordering .* does not name every token once"):
        load_draft(read_draft("mtp", str(folder), str(target), config), source, whole, SOLO, CPU, 64)
