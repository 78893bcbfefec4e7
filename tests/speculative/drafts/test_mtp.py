"""The module for multi-token prediction that comes with DeepSeek-V3: the same states as transformers', the same answers
with it as without, and refusals."""

import json
from pathlib import Path

import pytest
import torch

from attention.backends.torch_backend import TorchBackend
from attention.config import CacheConfig
from attention.kv_cache.pool import KVPool
from attention.metadata import Mode, PrefillBatch
from speculative.build import plan_engine, plan_weights
from speculative.config import SpeculativeConfig
from speculative.drafts.loading import load_draft
from speculative.drafts.mtp_deepseek import DeepseekMtp
from speculative.drafts.registry import read_draft
from speculative.local import local_engine
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited
from tests.support.tiny_models import HIDDEN, VOCAB, add_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised
from workers.config import ModelSource
from workers.distributed.tp_group import SOLO
from workers.layers.forward_context import make_context
from workers.models.loading import load_target, read_target_config
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

CPU = torch.device("cpu")
V3 = {"architecture": "DeepseekV3"}


def read(target: Path) -> DeepseekMtp:
    draft = read_draft("mtp", "", str(target), read_target_config(ModelSource(path=str(target)), 1))
    assert isinstance(draft, DeepseekMtp)
    return draft


def test_its_states_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a whole text, in two chunks, and of one step after it from its own state."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    target = make_target(tmp_path / "t", **V3)
    reference = add_mtp(target)
    source, method = ModelSource(path=str(target), device="cpu"), read(target)
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    draft = load_draft(method, source, whole, SOLO, CPU, 64)
    assert draft.embed_tokens is whole.embed_tokens and draft.lm_head is whole.lm_head

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB, (13,), generator=generator)
    features = torch.randn(12, HIDDEN, generator=generator)
    rotary = DeepseekV3RotaryEmbedding(DeepseekV3Config.from_pretrained(target))

    def expected(features: torch.Tensor) -> torch.Tensor:
        n = features.shape[0]
        positions = torch.arange(n).unsqueeze(0)
        mask = torch.full((n, n), float("-inf")).triu(1).view(1, 1, n, n)
        embedded = whole.embed_tokens(ids[:n])
        angles = rotary(embedded.unsqueeze(0), positions)
        state = reference(embedded[None], features[None], angles, mask, positions, None)
        return state[0]

    pool = KVPool(method.model.kv_groups(1, torch.float32), 4, 4, CPU)
    table = torch.tensor([[2, 4, 1, 3]], dtype=torch.int32)
    states = []
    for start, end in ((0, 7), (7, 12)):
        batch = PrefillBatch.from_lists((start,), (end - start,), table)
        context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, batch)
        states.append(draft.extend(ids[start:end], features[start:end], context))
    ours = torch.cat(states)
    # float32, sums of at most 96 numbers in another order through one layer
    torch.testing.assert_close(ours, expected(features), rtol=1e-4, atol=1e-4)
    batch = PrefillBatch.from_lists((12,), (1,), table)
    context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, batch)
    after = draft.step(ids[12:], ours[-1:], context)
    torch.testing.assert_close(after, expected(torch.cat((features, ours[-1:])))[-1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.logits(after), whole.lm_head(after))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Pair:
    """A target of DeepSeek-V3's shape, latent attention and experts, whose module is right about half the time."""
    target = make_target(tmp_path_factory.mktemp("mtp") / "t", calm=0.01, **V3)
    add_mtp(target, copying=True)
    return Pair(target, pair.eagle, pair.eagle3, pair.prompts[:6])


GREEDY = SamplingParams(16, 0.0)
SAMPLED = (
    SamplingParams(16, 1.0, seed=5),
    SamplingParams(16, 0.7, top_k=8, top_p=0.9, seed=1 << 63),
    SamplingParams(16, 0.9, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2, seed=3),
)
FEW_PAGES = CacheConfig(page_size=4, num_pages=30)  # requests that decode together must give way to each other


def answers(
    served: Pair, speculative: SpeculativeConfig | None, ranks: int = 1, cache: CacheConfig | None = None
) -> list[Request]:
    """Of every prompt, greedy and sampled; what is drawn depends on seed and place alone. ranks: fewer than 0: so many
    that have whole experts."""
    settings = {"tensor_parallel": abs(ranks), "expert_parallel": ranks < 0}
    spec = served.spec(speculative, *([] if cache is None else [cache]), **settings)  # type: ignore[arg-type]
    sampling = [setting for i in range(len(served.prompts)) for setting in (GREEDY, SAMPLED[i % len(SAMPLED)])]
    with local_engine(spec) as engine:
        return engine.generate([prompt for prompt in served.prompts for _ in range(2)], sampling, 4)


@pytest.fixture(scope="module")
def plain(served: Pair) -> list[list[int]]:
    return [request.output for request in answers(served, None)]


@pytest.mark.parametrize(
    "shape,ranks,draft_tp,cache",
    [
        ((3, 1, 4), 1, None, None),
        ((4, 3, 10), 1, None, CacheConfig(page_size=1, num_pages=1600)),
        ((4, 3, 10), 1, None, FEW_PAGES),
        pytest.param((3, 1, 4), 2, None, None, marks=pytest.mark.slow),  # the two after it have what it has
        ((4, 3, 10), 2, 1, None),
        ((4, 3, 10), -2, None, None),
    ],
    ids=[
        "chain",
        "tree, pages of 1",
        "tree, few pages",
        "chain, 2 ranks",
        "tree, 2 ranks, draft whole on each",
        "tree, whole experts",
    ],
)
def test_it_changes_no_token(
    served: Pair,
    plain: list[list[int]],
    shape: tuple[int, int, int],
    ranks: int,
    draft_tp: int | None,
    cache: CacheConfig | None,
) -> None:
    """Greedy and sampled. In float32, where passes of different widths differ by 1e-5 in a logit; a machine's run is
    deterministic."""
    drafted = answers(served, SpeculativeConfig("", "mtp", *shape, draft_tp), ranks, cache)
    assert [request.output for request in drafted] == plain
    assert (sum(request.num_preemptions for request in drafted) > 0) == (cache is FEW_PAGES)
    greedy = torch.tensor([request.acceptance_histogram for request in drafted[::2]]).sum(0).tolist()
    accepted = sum(k * rounds for k, rounds in enumerate(greedy)) / sum(greedy)
    assert accepted > 0.5, f"rounds by accepted drafts: {greedy}"


def test_its_weights_may_be_fp8(tmp_path: Path) -> None:
    """But for its projection, which is published in bf16."""
    target = make_target(tmp_path / "t", num_hidden_layers=2, **V3)
    add_mtp(target)
    folder = quantised(target, tmp_path / "q")
    states = []
    for path in (folder, folder / "plain"):
        source, method = ModelSource(path=str(path), device="cpu"), read(path)
        draft = load_draft(
            method, source, load_target(source, read_target_config(source, 1), SOLO, CPU, 8), SOLO, CPU, 8
        )
        pool = KVPool(method.model.kv_groups(1, torch.float32), 2, 4, CPU)
        batch = PrefillBatch.from_lists((0,), (5,), torch.tensor([[1, 2]], dtype=torch.int32))
        context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, batch)
        features = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3))
        states.append(draft.extend(torch.arange(5), features, context))
    torch.testing.assert_close(states[0], states[1])


def test_whole_experts_take_the_memory_of_slices(served: Pair) -> None:
    """Of target and module."""
    draft = SpeculativeConfig("", "mtp", 3, 1, 4)
    specs = [served.spec(draft, tensor_parallel=2, expert_parallel=each) for each in (False, True)]
    slices, whole = (plan_weights(spec, plan_engine(spec), multiplies_fp8=False) for spec in specs)
    assert slices == whole and slices.draft > 0


def test_a_target_without_one_is_refused(tmp_path: Path, pair: Pair) -> None:
    target = make_target(tmp_path / "t", num_hidden_layers=2, num_mtp_layers=0, **V3)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: the checkpoint has no module for drafting; use"):
        read(target)
    with pytest.raises(ValueError, match=r"is an eagle head \(architecture LlamaForCausalLM\); set method: eagle$"):
        read(pair.target)
    other = edited(target, tmp_path / "o", hidden_size=32, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match="was made for a target of hidden_size=32, the target .* has hidden_size=64"):
        read_draft("mtp", str(other), str(target), read_target_config(ModelSource(path=str(target)), 1))


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", num_hidden_layers=2, **V3)
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
    source = ModelSource(path=str(target), device="cpu")
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    with pytest.raises(ValueError, match=r"missing: model.layers.2.\S+, .*more$"):
        load_draft(read(target), source, whole, SOLO, CPU, 64)
