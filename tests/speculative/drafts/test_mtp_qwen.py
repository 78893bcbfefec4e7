"""The module of Qwen3-Next and Qwen3.5: the states of a literal one, the same answers with it as without, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.backends.torch_backend import TorchBackend
from attention.config import CacheConfig
from attention.kv_cache.pool import KVPool
from attention.metadata import Mode, PrefillBatch
from speculative.build import plan_engine
from speculative.config import SpeculativeConfig
from speculative.drafts.loading import load_draft
from speculative.drafts.mtp_qwen import QwenMtp
from speculative.drafts.registry import read_draft
from speculative.local import local_engine
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited
from tests.support.tiny_models import HIDDEN, VOCAB, add_qwen_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised
from workers.config import ModelSource
from workers.distributed.tp_group import SOLO
from workers.layers.forward_context import make_context
from workers.models.loading import load_target, read_target_config
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

CPU = torch.device("cpu")
ARCHITECTURES = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")


def read(target: Path) -> QwenMtp:
    draft = read_draft("mtp", "", str(target), read_target_config(ModelSource(path=str(target)), 1))
    assert isinstance(draft, QwenMtp)
    return draft


def within_a_model_of_images(target: Path, folder: Path) -> Path:
    """The checkpoint by the names of a model of images and text."""
    config = json.loads((target / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(str(target / "model.safetensors")).items()
    }
    architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    folder.mkdir()
    whole = {"architectures": [architecture], "text_config": config, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors | {"model.visual.x": torch.zeros(2)}, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_its_states_are_those_of_a_literal_module(tmp_path: Path, architecture: str) -> None:
    """transformers has its parts, and no model that uses them: the two norms, the projection of the embedding and then
    the state, a layer, the last norm. Of a whole text, in two chunks, and of one step after it from its own state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = make_target(tmp_path / "t", architecture=architecture)
    reference = add_qwen_mtp(target, stacked=architecture == "Qwen3_5Moe")
    folder = within_a_model_of_images(target, tmp_path / "w") if architecture.startswith("Qwen3_5") else target
    source, method = ModelSource(path=str(folder), device="cpu"), read(folder)
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    draft = load_draft(method, source, whole, SOLO, CPU, 64)
    assert draft.embed_tokens is whole.embed_tokens and draft.lm_head is whole.lm_head

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB, (13,), generator=generator)
    features = torch.randn(12, HIDDEN, generator=generator)
    rotary = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)).model.rotary_emb

    def expected(features: torch.Tensor) -> torch.Tensor:
        n = features.shape[0]
        positions = torch.arange(n).unsqueeze(0)
        mask = torch.full((n, n), float("-inf")).triu(1).view(1, 1, n, n)
        embedded = whole.embed_tokens(ids[:n])
        grids = positions.expand(3, 1, n) if "Qwen3_5" in architecture else positions  # time, height and width
        angles = rotary(embedded.unsqueeze(0), grids)
        state: torch.Tensor = reference(embedded[None], features[None], angles, mask, positions, None)
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
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Pair:
    """A hybrid whose module is right about half the time."""
    target = make_target(tmp_path_factory.mktemp("mtp") / "t", calm=0.002, architecture=request.param)
    add_qwen_mtp(target, copying=True)
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
    """Of every prompt, greedy and sampled; what is drawn depends on seed and place alone."""
    spec = served.spec(speculative, *([] if cache is None else [cache]), tensor_parallel=ranks)
    sampling = [setting for i in range(len(served.prompts)) for setting in (GREEDY, SAMPLED[i % len(SAMPLED)])]
    with local_engine(spec) as engine:
        return engine.generate([prompt for prompt in served.prompts for _ in range(2)], sampling, 4)


@pytest.fixture(scope="module")
def plain(served: Pair) -> list[list[int]]:
    return [request.output for request in answers(served, None)]


CHAIN, TREE = (3, 1, 4), (4, 3, 10)
CASES: dict[str, tuple[tuple[int, int, int], int, CacheConfig | None, dict[str, Any]]] = {
    "chain": (CHAIN, 1, None, {}),
    "tree, pages of 1": (TREE, 1, CacheConfig(page_size=1, num_pages=1600), {}),
    "tree, few pages": (TREE, 1, FEW_PAGES, {}),
    "tree, 2 ranks, trimmed head": (TREE, 2, None, {"draft_vocab_size": 48}),
    "chain, 2 ranks, draft whole": (CHAIN, 2, None, {"draft_tp": 1}),
    "fixed tree": (TREE, 1, None, {"adaptive": False}),
}
# Of three families that share their rounds, each in some cases; all crosses are slow.
QUICK = {
    ("Qwen3_5", "chain"),
    ("Qwen3_5", "tree, few pages"),
    ("Qwen3_5Moe", "tree, 2 ranks, trimmed head"),
    ("Qwen3Next", "tree, pages of 1"),
}


@pytest.mark.parametrize(
    ("served", "case"),
    [
        pytest.param(family, case, marks=() if (family, case) in QUICK else pytest.mark.slow)
        for family in ARCHITECTURES
        for case in CASES
    ],
    indirect=["served"],
)
def test_it_changes_no_token(served: Pair, plain: list[list[int]], case: str) -> None:
    """Greedy and sampled. In float32, where passes of different widths differ by 1e-5 in a logit; a machine's run is
    deterministic."""
    shape, ranks, cache, settings = CASES[case]
    drafted = answers(served, SpeculativeConfig("", "mtp", *shape, **settings), ranks, cache)
    assert [request.output for request in drafted] == plain
    assert (sum(request.num_preemptions for request in drafted) > 0) == (cache is FEW_PAGES)
    greedy = torch.tensor([request.acceptance_histogram for request in drafted[::2]]).sum(0).tolist()
    accepted = sum(k * rounds for k, rounds in enumerate(greedy)) / sum(greedy)
    assert accepted > 0.5, f"rounds by accepted drafts: {greedy}"


def test_its_weights_may_be_fp8(tmp_path: Path) -> None:
    """But for its projection, which is published in bf16."""
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    add_qwen_mtp(target)
    whole = [f"model.layers.{i}.linear_attn.in_proj_{part}" for i in range(4) for part in "ab"]
    folder = quantised(target, tmp_path / "q", modules_to_not_convert=[*whole, "mtp.fc"])
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


def test_a_target_without_one_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    without = edited(target, tmp_path / "o", mtp_num_hidden_layers=0)
    with pytest.raises(ValueError, match="mtp_num_hidden_layers=0: the checkpoint has no module for drafting; use"):
        read(without)
    own = edited(target, tmp_path / "e", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings=true is not supported"):
        read(own)
    source = ModelSource(path=str(target), device="cpu")
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    with pytest.raises(ValueError, match=r"missing: mtp.\S+, .*more$"):
        load_draft(read(target), source, whole, SOLO, CPU, 64)


def test_its_kv_is_of_one_layer_and_it_has_no_state(tmp_path: Path, pair: Pair) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    add_qwen_mtp(target)
    spec = Pair(target, pair.eagle, pair.eagle3, pair.prompts).spec(SpeculativeConfig("", "mtp"))
    speculation = plan_engine(spec).speculation
    (group,) = speculation.kv_groups(torch.float32)
    assert group.layers == (0,)
    assert read(target).model.state_groups(1, torch.float32) == ()
