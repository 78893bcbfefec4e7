"""Drafts beside adapters: adapters of the draft; and an adapter whose texts the draft does not guess stops drafting
alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from aerie.speculative.build import check_weights, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig
from aerie.workers.lora.adapter_config import WEIGHTS_FILE
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command_queue import FEW_ROUNDS
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.shapes.draft_fit import PROBE_EVERY, DraftFit
from tests.speculative.conftest import Pair
from tests.support import MODELS
from tests.support.embedded import TREE, embedded_spec
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.targets.adapters import make_adapter, make_draft_adapter, merged_checkpoints, merged_tokens

SHORT, LONG = SamplingParams(16, 0.0), SamplingParams(120, 0.0)


def accepted(request: Request) -> list[int]:
    """Drafts accepted by the request's rounds that verified drafts."""
    return [k for k, count in enumerate(request.acceptance_histogram) for _ in range(count)]


def run(engine: LocalEngine, prompts: list[list[int]], names: list[str]) -> list[Request]:
    return engine.generate(prompts, [replace(LONG, adapter=name) for name in names])


def test_an_adapter_whose_draft_fails_stops_drafting_alone(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "noise", MODELS / "target", 3, size=2.0)
    spec = embedded_spec(TREE)
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=LoraConfig({"noise": str(adapter)})))
    prompts = tokenized(held_out_prompts(4))
    with local_engine(spec) as engine:
        alone = run(engine, prompts, [""] * 4)
        both = run(engine, prompts + prompts, ["noise"] * 4 + [""] * 4)
        (noise,) = engine.scheduler.adapters.loaded
        of_noise, others = both[:4], both[4:]
        assert noise.draft.has_failed
        assert FEW_ROUNDS <= noise.draft.num_rounds == sum(len(accepted(each)) for each in of_noise) < 2 * FEW_ROUNDS
        expected = merged_tokens(MODELS / "target", adapter, prompts, LONG.max_tokens, -1)
        assert [request.output for request in of_noise] == expected
        assert [request.output for request in others] == [request.output for request in alone]
        assert list(map(accepted, others)) == list(map(accepted, alone)), "they draft as before"
        assert sum(map(sum, map(accepted, others))) > 2 * sum(map(len, map(accepted, others)))
        short = replace(LONG, max_tokens=8, adapter="noise")
        later = engine.generate(prompts[:1] * PROBE_EVERY, [short] * PROBE_EVERY)
        assert sum(bool(accepted(request)) for request in later) == 1, "one request of many looks again"


@pytest.mark.parametrize("is_right", [True, False])
def test_a_failed_draft_is_tried_again_until_it_guesses(is_right: bool) -> None:
    fit = DraftFit()
    assert fit.is_wanted()
    for _ in range(FEW_ROUNDS):
        assert not fit.judge()
        fit.count(0)
    assert fit.judge() and not fit.is_wanted()
    wanted = [fit.is_wanted() for _ in range(PROBE_EVERY)]
    assert sum(wanted) == 1
    for _ in range(FEW_ROUNDS):
        fit.count(int(is_right))
    assert fit.judge() != is_right and fit.is_wanted() == is_right
    assert (fit.num_rounds, fit.num_accepted) == (2 * FEW_ROUNDS, FEW_ROUNDS * is_right)


@pytest.mark.parametrize(("method", "ranks"), [("chain", 1), ("tree", 1), ("tree", 2), ("static", 1)])
def test_an_adapter_of_the_draft_drafts_what_the_merged_draft_drafts(
    pair: Pair, tmp_path: Path, method: str, ranks: int
) -> None:
    """Beside requests without adapters, and with one that changes the target alone."""
    speculative = {"chain": pair.chain(), "tree": pair.tree(), "static": pair.chain(adaptive=False)}[method]
    plain = make_adapter(tmp_path / "plain", pair.target, 4)
    both = make_draft_adapter(make_adapter(tmp_path / "both", pair.target, 5), pair.eagle, 6, size=0.02)
    lora = LoraConfig({"plain": str(plain), "both": str(both)}, 2)
    prompts, found = pair.prompts, dict[str, list[Request]]()
    spec = pair.spec(speculative, tensor_parallel=ranks)
    with local_engine(dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=lora))) as engine:
        jobs = [(name, prompt) for prompt in prompts for name in ("", "plain", "both")]
        done = engine.generate([prompt for _, prompt in jobs], [replace(SHORT, adapter=name) for name, _ in jobs], 5)
        for (name, _), request in zip(jobs, done, strict=True):
            found.setdefault(name, []).append(request)
    target, draft = merged_checkpoints(pair.target, pair.eagle, both, tmp_path / "merged")
    without, merged = pair.spec(speculative), dataclasses.replace(pair, target=target, eagle=draft)
    of_merged = {"chain": merged.chain(), "tree": merged.tree(), "static": merged.chain(adaptive=False)}[method]
    for name, expected_spec in (("", without), ("both", merged.spec(of_merged))):
        with local_engine(expected_spec) as engine:
            expected = engine.generate(prompts, SHORT)
        assert [each.output for each in found[name]] == [each.output for each in expected]
        assert list(map(accepted, found[name])) == list(map(accepted, expected))
        assert sum(map(sum, map(accepted, expected))) > 0


def test_an_adapter_of_a_drafts_head_is_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    adapter = make_draft_adapter(make_adapter(tmp_path / "a", pair.target, 5), pair.eagle3, 6)
    tensors = load_file(adapter / "draft" / WEIGHTS_FILE)
    module = "base_model.model.lm_head"
    tensors |= {f"{module}.lora_A.weight": torch.ones(8, 64), f"{module}.lora_B.weight": torch.ones(40, 8)}
    save_file(tensors, adapter / "draft" / WEIGHTS_FILE)
    spec = pair.spec(SpeculativeConfig(str(pair.eagle3), "eagle3", 3, 1, 4))
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=LoraConfig({"a": str(adapter)})))
    with pytest.raises(
        ValueError, match=r"a/draft: does not fit; lm_head is of a layer .* may change down_proj, fc, gate"
    ):
        check_weights(spec, plan_engine(spec))
