"""The module for multi-token prediction that comes with DeepSeek-V3: the same states as transformers', the same answers
with it as without, and refusals."""

import json
from pathlib import Path

import pytest
import torch

from attention.backends.torch_backend import TorchBackend
from attention.kv_cache.pool import KVPool
from attention.metadata import Mode, PrefillBatch
from speculative.config import SpeculativeConfig
from speculative.draft_models.loading import load_draft
from speculative.draft_models.mtp import Mtp
from speculative.draft_models.registry import read_draft
from speculative.local import local_engine
from tests.speculative.conftest import Pair
from tests.speculative.test_loading import edited
from tests.support.tiny_models import HIDDEN, VOCAB, add_mtp, make_target
from tests.workers.test_block_fp8 import quantised
from workers.config import ModelSource
from workers.distributed.tp_group import SOLO
from workers.layers.forward_context import make_context
from workers.models.loading import load_target, read_target_config
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

CPU = torch.device("cpu")
V3 = {"architecture": "DeepseekV3"}


def read(target: Path) -> Mtp:
    draft = read_draft("mtp", "", str(target), read_target_config(ModelSource(path=str(target)), 1))
    assert isinstance(draft, Mtp)
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


def test_it_changes_no_token(tmp_path: Path, pair: Pair) -> None:
    """Chain and tree, on one rank and on two, the draft cut or whole on each."""
    target = make_target(tmp_path / "t", calm=0.01, **V3)
    add_mtp(target, copying=True)
    served = Pair(target, pair.eagle, pair.eagle3, pair.prompts[:6])

    def answers(speculative: SpeculativeConfig | None, ranks: int = 1) -> list[Request]:
        with local_engine(served.spec(speculative, tensor_parallel=ranks)) as engine:
            return engine.generate(served.prompts, SamplingParams(16, 0.0), 4)

    plain = [request.output for request in answers(None)]
    for (steps, top_k, nodes), ranks, draft_tp in (((3, 1, 4), 1, None), ((4, 3, 10), 1, None), ((4, 3, 10), 2, 1)):
        drafted = answers(SpeculativeConfig("", "mtp", steps, top_k, nodes, draft_tp), ranks)
        assert [request.output for request in drafted] == plain
        histogram = torch.tensor([request.acceptance_histogram for request in drafted]).sum(0).tolist()
        accepted = sum(k * rounds for k, rounds in enumerate(histogram)) / sum(histogram)
        assert accepted > 0.5, f"rounds by accepted drafts: {histogram}"


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
