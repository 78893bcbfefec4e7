"""What shared noise, filters and penalties mean for a draft's acceptance, by exact expectation on the embedded pair.

    python -m tests.bench.acceptance [--prompts 24] [--tokens 96] [--only filters]

The target answers held-out prompts by plain decoding. Along each answer both models' distributions are computed at
every position, so that for each rule the chance that a drafted token is accepted, given that the target chose the
answer's, is a formula and not a draw; rounds are then played over the answer with those chances. Under shared noise
both take the largest of their own logits with one Gumbel noise: the chance that this is token x for both is
1 / sum over y of max(p_y / p_x, q_y / q_x). Under rejection sampling a token drawn from q is accepted with
min(1, p_x / q_x). Chains of three. Columns are acceptance lengths: `served` is what the engine does, with shared noise;
the others change one thing. A Markdown table, then one JSON line. A few minutes on two cores.
"""

import argparse
import json
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from speculative.local import local_engine
from speculative.training.draft_files import load_draft
from speculative.training.draft_model import Eagle3Head
from speculative.training.vocabulary import DraftVocabulary
from tests.bench.machine import git
from tests.support.embedded import embedded_spec, eos_token_ids
from tests.support.prompts import MODELS, held_out_prompts, tokenized
from tests.support.slots import enter
from workers.distributed.tp_group import SOLO
from workers.layers.vocab import VocabShard
from workers.sampling.filters import count_levels, lowest_kept, scaled_logits
from workers.sampling.sampler import Rows, Sampler
from workers.scheduling.plan import SamplingParams, SlotInit, pack_i32
from workers.slots.slot_table import SlotTable

DEPTH = 3
CPU = torch.device("cpu")
NONE = float("-inf")
PLAIN = {
    "temperature 1.0": SamplingParams(1, 1.0),
    "temperature 0.7": SamplingParams(1, 0.7),
}
FILTERS = {
    "0.7, top-k 20, top-p 0.8": SamplingParams(1, 0.7, top_k=20, top_p=0.8),
    "1.0, top-p 0.9": SamplingParams(1, 1.0, top_p=0.9),
    "1.0, min-p 0.1": SamplingParams(1, 1.0, min_p=0.1),
}
PENALTIES = {
    "greedy, repetition 1.1": SamplingParams(1, 0.0, repetition_penalty=1.1),
    "0.7, repetition 1.1": SamplingParams(1, 0.7, repetition_penalty=1.1),
    "greedy, presence 1.0": SamplingParams(1, 0.0, presence_penalty=1.0),
    "greedy, frequency 0.5": SamplingParams(1, 0.0, frequency_penalty=0.5),
    "0.7, presence 0.5, frequency 0.3": SamplingParams(1, 0.7, presence_penalty=0.5, frequency_penalty=0.3),
}
GROUPS = {"plain": PLAIN, "filters": FILTERS, "penalties": PENALTIES}


@dataclass(frozen=True)
class Rule:
    """How drafts are proposed and accepted. shared: by the target's noise, else by rejection. filters: "levels" as the
    engine's draft has them, "exact" as the target's, "none". penalised: whether the draft sees penalties."""

    shared: bool = True
    filters: str = "levels"
    penalised: bool = False


RULES = {
    "served": Rule(),
    "rejection": Rule(shared=False),
    "no filters": Rule(filters="none"),
    "exact filters": Rule(filters="exact"),
    "penalties": Rule(penalised=True),
}


@dataclass(frozen=True)
class Answer:
    """What the models say along an answer of n tokens. target: [n, vocab] logits of each token's position. draft: per
    step the same, minus infinity outside the draft's vocabulary."""

    prompt: list[int]
    tokens: list[int]
    target: Tensor
    draft: list[Tensor]


def rules_for(sampling: SamplingParams) -> dict[str, Rule]:
    """Those that differ for a request with these parameters."""
    filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    left_out = set() if filtered else {"no filters", "exact filters"}
    left_out |= set() if sampling.needs_token_counts else {"penalties"}
    left_out |= set() if sampling.temperature > 0 else {"rejection"}
    return {name: rule for name, rule in RULES.items() if name not in left_out}


@torch.no_grad()
def view(
    target: PreTrainedModel, head: Eagle3Head, vocabulary: DraftVocabulary, prompt: list[int], tokens: list[int]
) -> Answer:
    """Both models over a whole text. Row i of a chain's step s, which stands at i, proposes token i + s + 2."""
    ids, first, count = torch.tensor([[*prompt, *tokens]]), len(prompt), len(tokens)
    out = target.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
    logits = target.get_output_embeddings()(out.last_hidden_state)[0, first - 1 : first - 1 + count]
    draft = []
    for step, hidden in enumerate(head(target.get_input_embeddings()(ids), head.features(out), DEPTH)):
        rows = (torch.arange(count) + first - step - 2).clamp_min(0)
        proposed = torch.full((count, logits.shape[1]), NONE)
        proposed[:, vocabulary.target_ids] = head.logits(hidden)[0, rows]
        draft.append(proposed)
    return Answer(prompt, tokens, logits, draft)


def probabilities(logits: Tensor, answer: Answer, sampling: SamplingParams, filters: str, penalised: bool) -> Tensor:
    """[n, vocab] float64 from logits [n, vocab] of the answer's positions, by the sampler's own functions."""
    count, vocab = logits.shape
    slots = SlotTable(1, 1, vocab, CPU)
    enter(slots, SlotInit(0, 0, len(answer.prompt), 0, sampling, pack_i32(answer.prompt)))
    sampler = Sampler(slots, VocabShard(vocab, SOLO))
    row = torch.arange(count)
    # every token of the answer so far counts as output
    path = (row.unsqueeze(0) < row.unsqueeze(1)).unsqueeze(0)
    rows = Rows(torch.tensor([0]), (row + len(answer.prompt)).unsqueeze(0), path, torch.tensor([answer.tokens]))
    if penalised and slots.facts[0].shapes_logits:
        logits = sampler._shape(logits.unsqueeze(0), rows).squeeze(0)
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), vocab).double()
    if filters == "exact":
        logits = sampler._filter(logits, rows)
    elif filters == "levels":
        scaled = scaled_logits(logits, slots.temperature[:1].expand(count))
        of = torch.zeros(count, dtype=torch.int64)
        lowest = lowest_kept(count_levels(scaled), slots.top_k[of], slots.top_p[of], slots.min_p[of])
        logits = logits.masked_fill(scaled < lowest.unsqueeze(1), NONE)
    return torch.softmax(logits.double() / sampling.temperature, -1)


def chances(p: Tensor, q: Tensor, tokens: Tensor, shared: bool) -> list[float]:
    """Per position, that the draft's token is accepted if the target's choice is tokens [n]; p, q: [n, vocab]."""
    p_x, q_x = (t.gather(1, tokens.unsqueeze(1)) for t in (p, q))
    if not shared:
        return (q_x / p_x).clamp_max(1.0).squeeze(1).tolist()
    larger = torch.maximum(p, torch.where(q_x > 0, q * (p_x / q_x.clamp_min(1e-300)), 0.0))
    return torch.where(q_x.squeeze(1) > 0, 1 / larger.sum(1), 0.0).tolist()


def expected_rounds(accepted: list[list[float]]) -> float:
    """Rounds that an answer of n tokens takes after its first: accepted[s][m] is the chance for token m in step s."""
    count = len(accepted[0])
    begins = [0.0] * (count + DEPTH + 1)  # that a round begins after token i
    begins[0], rounds = 1.0, 0.0
    for i in range(count - 1):
        rounds += begins[i]
        reached = begins[i]
        for step in range(DEPTH):
            place = i + 1 + step
            chance = accepted[step][place] if place < count else 0.0
            begins[place] += reached * (1 - chance)
            reached *= chance
        begins[i + 1 + DEPTH] += reached
    return rounds


def measure(sampling: SamplingParams, answers: list[Answer]) -> dict[str, float]:
    """Acceptance length by rule."""
    rules = rules_for(sampling)
    rounds, num_tokens = dict.fromkeys(rules, 0.0), 0
    for answer in answers:
        tokens = torch.tensor(answer.tokens)
        p = probabilities(answer.target, answer, sampling, "exact", True)
        num_tokens += len(tokens) - 1
        for name, rule in rules.items():
            accepted = []
            for logits in answer.draft:
                q = probabilities(logits, answer, sampling, rule.filters, rule.penalised)
                accepted.append(chances(p, q, tokens, rule.shared))
            rounds[name] += expected_rounds(accepted)
    return {name: num_tokens / count for name, count in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer at most")
    parser.add_argument("--only", nargs="+", choices=sorted(GROUPS), default=sorted(GROUPS))
    arguments = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    head, vocabulary = load_draft(MODELS / "draft", target)
    prompts = tokenized(held_out_prompts(arguments.prompts))
    print("| request | " + " | ".join(RULES) + " |\n| --- |" + " --- |" * len(RULES), flush=True)
    results = {}
    for name, kind in [item for group in arguments.only for item in GROUPS[group].items()]:
        kinds = [
            replace(kind, max_tokens=arguments.tokens, seed=i, stop_token_ids=eos_token_ids())
            for i in range(len(prompts))
        ]
        with local_engine(embedded_spec(None)) as engine:
            requests = engine.generate(prompts, kinds)
        texts = [(prompt, request.output) for prompt, request in zip(prompts, requests, strict=True)]
        answers = [view(target, head, vocabulary, prompt, tokens) for prompt, tokens in texts if len(tokens) > 1]
        results[name] = row = measure(kinds[0], answers)
        print(
            f"| {name} | " + " | ".join(f"{row[rule]:.3f}" if rule in row else "" for rule in RULES) + " |", flush=True
        )
    print(json.dumps({"bench": "acceptance", "commit": git("rev-parse", "--short", "HEAD"), "results": results}))


if __name__ == "__main__":
    main()
