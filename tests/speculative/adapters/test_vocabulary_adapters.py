"""Adapters of a target's embedding and vocabulary head: greedy tokens of peft's models, in float32."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.speculative.build import check_weights, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, LoraConfig, ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.lora import embedding
from aerie.workers.lora.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from aerie.workers.lora.layers import AdaptedMethod, AdapterRows
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.speculative.adapters.conftest import GREEDY, Adapted, of
from tests.speculative.adapters.test_adapter_files import PACKED, spec_of
from tests.speculative.adapters.test_adapters import load, speculation, tokens
from tests.speculative.conftest import EOS
from tests.speculative.drafts.test_trained_mtp import MODEL, prompts
from tests.speculative.requests.test_prompt_logprobs import rows_of
from tests.speculative.test_graphs_while_serving import TOKENS
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.slow import slow
from tests.support.targets.adapters import adapted_model, make_adapter, merged_tokens
from tests.support.tiny_models import VOCAB, make_target

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:Model (has|with) `tie_word_embeddings=True`"
)  # peft
BOTH = ["embed_tokens", "lm_head"]
SETTINGS: dict[str, dict[str, Any]] = {
    "head": {"r": 1, "target_modules": ["lm_head", "q_proj"]},
    "embedding": {"r": 5, "use_rslora": True, "target_modules": ["embed_tokens"]},
    "both": {
        "target_modules": [*BOTH, "v_proj", "down_proj"],
        "rank_pattern": {"lm_head": 20, "embed_tokens": 3},
        "alpha_pattern": {"embed_tokens": 30},
    },
}


@pytest.fixture(scope="module")
def vocabulary(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Some prompts of `adapted` with the adapters of SETTINGS, and one that changes layers only."""
    pair = dataclasses.replace(adapted.pair, prompts=adapted.pair.prompts[:3])
    folder, target = tmp_path_factory.mktemp("vocabulary"), pair.target
    made = {name: make_adapter(folder / name, target, i, **each) for i, (name, each) in enumerate(SETTINGS.items())}
    expected = {name: adapted.expected[name][:3] for name in ("", "small")} | {
        name: merged_tokens(target, path, pair.prompts, GREEDY.max_tokens, EOS) for name, path in made.items()
    }
    assert len({str(tokens) for tokens in expected.values()}) == len(expected), "each adapter changes the text"
    paths = {name: str(path) for name, path in made.items()} | {"small": adapted.adapters["small"]}
    return Adapted(pair, paths, expected)


@pytest.mark.parametrize(
    ("method", "ranks"), [("none", 1), *slow(("chain", 1), ("tree", 1), ("suffix", 1), ("none", 2), ("tree", 2))]
)
def test_requests_with_and_without_adapters_of_the_vocabulary_share_steps(
    vocabulary: Adapted, method: str, ranks: int
) -> None:
    """Prompts in chunks, pages for few requests; the tables hold fewer adapters than the requests have."""
    lora = LoraConfig(vocabulary.adapters, 3, 32)
    with local_engine(vocabulary.spec(speculation(vocabulary.pair, method), lora, ranks, pages=30)) as engine:
        assert tokens(engine, vocabulary, list(vocabulary.expected)) == vocabulary.expected
        assert engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("method", ["none", *slow("tree")])
def test_captured_steps_contain_the_adapters_of_the_vocabulary(vocabulary: Adapted, method: str) -> None:
    with local_engine(
        vocabulary.spec(speculation(vocabulary.pair, method), LoraConfig(vocabulary.adapters, 4, 20))
    ) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        graphs = GraphedDecoding(
            worker._strategy,
            worker._slots,
            (1, 2, 4, 6),
            256,
            recorder,
            TOKENS,
            has_row_index=True,  # type: ignore[arg-type]
        )
        with torch.inference_mode():
            graphs.capture(GraphCapture(limit_s=1e9), SOLO)
        worker._strategy = graphs
        assert tokens(engine, vocabulary, list(vocabulary.expected)) == vocabulary.expected
        assert recorder.num_replays > 0


def test_steps_without_adapters_launch_nothing_for_them(vocabulary: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do drafts that have the target's embedding or head, in any step."""

    def refuse(*arguments: object) -> Tensor:
        raise AssertionError("launched")

    with local_engine(vocabulary.spec(vocabulary.pair.tree(), LoraConfig(vocabulary.adapters, 4, 20))) as engine:
        monkeypatch.setattr(embedding, "add_lora_embedding", refuse)
        monkeypatch.setattr(AdapterRows, "rows_of", refuse)
        monkeypatch.setattr(AdaptedMethod, "_in_one_launch", refuse)
        assert tokens(engine, vocabulary, [""]) == {"": vocabulary.expected[""]}


@pytest.mark.parametrize(
    ("architecture", "ranks", "settings"),
    [
        ("Llama", 2, {"tie_word_embeddings": True, "vocab_size": VOCAB + 1}),  # shards of unequal sizes
        ("Gemma3", 1, {}),  # a factor on the embedding; tied
        *slow(
            ("Llama", 2, {"vocab_size": VOCAB + 1}),
            ("Gemma2", 2, {}),  # a cap on the logits
            ("Gemma4", 1, {}),  # another embedding per layer
            ("Granite", 1, {}),  # a divisor of the logits
            ("DeepseekV2", 2, {}),
            ("Qwen3_5", 1, {"tie_word_embeddings": True}),
        ),
    ],
)
@pytest.mark.parametrize("modules", [["lm_head"], BOTH])
def test_families_give_the_tokens_of_the_adapter_as_trained(
    tmp_path: Path, architecture: str, ranks: int, settings: dict[str, Any], modules: list[str]
) -> None:
    """With tied weights, peft's merge changes embedding and head by the adapter of each. Its model as trained changes
    the named one only, which is what is served."""
    target = make_target(tmp_path / "target", architecture=architecture, **settings)
    adapter = make_adapter(tmp_path / "adapter", target, 3, target_modules=modules)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (37, 5, 22)]
    expected = {
        name: merged_tokens(target, path, prompts, GREEDY.max_tokens, EOS, merges=False)
        for name, path in (("", None), ("a", adapter))
    }
    assert expected[""] != expected["a"]
    with local_engine(spec_of(target, LoraConfig({"a": str(adapter)}), tensor_parallel=ranks)) as engine:
        for names in (("", "", ""), ("a", "a", "a"), ("", "a", "")):
            requests = engine.generate(prompts, [of(name) for name in names])
            assert [r.output for r in requests] == [expected[name][i] for i, name in enumerate(names)]


@pytest.mark.parametrize("modules", [*([each] for each in BOTH), *slow(BOTH)])
def test_adapters_of_tied_modules_may_be_tied(tmp_path: Path, modules: list[str]) -> None:
    """peft then writes the matrices of both, also if one was named."""
    target = make_target(tmp_path / "target", tie_word_embeddings=True, num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "adapter", target, 3, target_modules=modules, ensure_weight_tying=True)
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    expected = merged_tokens(target, adapter, prompts, 12, EOS, merges=False)
    assert expected != merged_tokens(target, None, prompts, 12, EOS)
    with local_engine(spec_of(target, LoraConfig({"a": str(adapter)}))) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


@pytest.mark.parametrize(("method", "ranks"), [("none", 1), ("tree", 2)])
def test_log_probabilities_are_those_of_the_merged_model(vocabulary: Adapted, method: str, ranks: int) -> None:
    """Log-probabilities of prompt tokens and of answers, while requests with other adapters and without one run."""
    prompt, found = vocabulary.pair.prompts[0], dict[str, dict[int, float]]()
    settings = {name: replace(of(name), logprobs=0, prompt_logprobs=1) for name in ("", "both", "small")}
    requests = [Request(name, list(prompt), sampling) for name, sampling in settings.items()]

    def listen(output: RequestOutput) -> None:
        own = found.setdefault(output.request.sampling.adapter, {})
        if output.prompt_logprobs is not None:
            own.update({position: row[0] for position, row in rows_of(output.prompt_logprobs, 1).items()})
        for each in output.logprobs or ():
            own[len(own) + 1] = each.logprob

    lora = LoraConfig(vocabulary.adapters, 4, 20)
    with local_engine(vocabulary.spec(speculation(vocabulary.pair, method), lora, ranks)) as engine:
        engine.run(requests, 3, listen)
    for request in requests:
        assert request.output == vocabulary.expected[request.request_id][0]
        path, text = vocabulary.adapters.get(request.request_id), torch.tensor(prompt + request.output)
        with torch.inference_mode():
            logits = adapted_model(vocabulary.pair.target, None if path is None else Path(path))(text[None]).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, text[1:, None])[:, 0]
        own = found[request.request_id]
        torch.testing.assert_close(torch.tensor([own[i + 1] for i in range(len(own))]), expected, rtol=0, atol=2e-4)


FORMS: dict[str, Callable[[str], str | None]] = {
    "peft": lambda name: name,
    "without copies": lambda name: None if "base_layer" in name else name,
    "resized": lambda name: name.replace(".base_layer", ""),
    "bare": lambda name: name.removeprefix("base_model.model."),
    "named": lambda name: re.sub(r"(lora_embedding_[AB])$|(lora_[AB])\.", r"\1\2.default.", name).rstrip("."),
    "tinker": lambda name: name.replace("model.lm_head.lora", "model.model.unembed_tokens.lora"),
}


@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_published_forms_are_served(vocabulary: Adapted, tmp_path: Path, ranks: int) -> None:
    """Copies of the base's weights in them may be rounded."""
    source = Path(vocabulary.adapters["both"])
    tensors, folders = load_file(source / WEIGHTS_FILE), {}
    assert sum(".base_layer." in name for name in tensors) == 2, "peft saves the base's beside the matrices"
    for number, (form, rename) in enumerate(FORMS.items()):
        renamed = {rename(name): tensor for name, tensor in tensors.items()}
        rounded = {
            name: tensor.bfloat16() if "base_layer" in str(name) and number % 2 else tensor
            for name, tensor in renamed.items()
            if name is not None
        }
        folder = shutil.copytree(source, tmp_path / str(number))
        save_file(rounded, folder / WEIGHTS_FILE)
        if form == "tinker":
            config = (folder / CONFIG_FILE).read_text()
            (folder / CONFIG_FILE).write_text(config.replace("lm_head", "unembed_tokens"))
        folders[form] = str(folder)
    prompt = vocabulary.pair.prompts[0]
    with local_engine(vocabulary.spec(lora=LoraConfig(folders, 4, 32), ranks=ranks)) as engine:
        requests = engine.generate([prompt] * len(folders), [of(name) for name in folders])
    assert {name: r.output for name, r in zip(folders, requests, strict=True)} == dict.fromkeys(
        folders, vocabulary.expected["both"][0]
    )


@pytest.mark.parametrize("row", [0, VOCAB - 1])
def test_a_copy_that_was_trained_is_refused(vocabulary: Adapted, tmp_path: Path, row: int) -> None:
    """One number of one row differs, which is on either rank; the running engine has changed nothing."""
    folder = shutil.copytree(vocabulary.adapters["both"], tmp_path / "trained")
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors["base_model.model.lm_head.base_layer.weight"][row, 5] *= 1.02
    save_file(tensors, folder / WEIGHTS_FILE)
    with local_engine(vocabulary.spec(lora=LoraConfig({}, 1, 32), ranks=2)) as engine:
        assert "lm_head.base_layer.weight differs from the base's weight" in load(engine, "trained", str(folder))
        assert not engine.scheduler.adapters.loaded


def test_copies_of_a_tied_head_are_those_of_its_embedding(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tie_word_embeddings=True, num_hidden_layers=1)
    adapter = make_adapter(tmp_path / "adapter", target, 3, target_modules=BOTH)
    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    spec = spec_of(target, LoraConfig({"a": str(adapter)}))
    check_weights(spec, plan_engine(spec))
    tensors = load_file(adapter / WEIGHTS_FILE)
    tensors["base_model.model.lm_head.base_layer.weight"][7] *= 2
    save_file(tensors, adapter / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="lm_head.base_layer.weight differs from the base's weight"):
        check_weights(spec, plan_engine(spec))


@pytest.mark.parametrize("packed", ["gguf"])
def test_copies_of_a_quantised_base_are_refused(tmp_path: Path, packed: str) -> None:
    source = make_target(tmp_path / "source", num_hidden_layers=1)
    adapter = make_adapter(tmp_path / "adapter", source, 5, target_modules=BOTH)
    folder, _ = PACKED[packed](source, tmp_path / "packed")
    spec = spec_of(folder, LoraConfig({"a": str(adapter)}))
    with pytest.raises(
        ValueError, match="cannot be compared with the base's, .*, save the adapter with save_embedding"
    ):
        check_weights(spec, plan_engine(spec))
    without_copies(adapter)
    check_weights(spec, plan_engine(spec))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", ["gguf", "awq", "fp8-blocks"])
def test_packed_weights_take_adapters_of_the_vocabulary(tmp_path: Path, packed: str, tied: bool) -> None:
    source = make_target(tmp_path / "source", num_hidden_layers=2, tie_word_embeddings=tied)
    adapter = make_adapter(tmp_path / "adapter", source, 5, target_modules=BOTH)
    folder, plain = PACKED[packed](source, tmp_path / "packed")
    without_copies(adapter)
    prompts = [[5, 6, 7], [*range(8, 49)], [50, 60, 70, 80]]
    expected = merged_tokens(plain, adapter, prompts, GREEDY.max_tokens, EOS, merges=False)
    assert expected != merged_tokens(plain, None, prompts, GREEDY.max_tokens, EOS)
    with local_engine(spec_of(folder, LoraConfig({"a": str(adapter)}), tensor_parallel=2)) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


def without_copies(adapter: Path) -> None:
    """Save the adapter without the base's weights."""
    tensors = load_file(adapter / WEIGHTS_FILE)
    save_file({name: each for name, each in tensors.items() if "base_layer" not in name}, adapter / WEIGHTS_FILE)


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 128}])
def test_drafts_have_the_bases_embedding_and_head(tmp_path: Path, settings: dict[str, int]) -> None:
    """A module for multi-token prediction shares the target's, also in part: requests without adapters draft as in an
    engine without adapters, and others get their adapter's tokens."""
    adapter = make_adapter(tmp_path / "adapter", MODEL, 3, size=0.2, target_modules=BOTH)
    few, sampling = prompts()[:2], SamplingParams(12, 0.0, stop_token_ids=(2,))
    expected = merged_tokens(MODEL, adapter, few, 12, 2, merges=False)
    source, found = ModelSource(str(MODEL), dtype="float32", device="cpu"), dict[bool, list[Request]]()
    for serves_adapters in (False, True):
        spec = spec_of(MODEL, LoraConfig({"a": str(adapter)}, 1), model=source)
        if not serves_adapters:
            spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=None))
        drafts = SpeculativeConfig("", "mtp", 3, 1, 4, adaptive=False, **settings)  # type: ignore[arg-type]
        with local_engine(dataclasses.replace(spec, speculative=drafts)) as engine:
            names = ["", "a"] if serves_adapters else [""]
            jobs = [(name, prompt) for prompt in few for name in names]
            done = engine.generate([p for _, p in jobs], [replace(sampling, adapter=name) for name, _ in jobs])
            found[serves_adapters] = [each for each, job in zip(done, jobs, strict=True) if not job[0]]
            adapted = [each.output for each, job in zip(done, jobs, strict=True) if job[0]]
    assert adapted == expected and expected != [each.output for each in found[True]]
    for each, alone in zip(found[True], found[False], strict=True):
        assert each.output == alone.output and each.acceptance_histogram == alone.acceptance_histogram
