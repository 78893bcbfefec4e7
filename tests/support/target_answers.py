"""What every own class of a target must show: greedy answers equal to transformers' beside heads of random weights, on
two ranks, after cached prefixes, and with too few pages for all requests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.scheduling.plan import SamplingParams, TokenLogprobs
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.support.tiny_models import make_eagle3
from tests.workers.models.test_targets import by_transformers, by_us, prompts, requests_of, worker_of

CHAIN, TREE = (3, 1, 4), (3, 4, 12)
FEW_PAGES = 40  # of 4 tokens: the longest request takes 27, all of them 54 and more


def check_trees_on_ranks(target: Path, head: Path, tensor_parallel: int = 2) -> None:
    """Compare trees of an EAGLE-3 head on several ranks, where requests must give way to each other."""
    tree = drafted(target, head, TREE)
    found = requests_of(target, tensor_parallel, tree, FEW_PAGES)
    outputs = [request.output for request in found]
    assert outputs == by_transformers(target, outputs)
    assert sum(request.num_preemptions for request in found) > 0


def check_chains_and_cached_prefixes(target: Path, head: Path) -> None:
    """Compare chains of an EAGLE-3 head; and plain decoding of prompts that are asked twice."""
    drafts = by_us(target, speculative=drafted(target, head, CHAIN))
    expected = by_transformers(target, drafts)
    assert drafts == expected
    twice = requests_of(target, repeats=2)
    assert [request.output for request in twice] == expected * 2
    assert all(request.cached_tokens for request in twice[len(expected) + 1 :])  # the first prompt fills no page


@dataclass(frozen=True)
class ServedAnswer:
    """A greedy answer of an engine, and the five most likely tokens at each of its positions.

    ids: [tokens, 5] int64.
    logprobs: [tokens, 5] float32.
    """

    request: Request
    ids: Tensor
    logprobs: Tensor


def served_answers(
    worker: WorkerConfig,
    speculative: SpeculativeConfig | None = None,
    repeats: int = 1,
    stop_token_ids: tuple[int, ...] = (),
) -> list[ServedAnswer]:
    """Serve `prompts()`, four at once. repeats: how often each prompt is asked, all of them in turn."""
    torch.set_num_threads(1)
    sampling = SamplingParams(16, 0.0, logprobs=5, stop_token_ids=stop_token_ids)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts() * repeats)]
    found: dict[str, list[TokenLogprobs]] = {each.request_id: [] for each in requests}

    def listen(output: RequestOutput) -> None:
        found[output.request.request_id] += output.logprobs or ()

    with local_engine(EngineSpec(worker, speculative)) as engine:
        engine.run(requests, 4, listen)
    answers = []
    for request in requests:
        given = found[request.request_id]
        assert [each.logprob for each in given] == [each.top_logprobs[0] for each in given], "greedy"
        assert len(given) == len(request.output)
        ids, logprobs = (torch.tensor([getattr(each, name) for each in given]) for name in ("top_ids", "top_logprobs"))
        answers.append(ServedAnswer(request, ids, logprobs))
    return answers


def logits_of(model: Any, answer: ServedAnswer) -> Tensor:
    """Return transformers' logits [tokens, vocab] float32 before each token of the answer."""
    request = answer.request
    text = torch.tensor([[*request.prompt, *request.output]])
    with torch.no_grad():  # without a mask Moshi's tokens see later ones
        logits: Tensor = model(text, attention_mask=torch.ones_like(text)).logits[0, len(request.prompt) - 1 : -1]
    return logits.float()


def eager_model(target: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    # SDPA, which most models take by default, leaves soft caps out
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="eager")
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # grouped products in bfloat16 need sizes that 8 divides
    return model


def check_answers(answers: Sequence[ServedAnswer], target: Path) -> None:
    """Compare the five best log-probabilities of each greedy token with those of transformers' model in `target`. They
    differ where answers of a random model do not: some say one token over and over."""
    model = eager_model(target)
    for answer in answers:
        logits = logits_of(model, answer)
        assert answer.ids[:, 0].tolist() == answer.request.output
        # float32 sums in another order: at most 1e-4 of all models tried, whose logits were up to 30
        tolerance = 1e-3 + 1e-4 * float(logits.abs().max())
        torch.testing.assert_close(
            answer.logprobs, logits.log_softmax(-1).gather(1, answer.ids), atol=tolerance, rtol=0
        )


def check_logprobs(
    target: Path, tensor_parallel: int = 1, speculative: SpeculativeConfig | None = None, like: Path | None = None
) -> None:
    """See `check_answers`. like: transformers' model, if not `target`."""
    check_answers(served_answers(worker_of(target, tensor_parallel=tensor_parallel), speculative), like or target)


def check_bfloat16(answers: Sequence[ServedAnswer], target: Path) -> None:
    """Compare log-probabilities computed in bfloat16 with transformers' in float32 from the same weights. They may be
    wrong by four times as much as transformers' in bfloat16, in the mean: an AFMoE was by 2.7, others by at most 2."""
    exact, rounded = eager_model(target), eager_model(target, torch.bfloat16)
    ours, theirs = [], []
    for answer in answers:
        true, coarse = (logits_of(model, answer).log_softmax(-1).gather(1, answer.ids) for model in (exact, rounded))
        ours.append((answer.logprobs - true).abs().flatten())
        theirs.append((coarse - true).abs().flatten())
    error, allowed = float(torch.cat(ours).mean()), 4 * float(torch.cat(theirs).mean())
    assert error <= allowed, (error, allowed)


def drafted(target: Path, head: Path, shape: tuple[int, int, int]) -> SpeculativeConfig:
    """A random head that also reads the output of the last layer."""
    ids = [0, 2, read_target_config(ModelSource(path=str(target)), 1).num_layers]
    make_eagle3(head, target, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    return SpeculativeConfig(str(head), "eagle3", *shape)


def head_for(config: ModelConfig, folder: Path) -> Path:
    """A random EAGLE-3 head that also reads the output of the last layer."""
    fields: dict[str, float] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_attention_heads": 2,
    }
    fields |= {"num_key_value_heads": 1, "vocab_size": config.vocab_size, "rms_norm_eps": 1e-5}
    fields |= {"max_position_embeddings": config.max_position}
    (folder / "sizes").mkdir()
    (folder / "sizes" / "config.json").write_text(json.dumps(fields))
    ids = [0, config.num_layers // 2, config.num_layers]
    return make_eagle3(folder / "head", folder / "sizes", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})


def as_text_part(folder: Path, architecture: str, prefix: str) -> Path:
    """Make a text model the text part of a model of images, with a tower. prefix: of its tensors' names."""
    inner = json.loads((folder / "config.json").read_text())
    outer = {name: inner.pop(name) for name in ("eos_token_id", "dtype")}
    config = {"architectures": [architecture], "text_config": inner} | outer
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(str(folder / "model.safetensors"))
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if "lm_head.weight" in tensors and prefix.startswith("language_model"):
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    for tower in ("vision_tower.x.weight", "model.multi_modal_projector.y.weight"):
        tensors[tower] = torch.zeros(3)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
