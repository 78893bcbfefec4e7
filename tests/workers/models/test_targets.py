"""Targets against transformers: the same tokens and the same log-probabilities, from the same checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.support import MODELS
from tests.support.embedded import embedded_spec
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB, make_target

GREEDY = SamplingParams(16, 0.0)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 17, 90, 41)]


def by_transformers(target: Path, guesses: Sequence[list[int]] = ()) -> list[list[int]]:
    """Return transformers' greedy answers to `prompts()`. guesses: answers by prompt, each of which is checked in one
    pass; an answer of its own takes a pass a token."""
    from transformers import AutoModelForCausalLM

    # SDPA, which most models take by default, leaves soft caps out
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    answers = []
    for i, prompt in enumerate(prompts()):
        if i < len(guesses) and _is_greedy(model, prompt, guesses[i]):
            answers.append(guesses[i])
            continue
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def _is_greedy(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> bool:
    """Whether the model would have generated `answer`: each token is the best one after those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    best: list[int] = logits.argmax(-1).tolist()
    return len(answer) == GREEDY.max_tokens and best == answer


def by_us(target: Path, tensor_parallel: int = 1, speculative: SpeculativeConfig | None = None) -> list[list[int]]:
    return [request.output for request in requests_of(target, tensor_parallel, speculative)]


def check_greedy(
    target: Path, tensor_parallel: int = 1, speculative: SpeculativeConfig | None = None, like: Path | None = None
) -> None:
    """Compare greedy answers with transformers'. like: transformers' model, if not `target`."""
    found = by_us(target, tensor_parallel, speculative)
    assert found == by_transformers(like or target, found)


def worker_of(target: Path, num_pages: int = 200, **options: Any) -> WorkerConfig:
    """Four requests at once, chunks of up to 32 tokens, pages of 4. options: of `WorkerConfig`."""
    return WorkerConfig(
        ModelSource(path=str(target), device="cpu"),
        CacheConfig(4, num_pages=num_pages),
        SchedulerConfig(4, 32),
        measure_costs=False,
        debug=True,
        **options,
    )


def requests_of(
    target: Path,
    tensor_parallel: int = 1,
    speculative: SpeculativeConfig | None = None,
    num_pages: int = 200,
    expert_parallel: bool = False,
    repeats: int = 1,
) -> list[Request]:
    """repeats: how often each prompt is asked, all of them in turn."""
    torch.set_num_threads(1)
    worker = worker_of(target, num_pages, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel)
    with local_engine(EngineSpec(worker, speculative)) as engine:
        return engine.generate(prompts() * repeats, GREEDY, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "Llama", "tie_word_embeddings": True, "attention_bias": True},
        {"architecture": "Qwen3", "head_dim": 32, "rope_scaling": LLAMA3_ROPE},
        {"architecture": "Qwen3Moe", "norm_topk_prob": False, "mlp_only_layers": [1]},
        *slow(
            {"architecture": "Llama", "rope_scaling": LLAMA3_ROPE},
            {"architecture": "Llama", "num_key_value_heads": 4, "vocab_size": 101},
            {"architecture": "Qwen2"},
            {"architecture": "Llama"},
            {"architecture": "Llama", "rope_scaling": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
            {"architecture": "Qwen3Moe"},
            {"architecture": "Qwen2Moe", "qkv_bias": False},
            {"architecture": "Qwen3Moe", "decoder_sparse_step": 2, "num_experts_per_tok": 3},
        ),
    ],
    ids=lambda s: "-".join(f"{v}" if isinstance(v, str) else k for k, v in s.items()),
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    target = make_target(tmp_path / "target", **settings)
    check_greedy(target)


@pytest.mark.parametrize("tensor_parallel", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_together_are_the_model(tmp_path: Path, tensor_parallel: int) -> None:
    """Four ranks share two KV heads; a vocabulary of 97 does not divide."""
    target = make_target(tmp_path / "target", vocab_size=97)
    check_greedy(target, tensor_parallel)


def test_the_embedded_targets_logprobs_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    texts = tokenized(held_out_prompts(6, seed=5))
    requests = [Request(str(i), p, SamplingParams(20, 0.0, logprobs=5)) for i, p in enumerate(texts)]
    logprobs: dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]] = {r.request_id: [] for r in requests}

    def listen(output: RequestOutput) -> None:
        for item in output.logprobs or ():
            logprobs[output.request.request_id].append((item.top_ids, item.top_logprobs))

    with local_engine(embedded_spec(None)) as engine:
        engine.run(requests, 3, listen)
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + request.output])).logits[0, len(request.prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).topk(5)
        ours = logprobs[request.request_id]
        assert [ids[0] for ids, _ in ours] == request.output == expected.indices[:, 0].tolist()
        # float32 through 8 layers in another order of sums
        torch.testing.assert_close(torch.tensor([v for _, v in ours]), expected.values, atol=2e-4, rtol=0)
