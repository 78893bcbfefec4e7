"""Shared by the tests of every family's MTP module: its states against a reference, and its answers."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.registry import DraftMethod, read_draft
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.forward_context import make_context
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import Pair
from tests.support.tiny_models import HIDDEN, VOCAB

CPU = torch.device("cpu")
GREEDY = SamplingParams(16, 0.0)
SAMPLED = (
    SamplingParams(16, 1.0, seed=5),
    SamplingParams(16, 0.7, top_k=8, top_p=0.9, seed=1 << 63),
    SamplingParams(16, 0.9, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2, seed=3),
)
FEW_PAGES = CacheConfig(page_size=4, num_pages=30)  # requests that decode together must give way to each other
PAGE_SIZE, NUM_PAGES = 4, 9
MAX_POSITION = PAGE_SIZE * NUM_PAGES


def read_mtp(target: Path) -> DraftMethod:
    """The module that comes with a target's checkpoint."""
    return read_draft("mtp", "", str(target), read_target_config(ModelSource(path=str(target)), 1))


def check_states(folder: Path, reference: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Compare a module's states with those of `reference`: of a whole text, in two chunks, and of one step after it
    from its own state.

    reference: of embeddings [1, n, hidden], features [1, n, hidden] and a causal mask [1, 1, n, n] the states
        [1, n, hidden].
    """
    source, method = ModelSource(path=str(folder), device="cpu"), read_mtp(folder)
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    draft = load_draft(method, source, whole, SOLO, CPU, 64)
    assert draft.embed_tokens is whole.embed_tokens and draft.lm_head is whole.lm_head

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB, (13,), generator=generator)
    features = torch.randn(12, HIDDEN, generator=generator)

    def expected(features: Tensor) -> Tensor:
        n = features.shape[0]
        mask = torch.full((n, n), float("-inf")).triu(1).view(1, 1, n, n)
        return reference(whole.embed_tokens(ids[:n])[None], features[None], mask)[0]

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


def check_fp8_states(folder: Path) -> None:
    """A module whose weights are FP8 computes what the same weights in `folder`/plain do."""
    states = []
    for path in (folder, folder / "plain"):
        source, method = ModelSource(path=str(path), device="cpu"), read_mtp(path)
        target = load_target(source, read_target_config(source, 1), SOLO, CPU, 8)
        draft = load_draft(method, source, target, SOLO, CPU, 8)
        pool = KVPool(method.model.kv_groups(1, torch.float32), 2, 4, CPU)
        batch = PrefillBatch.from_lists((0,), (5,), torch.tensor([[1, 2]], dtype=torch.int32))
        context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, batch)
        features = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3))
        states.append(draft.extend(torch.arange(5), features, context))
    torch.testing.assert_close(states[0], states[1])


def answers(
    served: Pair, speculative: SpeculativeConfig | None, ranks: int = 1, cache: CacheConfig | None = None
) -> list[Request]:
    """Answers to every prompt, greedy and sampled; what is drawn depends on seed and position alone. ranks: below 0,
    their absolute value, with whole experts."""
    settings = {"tensor_parallel": abs(ranks), "expert_parallel": ranks < 0}
    spec = served.spec(speculative, *([] if cache is None else [cache]), **settings)  # type: ignore[arg-type]
    sampling = [setting for i in range(len(served.prompts)) for setting in (GREEDY, SAMPLED[i % len(SAMPLED)])]
    with local_engine(spec) as engine:
        return engine.generate([prompt for prompt in served.prompts for _ in range(2)], sampling, 4)


def check_answers(drafted: list[Request], plain: list[list[int]], cache: CacheConfig | None) -> None:
    """Assert that `answers` with a module are those without one, that some drafts were accepted, and that requests were
    preempted where pages are few. In float32, where passes of different widths differ by 1e-5 in a logit; a machine's
    run is deterministic."""
    assert [request.output for request in drafted] == plain
    assert (sum(request.num_preemptions for request in drafted) > 0) == (cache is FEW_PAGES)
    greedy = torch.tensor([request.acceptance_histogram for request in drafted[::2]]).sum(0).tolist()
    accepted = sum(k * rounds for k, rounds in enumerate(greedy)) / sum(greedy)
    assert accepted > 0.5, f"rounds by accepted drafts: {greedy}"


def check_trained(
    folder: Path,
    hidden_of: Callable[[Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    unroll: Callable[[Tensor, Tensor, int], list[Tensor]],
    mtp_logits: Callable[[Tensor], Tensor],
) -> None:
    """Compare a trained pair with what was saved of it. transformers computes the target; the engine computes the
    module for a text in one pass, then for a chain drafted from its last row with the text's own tokens. In float32,
    sums in another order: within 1e-4 of values of about 1.

    hidden_of: states [1, n, hidden] of tokens [1, n]. logits, mtp_logits: of states, the target's and the module's.
    unroll: the module's states of each step, from tokens [1, n] and states.
    """
    from transformers import AutoModelForCausalLM

    length, num_steps = 19, 4
    source = ModelSource(path=str(folder), dtype="float32", device="cpu")
    config = read_target_config(source, 1)
    method = read_draft("mtp", "", str(folder), config)
    served = load_draft(method, source, load_target(source, config, SOLO, CPU, MAX_POSITION), SOLO, CPU, MAX_POSITION)
    pool = KVPool(method.model.kv_groups(1, torch.float32), NUM_PAGES, PAGE_SIZE, CPU)
    runner = DraftRunner(served, pool, dict.fromkeys(Mode, TorchBackend()))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (length + num_steps,), generator=torch.Generator().manual_seed(4))
    table = torch.arange(1, NUM_PAGES + 1, dtype=torch.int32)[None]
    with torch.inference_mode():
        hidden = hidden_of(tokens[None])
        torch.testing.assert_close(logits(hidden), reference(tokens[None]).logits, atol=1e-4, rtol=1e-4)
        trained = unroll(tokens[None], hidden, num_steps)
        chunks = PrefillBatch.from_lists([0], [length], table)
        states = served.extend(tokens[1 : length + 1], hidden[0, :length], runner.context(None, None, chunks))
        torch.testing.assert_close(states, trained[0][0, :length], atol=1e-4, rtol=1e-4)
        state, lengths = states[-1:], torch.tensor([length], dtype=torch.int32)
        for step in range(1, num_steps):
            mask = causal_mask(1, step, CPU)[:, -1:]
            decode = DecodeBatch(Mode.DRAFT_DECODE, 1, step, lengths, mask, table, MAX_POSITION)
            state = served.step(tokens[length + step, None], state, runner.context(decode))
            torch.testing.assert_close(state[0], trained[step][0, length - 1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(served.logits(state), mtp_logits(state), atol=1e-4, rtol=1e-4)
