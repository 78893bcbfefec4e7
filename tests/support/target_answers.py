"""What every own class of a target must show: greedy answers equal to transformers' beside heads of random weights, on
two ranks, after cached prefixes, and with too few pages for all requests."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from speculative.build import EngineSpec
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from tests.support.tiny_models import make_eagle3
from tests.workers.models.test_targets import by_transformers, by_us, prompts, requests_of, worker_of
from workers.config import ModelSource
from workers.models.loading import read_target_config
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request, RequestOutput

CHAIN, TREE = (3, 1, 4), (3, 4, 12)
FEW_PAGES = 40  # of 4 tokens: the longest request takes 27, all of them 54 and more


def check_trees_on_ranks(target: Path, head: Path, tensor_parallel: int = 2) -> None:
    """Compare trees of an EAGLE-3 head on several ranks, where requests must give way to each other."""
    tree = drafted(target, head, TREE)
    found = requests_of(target, tensor_parallel, tree, FEW_PAGES)
    assert [request.output for request in found] == by_transformers(target)
    assert sum(request.num_preemptions for request in found) > 0


def check_chains_and_cached_prefixes(target: Path, head: Path) -> None:
    """Compare chains of an EAGLE-3 head; and plain decoding of prompts that are asked twice."""
    expected = by_transformers(target)
    assert by_us(target, speculative=drafted(target, head, CHAIN)) == expected
    twice = requests_of(target, repeats=2)
    assert [request.output for request in twice] == expected * 2
    assert all(request.cached_tokens for request in twice[len(expected) + 1 :])  # the first prompt fills no page


def check_logprobs(
    target: Path, tensor_parallel: int = 1, speculative: SpeculativeConfig | None = None, like: Path | None = None
) -> None:
    """Compare the five best log-probabilities of each greedy token with those of transformers' model in `like`. They
    differ where answers of a random model do not: some say one token over and over."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    worker = worker_of(target, tensor_parallel=tensor_parallel)
    sampling = SamplingParams(16, 0.0, logprobs=5)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts())]
    found: dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]] = {each.request_id: [] for each in requests}

    def listen(output: RequestOutput) -> None:
        found[output.request.request_id] += [(item.top_ids, item.top_logprobs) for item in output.logprobs or ()]

    with local_engine(EngineSpec(worker, speculative)) as engine:
        engine.run(requests, 4, listen)
    model = AutoModelForCausalLM.from_pretrained(like or target, dtype=torch.float32, attn_implementation="eager")
    for request in requests:
        text = torch.tensor([[*request.prompt, *request.output]])
        with torch.no_grad():  # without a mask Moshi's tokens see later ones
            logits = model(text, attention_mask=torch.ones_like(text)).logits[0, len(request.prompt) - 1 : -1]
        ids, ours = (torch.tensor(column) for column in zip(*found[request.request_id], strict=True))
        assert ids[:, 0].tolist() == request.output
        # float32 sums in another order: at most 1e-4 of all models tried
        torch.testing.assert_close(ours, logits.float().log_softmax(-1).gather(1, ids), atol=1e-3, rtol=0)


def drafted(target: Path, head: Path, shape: tuple[int, int, int]) -> SpeculativeConfig:
    """A random head that also reads the output of the last layer."""
    ids = [0, 2, read_target_config(ModelSource(path=str(target)), 1).num_layers]
    make_eagle3(head, target, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    return SpeculativeConfig(str(head), "eagle3", *shape)


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
