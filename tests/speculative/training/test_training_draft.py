"""Draft training: it learns, and its acceptance is that of chains really drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.training import generation
from aerie.speculative.training.commands import train_draft
from aerie.speculative.training.draft import DraftVocabulary, Unrolling
from aerie.speculative.training.eagle3 import Eagle3Head, build_head, choose_vocabulary, draft_config, read_draft_config
from aerie.speculative.training.generation import generate_answers, until_stop
from aerie.speculative.training.losses import AcceptanceTally, add_rounds, measure_acceptance
from aerie.speculative.training.rows import Conversation, RowError
from aerie.speculative.training.samples import Sample, answer_prompts, collate, read_samples, write_samples
from aerie.speculative.training.trainer import FitArguments
from tests.speculative.training.conftest import VOCAB_SIZE
from tests.support.slow import slow


def fit_arguments(output: Path, **others: Any) -> FitArguments:
    usual = {
        "max_steps": 24,
        "batch_tokens": 512,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "weight_decay": 0.0,
        "seed": 5,
    }
    return FitArguments(output_dir=str(output), logging_steps=1, progress=False, **usual | others)


@pytest.fixture
def samples(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list[Conversation]
) -> list[Sample]:
    prompts = answer_prompts(conversations[:12], tokenizer)
    return generate_answers(
        target, tokenizer, prompts, temperature=0.8, max_new_tokens=17, batch_size=5, seed=3, progress=False
    )


@pytest.fixture
def greedy_samples(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list[Conversation]
) -> list[Sample]:
    """A random target soon repeats itself, which a head learns in a few steps."""
    prompts = answer_prompts(conversations[:12], tokenizer)
    return generate_answers(
        target, tokenizer, prompts, temperature=0, max_new_tokens=17, batch_size=12, seed=3, progress=False
    )


@pytest.fixture
def vocabulary(samples: list[Sample], method: Eagle3) -> DraftVocabulary:
    return choose_vocabulary(samples, method.vocab_size, method.model.vocab_size, always=[2])


def train(
    head: Eagle3Head,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary,
    samples: list[Sample],
    arguments: FitArguments,
) -> list[float]:
    return train_draft(head, target, vocabulary, samples, [], arguments, Unrolling(3, 0.8))


def test_training_reduces_the_loss(
    target: PreTrainedModel, method: Eagle3, samples: list[Sample], vocabulary: DraftVocabulary, tmp_path: Path
) -> None:
    head = build_head(target, method, vocabulary, seed=0)
    losses = train(head, target, vocabulary, samples, fit_arguments(tmp_path))
    assert len(losses) == 24
    # A random target's distribution is nearly flat: the loss has a floor near log(64) = 4.16, so the bar is low.
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.01


@pytest.mark.parametrize("config_class", [Qwen2Config, *slow(Qwen3Config)])
def test_qwen_targets_get_heads_too(
    config_class: type[Qwen2Config | Qwen3Config], samples: list[Sample], tmp_path: Path
) -> None:
    config = config_class(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    method = read_draft_config(draft_config(target, 64), target, Path("draft"))
    assert method.capture == (2, 3, 4)
    vocabulary = choose_vocabulary(samples, 64, 300, always=[2])
    head = build_head(target, method, vocabulary, seed=0)
    losses = train(head, target, vocabulary, samples, fit_arguments(tmp_path, max_steps=12))
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.01


def test_acceptance_is_that_of_chains_really_drafted(
    target: PreTrainedModel, method: Eagle3, samples: list[Sample], greedy_samples: list[Sample], tmp_path: Path
) -> None:
    samples = samples[:6] + greedy_samples[6:]
    vocabulary = choose_vocabulary(samples, method.vocab_size, method.model.vocab_size, always=[2])
    depth = 3
    head = build_head(target, method, vocabulary, seed=0)
    train(head, target, vocabulary, samples, fit_arguments(tmp_path))
    num_rounds = accepted = 0
    for sample in samples:
        batch = collate([sample])
        length = len(sample.tokens)
        with torch.no_grad():
            output = target.base_model(input_ids=batch.tokens, output_hidden_states=True)
            captured = torch.cat([output.hidden_states[layer] for layer in method.capture], dim=-1)
        anchor = sample.num_prompt - 1
        while anchor + 2 < length:
            text = list(sample.tokens[: anchor + 2])
            for step in range(depth):
                padded = torch.tensor([[*text, *[0] * (batch.tokens.shape[1] - len(text))]])
                with torch.no_grad():
                    embeddings = target.get_input_embeddings()(padded)
                    hidden = head.unroll(embeddings, captured, step + 1)[step][0, anchor]
                    text.append(int(vocabulary.target_ids[head.logits(hidden).argmax()]))
            run = 0
            for drafted, said in zip(text[anchor + 2 :], sample.tokens[anchor + 2 :], strict=False):
                if drafted != said:
                    break
                run += 1
            num_rounds += 1
            accepted += run
            anchor += run + 1
    measured = measure_acceptance(head, target, vocabulary, samples, depth, batch_tokens=512)
    assert (measured.num_rounds, sum(measured.accepted)) == (num_rounds, accepted)
    assert 0 < accepted < depth * num_rounds


def test_rounds_stop_at_the_depth_and_at_the_end_of_the_text() -> None:
    tally = AcceptanceTally.empty(2)
    yes, no = [True] * 8, [False] * 8
    add_rounds(tally, [yes, yes], num_prompt=2, length=8)
    # Bonus token 2; rounds accept 3 and 4, then (bonus 5) 6 and 7, then nothing is left.
    assert (tally.num_rounds, tally.accepted, tally.acceptance_length()) == (2, [2, 2], 3.0)
    add_rounds(tally, [no, yes], num_prompt=2, length=5)
    assert (tally.num_rounds, tally.offered, tally.accepted) == (4, [4, 2], [2, 2])
    assert tally.per_depth() == [0.5, 1.0]


@pytest.mark.parametrize("config_class", [Qwen3Config, *slow(LlamaConfig)])
def test_greedy_regeneration_gives_each_prompt_the_answer_it_gets_alone(
    config_class: type[LlamaConfig | Qwen3Config],
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In batches of any size, from prompts of any length in parts, and by transformers' own loop."""
    torch.manual_seed(2)
    config = config_class(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    prompts = answer_prompts(conversations[:7], tokenizer)
    prompts[2] = prompts[2][:5]
    chosen = generate_answers(
        target, tokenizer, prompts, temperature=0, max_new_tokens=9, batch_size=7, seed=0, progress=False
    )
    # an answer's fourth token ends answers, so that some end early
    target.generation_config.eos_token_id = [chosen[0].tokens[-6], tokenizer.eos_token_id]

    def answers(batch_size: int) -> list[Sample]:
        return generate_answers(
            target, tokenizer, prompts, temperature=0, max_new_tokens=40, batch_size=batch_size, seed=0, progress=False
        )

    monkeypatch.setattr(generation, "_MAX_SCORES", 1)
    monkeypatch.setattr(generation, "_CHECK_EVERY", 2)
    grouped = answers(3)
    assert answers(7) == answers(1) == grouped
    assert len({len(each.tokens) - each.num_prompt for each in grouped}) > 1, "no answer ends earlier than another"
    monkeypatch.setattr(generation, "_GROUPED", ())
    assert answers(1) == grouped


def test_regeneration_reports_progress_within_a_batch(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch on a CPU takes minutes; a bar that stands at 0 % for so long looks like a server that hangs."""
    seen: list[int] = []

    class Bar(tqdm):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            seen.append(int(self.n))
            return shown

    monkeypatch.setattr(generation, "tqdm", Bar)
    target.generation_config.eos_token_id = [VOCAB_SIZE - 1]
    generate_answers(
        target, tokenizer, [[5, 6, 7]] * 10, temperature=0, max_new_tokens=80, batch_size=7, seed=0, progress=True
    )
    assert seen == sorted(seen) and seen[-1] == 10 and len(set(seen)) > 4


def test_sampled_regeneration_follows_the_target_s_distribution(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """2,000 first tokens after one prompt: chi-squared over the ten likeliest and the rest, false alarm 1e-4."""
    prompt = [5, 6, 7]
    said = generate_answers(
        target, tokenizer, [prompt] * 2000, temperature=0.7, max_new_tokens=1, batch_size=1500, seed=1, progress=False
    )
    with torch.no_grad():
        wanted = torch.softmax(target(torch.tensor([prompt])).logits[0, -1] / 0.7, -1)
    likely = wanted.topk(10)
    counts = torch.bincount(torch.tensor([each.tokens[3] for each in said]), minlength=len(wanted))[likely.indices]
    seen = torch.cat((counts, 2000 - counts.sum(0, keepdim=True))).float()
    expected = 2000 * torch.cat((likely.values, 1 - likely.values.sum(0, keepdim=True)))
    assert float(((seen - expected) ** 2 / expected).sum()) < 35.6  # the 1 - 1e-4 quantile of 10 degrees of freedom


def test_regenerated_samples_are_kept_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "regenerated.jsonl"
    samples = [Sample((1, 2, 3), 2), Sample((4, 5), 1)]
    write_samples(samples, path)
    assert read_samples(path) == samples
    path.write_text(path.read_text() + '{"prompt_tokens": [1]}\n')
    with pytest.raises(RowError, match=r"regenerated.jsonl:3: not a regenerated row; delete the file"):
        read_samples(path)


def test_an_answer_ends_with_its_first_stop_token() -> None:
    assert until_stop([5, 2, 7, 2], [2, 9]) == [5, 2]
    assert until_stop([5, 6], [2]) == [5, 6]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU for CUDA graphs")
def test_replayed_steps_equal_eager_ones(
    target: PreTrainedModel, method: Eagle3, samples: list[Sample], vocabulary: DraftVocabulary, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs the extra train, which hosts that only serve lack")
    device = torch.device("cuda", 0)
    target.to(device)
    on_device = vocabulary.to(device)
    losses = []
    for graphs in (False, True):
        head = build_head(target, method, on_device, seed=0)
        arguments = fit_arguments(tmp_path / str(graphs), own_device=device, graphs=graphs)
        losses.append(train(head, target, on_device, samples, arguments))
    # Full batches change the order of float32 sums; observed differences after 24 steps are below 1e-4.
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
