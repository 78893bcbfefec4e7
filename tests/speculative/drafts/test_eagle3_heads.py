"""EAGLE-3 heads of every published kind compute what their modules are published to, and are called as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aerie.attention.config import DraftAttention
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.registry import choose_backends
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.speculation import draft_choices
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.forward_context import Attending
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.runner.backends import ModelShape
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import DEEP, Pair
from tests.support.drafts.eagle3_reference import Head, Reference, save_head
from tests.support.thread_group import on_ranks
from tests.support.tiny_models import VOCAB

CPU = torch.device("cpu")
LENGTH, STEPS, PAGE_SIZE, NUM_PAGES = 13, 4, 4, 9


@pytest.fixture(scope="module")
def pair(deep_pair: Pair) -> Pair:
    return deep_pair


def flat(head: Head, **more: Any) -> dict[str, Any]:
    """SafeAILab's and SpecForge's config.json."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = head.layer_config() | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_vocab}
    config |= {name: True for name in flags if getattr(head, name)} | {"bias": head.fc_bias}
    return config | {"target_hidden_size": head.target_hidden} | more


def speculators(head: Head, kind: str = "llama", **more: Any) -> dict[str, Any]:
    """RedHat's."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.draft_vocab,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/model"}},
        "transformer_layer_config": head.layer_config() | {"model_type": kind},
        **more,
    }


def served(draft: Path, target: Path, group: TPGroup = SOLO, device: torch.device = CPU) -> DraftRunner:
    """The head in `draft` in float32 as an engine loads it, with a pool and the device's attention."""
    source = ModelSource(path=str(target), dtype="float32")
    config = read_target_config(source, group.size)
    method = read_draft("eagle3", str(draft), str(target), config)
    decoder = load_target(source, config, group, device, 64, method.capture)
    model = load_draft(method, source, decoder, group, device, 64)
    pool = KVPool(method.model.kv_groups(group.size, torch.float32), NUM_PAGES, PAGE_SIZE, device)
    shape = ModelShape(method.model, group.size, torch.float32, PAGE_SIZE, Capability.of(device))
    return DraftRunner(model, pool, choose_backends(draft_choices(DraftAttention(), shape, tree=True)))


def drafted(runner: DraftRunner, features: Tensor, ids: Tensor, chain: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return what `Reference.draft` gives, in two chunks of which the last row alone attends, then one token a step."""
    device = features.device
    table = torch.arange(1, NUM_PAGES + 1, dtype=torch.int32, device=device)[None]
    split = 5
    for first, end in ((0, split), (split, LENGTH)):
        chunks = PrefillBatch.from_lists([first], [end - first], table)
        attending = Attending(chunks.last_row_indices, None, chunks.last_rows())
        context = runner.context(None, None, chunks, attending)
        state = runner.model.extend(ids[first:end], features[first:end], context)
    assert state.shape[0] == 1
    states, logits = [state[0]], [runner.model.logits(state)[0]]
    length = torch.tensor([LENGTH], dtype=torch.int32, device=device)
    for step, token in enumerate(chain, start=1):
        mask = causal_mask(1, step, device)[:, -1:]
        decode = DecodeBatch(Mode.DRAFT_DECODE, 1, step, length, mask, table, LENGTH + step)
        state = runner.model.step(token[None], state.clone(), runner.context(decode))
        states.append(state[0])
        logits.append(runner.model.logits(state)[0])
    return states, logits


def check(
    pair: Pair,
    head: Head,
    draft: Path,
    tensors: dict[str, Tensor],
    device: torch.device = CPU,
    tolerance: float = 1e-4,  # float32, sums in another order: within 1e-5 of values of about 1
) -> None:
    """States and logits after a text and along a chain are the reference's."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (LENGTH + STEPS,), generator=generator)
    features = torch.randn(LENGTH, max(head.num_captured, 1) * head.target_hidden, generator=generator)
    embedding = load_file(str(pair.target / "model.safetensors"))["model.embed_tokens.weight"]
    runner = served(draft, pair.target, device=device)
    with torch.inference_mode():
        ours = drafted(runner, features.to(device), ids[:LENGTH].to(device), ids[LENGTH:].to(device))
        theirs = Reference(head, tensors, embedding).draft(features, ids[:LENGTH], ids[LENGTH:])
    for states, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.stack(states).cpu(), torch.stack(expected), atol=tolerance, rtol=tolerance)


HEADS: dict[str, tuple[Head, Callable[..., dict[str, Any]]]] = {
    "as in the paper": (Head(), flat),
    "norm_before_residual": (Head(norm_before_residual=True), speculators),
    "norm_before_fc": (Head(norm_before_residual=True, norm_before_fc=True), speculators),
    "fc_norm": (Head(fc_norm=True), flat),
    "norm_output": (Head(norm_output=True), flat),
    "EAGLE-3.1": (Head(fc_norm=True, norm_output=True), flat),
    "all flags": (
        Head(**dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True)),
        flat,
    ),
    "two layers": (Head(layers=2), speculators),
    "three layers, EAGLE-3.1": (Head(layers=3, fc_norm=True, norm_output=True, norm_before_residual=True), flat),
    "narrower than the target": (Head(hidden=32, heads=2, kv_heads=1, own_embedding=True, fc_norm=True), flat),
    "wider than the target": (Head(hidden=96, own_embedding=True, norm_before_fc=True, layers=2), flat),
    "with its own embedding": (Head(own_embedding=True), flat),
    "with biases": (Head(attention_bias=True, fc_bias=True), flat),
    "with a projection of two layers": (Head(num_captured=2), flat),
    "without a projection": (Head(num_captured=0, norm_output=True), flat),
}


@pytest.mark.parametrize("name", HEADS)
def test_states_and_logits_are_those_of_the_published_module(pair: Pair, tmp_path: Path, name: str) -> None:
    head, tensors = HEADS[name][0], HEADS[name][0].tensors()
    check(pair, head, save_head(tmp_path / "d", config_of(name), tensors), tensors)


def config_of(name: str) -> dict[str, Any]:
    """config.json of one of HEADS."""
    head, layout = HEADS[name]
    config = layout(head)
    if head.num_captured != 3:
        config["eagle_config"] = {"use_aux_hidden_state": bool(head.num_captured)}
        if head.num_captured:
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 5][: head.num_captured]
    return config


def test_layers_of_qwen3_have_norms_on_their_heads(pair: Pair, tmp_path: Path) -> None:
    head = Head(qk_norm=True, norm_before_residual=True, layers=2)
    tensors = head.tensors()
    check(pair, head, save_head(tmp_path / "a", speculators(head, "qwen3"), tensors), tensors)
    config = flat(head, architectures=["Eagle3Qwen3ForCausalLM"])
    check(pair, head, save_head(tmp_path / "b", config, tensors), tensors)


RENAMED: dict[str, dict[str, str]] = {
    "SafeAILab, SpecForge": {"layers.0.": "midlayer.", "layers.1.": "layers.1."},
    "with model. before all": {"": "model."},
    "TensorRT-LLM": {
        "layers.0.": "midlayer.0.",
        "layers.1.input_layernorm.": "midlayer.1.hidden_norm.",
        "layers.1.": "midlayer.1.",
    },
    "older SGLang": {
        "layers.0.": "midlayer.",
        "layers.1.input_layernorm.": "additional_layers.0.hidden_norm.",
        "layers.1.": "additional_layers.0.",
        "fc_norm.0.": "aux_norm_low.",
        "fc_norm.1.": "aux_norm_mid.",
        "fc_norm.2.": "aux_norm_high.",
    },
}


@pytest.mark.parametrize("layout", RENAMED)
def test_every_published_name_of_a_tensor_is_known(pair: Pair, tmp_path: Path, layout: str) -> None:
    head = Head(layers=2, fc_norm=True)
    tensors = head.tensors()

    def rename(name: str) -> str:
        prefix = next((prefix for prefix in RENAMED[layout] if name.startswith(prefix)), None)
        return name if prefix is None else RENAMED[layout][prefix] + name.removeprefix(prefix)

    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    if layout == "with model. before all":
        renamed |= {"draft_id_to_target_id": renamed.pop("model.d2t"), "t2d": renamed.pop("model.t2d")}
    check(pair, head, save_head(tmp_path / "d", flat(head), renamed), tensors)


def test_safeailabs_pickle_of_one_layer_loads_whatever_its_config_says_of_layers(pair: Pair, tmp_path: Path) -> None:
    head = Head()
    tensors = head.tensors()
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    config = flat(head, architectures=["LlamaForCausalLM"], num_hidden_layers=40)
    check(pair, head, save_head(tmp_path / "d", config, renamed, pickle=True), tensors)


def test_a_pickle_of_anything_but_tensors_is_not_run(pair: Pair, tmp_path: Path) -> None:
    head = Head()
    folder = save_head(tmp_path / "d", flat(head), {"fc.weight": 3.5}, pickle=True)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is no dictionary of tensors; convert the checkpoint to safetensors"):
        served(folder, pair.target)


def test_nvidias_flags_stand_in_eagle_config(pair: Pair, tmp_path: Path) -> None:
    head = Head(norm_before_fc=True, norm_output=True)
    tensors = head.tensors()
    eagle_config = {
        "eagle_aux_hidden_state_layer_ids": [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
        "norm_before_fc": True,
        "return_hidden_post_norm": True,
    }
    config = flat(head, eagle_config=eagle_config, norm_before_fc=False, norm_output=None)
    check(pair, head, save_head(tmp_path / "d", config, tensors), tensors)


def test_speculators_files_that_do_not_say_normalise_before_the_residual(pair: Pair, tmp_path: Path) -> None:
    head = Head(norm_before_residual=True)
    tensors, config = head.tensors(), speculators(head)
    del config["norm_before_residual"]
    check(pair, head, save_head(tmp_path / "d", config, tensors), tensors)


@pytest.mark.slow  # answers: `tests.speculative.test_decoding`; drafts: `test_draft_oracle`
@pytest.mark.parametrize(
    "head,ids",
    [
        (Head(layers=2, fc_norm=True, norm_output=True), [1, 4, 5]),
        (Head(num_captured=0), []),
        (Head(), [2, 5, DEEP]),
    ],
    ids=["two layers", "final state", "last layer"],
)
@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 3, 10)], ids=["chain", "tree"])
def test_answers_are_those_without_a_draft(
    pair: Pair, tmp_path: Path, head: Head, ids: list[int], shape: tuple[int, int, int]
) -> None:
    """Greedy, float32, whatever the head proposes, with prompts in several chunks."""
    given = {"use_aux_hidden_state": bool(head.num_captured), "eagle_aux_hidden_state_layer_ids": ids}
    config = flat(head, eagle_config=given)
    draft = save_head(tmp_path / "d", config, head.tensors())

    def answers(speculative: SpeculativeConfig | None) -> list[Request]:
        with local_engine(pair.spec(speculative)) as engine:
            return engine.generate(pair.prompts[:5], SamplingParams(12, 0.0), 4)

    drafted = answers(SpeculativeConfig(str(draft), "eagle3", *shape))
    assert [request.output for request in drafted] == [request.output for request in answers(None)]


@pytest.mark.parametrize("head", [Head(draft_vocab=41, own_embedding=True), Head(layers=3, norm_output=True)])
def test_two_ranks_compute_what_one_does(pair: Pair, tmp_path: Path, head: Head) -> None:
    folder = save_head(tmp_path / "d", flat(head), head.tensors())
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, VOCAB, (LENGTH + STEPS,), generator=generator)
    features = torch.randn(LENGTH, 3 * head.target_hidden, generator=generator)

    def run(group: TPGroup) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            runner = served(folder, pair.target, group)
            states, logits = drafted(runner, features, ids[:LENGTH], ids[LENGTH:])
            shard = runner.model.lm_head.shard
            return torch.stack(states), shard.gather_logits(torch.stack(logits))

    alone = run(SOLO)
    for ours in on_ranks(2, run):
        for values, expected in zip(ours, alone, strict=True):
            # float32, sums in another order: within 1e-5 of values of about 1
            torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)
