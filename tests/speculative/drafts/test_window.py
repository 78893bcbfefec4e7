"""A draft with a window (`speculative.window`): what it sees, that answers do not change, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.config import DraftAttention
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.registry import choose_backends
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.speculative.build import local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.speculation import draft_choices
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.runner.backends import ModelShape
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.speculative.test_losslessness import acceptance_length
from tests.support.embedded import CHAIN, TREE, embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.tiny_models import VOCAB

CPU = torch.device("cpu")
WINDOW, LENGTH, PAGE_SIZE, NUM_PAGES = 64, 150, 4, 40


def runner_of(pair: Pair, window: int | None) -> DraftRunner:
    """The random EAGLE-3 head, which attends to all that it sees."""
    source = ModelSource(path=str(pair.target), dtype="float32", device="cpu")
    config = read_target_config(source, 1)
    method = read_draft("eagle3", str(pair.eagle3), str(pair.target), config)
    decoder = load_target(source, config, SOLO, CPU, LENGTH + 4, method.capture)
    model = load_draft(method, source, decoder, SOLO, CPU, LENGTH + 4)
    pool = KVPool(method.model.kv_groups(1, torch.float32), NUM_PAGES, PAGE_SIZE, CPU)
    return DraftRunner(model, pool, dict.fromkeys(Mode, TorchBackend()), window)


def drafted(runner: DraftRunner, ids: Tensor, features: Tensor) -> Tensor:
    """The state after a text that is read as one chunk, and that of a draft step after it: [2, H]."""
    length, table = ids.shape[0] - 1, torch.arange(1, NUM_PAGES + 1, dtype=torch.int32)[None]
    with torch.inference_mode():
        chunk = PrefillBatch.from_lists([0], [length], table)
        state = runner.model.extend(ids[:length], features[:length], runner.context(None, None, chunk))[-1:]
        prefix = torch.tensor([length], dtype=torch.int32)
        decode = DecodeBatch(Mode.DRAFT_DECODE, 1, 1, prefix, causal_mask(1, 1, CPU), table, LENGTH + 4)
        after = runner.model.step(ids[length:], state.clone(), runner.context(decode))
    return torch.cat((state, after))


def test_a_window_is_the_text_s_end_read_alone(pair: Pair) -> None:
    """Wherever it stands: rotary embedding knows differences of positions alone, so that absolute ones are as good as
    positions within the window. One row sees the last 64 tokens, so a text of 64 is all that it sees."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, VOCAB, (LENGTH,), generator=generator)
    windowed = runner_of(pair, WINDOW)
    features = torch.randn(LENGTH, 3 * windowed.model.embed_tokens.weight.shape[1], generator=generator)
    seen, whole = drafted(windowed, ids, features), drafted(runner_of(pair, None), ids, features)
    # the last row of the chunk sees 64 tokens, the row after it 63 of them and itself
    for row, first in ((0, LENGTH - 1 - WINDOW), (1, LENGTH - WINDOW)):
        alone = drafted(runner_of(pair, None), ids[first:], features[first:])
        # float32, angles of positions up to 150 and other orders of sums; other text differs by about 0.1
        torch.testing.assert_close(seen[row], alone[row], atol=1e-4, rtol=1e-4)
        assert (seen[row] - whole[row]).abs().max() > 1e-2


@pytest.mark.slow  # drafts in a window are those of the text: `test_draft_oracle`
@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_a_window_changes_no_answer(pair: Pair, kind: str) -> None:
    """Texts of two to four windows, chunks of prompts beside rounds."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (120, 63, 200)]
    speculative = pair.chain() if kind == "chain" else pair.tree()
    answers = []
    for config in (None, replace(speculative, window=WINDOW)):
        with local_engine(pair.spec(config)) as engine:
            requests = engine.generate(prompts, SamplingParams(40, 0.0))
        answers.append([request.output for request in requests])
        if config is not None:
            assert sum(k * n for r in requests for k, n in enumerate(r.acceptance_histogram)) > 0
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("speculative,least", [(CHAIN, 2.6), (TREE, 3.5)], ids=["chain", "tree"])
def test_captured_rounds_and_chunks_keep_the_acceptance_of_short_texts(
    speculative: SpeculativeConfig, least: float
) -> None:
    """On a GPU, in graphs: the embedded pair's texts are of 100 to 300 tokens, the window holds 128.
    `test_losslessness` asks for as much without one."""
    spec = embedded_spec(replace(speculative, window=128), debug=False)
    model = replace(spec.worker.model, device="cuda", dtype="bfloat16")
    spec = replace(spec, worker=replace(spec.worker, model=model))
    sampling = SamplingParams(200, 0.0, stop_token_ids=eos_token_ids())
    with local_engine(spec) as engine:
        requests = engine.generate(tokenized(held_out_prompts(40)), sampling, 13)
    assert acceptance_length(requests) > least


def test_a_window_narrower_than_a_tree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^window=63: must be at least 64; take the length of the texts"):
        SpeculativeConfig("draft", window=63)


@pytest.mark.parametrize("name", ["flashinfer", "trtllm"])
def test_a_backend_without_windows_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("aerie.attention.registry.is_installed", lambda package: True)
    config = replace(plan_engine(pair.spec(pair.chain())).target, head_dim=128)
    shape = ModelShape(config, 1, torch.bfloat16, 16, Capability("cuda", (9, 0)))
    names = DraftAttention(extend=name)
    choose_backends(draft_choices(names, shape, tree=False))
    with pytest.raises(
        ValueError,
        match=rf"^draft_attention.extend={name}: {name} cannot serve draft_extend: speculative.window=2048: it attends "
        "to the whole context; those that can: torch, triton$",
    ):
        choose_backends(draft_choices(names, shape, tree=False, window=2048))
