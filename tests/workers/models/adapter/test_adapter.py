"""Decoders of transformers without a family of ours: the same tokens as transformers, or a refusal that says why."""

import json
import shutil
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.experts.route import Routing
from aerie.speculative.build import EngineSpec, check_weights, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.vocab import VocabShard
from aerie.workers.models.adapter.routers import logits_of
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import read_target_config
from tests.support.int_checkpoints import pack_quantized, quantise
from tests.support.known_models import known_config, make_known
from tests.support.slow import slow
from tests.support.target_answers import check_logprobs, head_for
from tests.support.tiny_models import make_eagle3
from tests.workers.layers.test_block_fp8 import quantised
from tests.workers.models.test_targets import by_us, check_greedy, worker_of

# Each shows something that the others do not have. So do those of the next tests: cohere (attention and MLP side by
# side, scaled logits, LayerNorm), olmo2 (norms over all heads) and phi3 (qkv in one matrix).
QUICK = (
    "afmoe",  # experts, gates on attention, norms before and after
    "gemma",  # scaled embeddings, norms of weight + 1
    "glm4",  # rotated pairs, gate_up in one matrix
    "gpt_neox",  # qkv in one matrix, a head of another name
    "mixtral",  # experts by other names
    "opt",  # learnt positions
    "youtu",  # values of another size than keys
)
# Their plans share nothing, or the vocabulary alone.
UNSHARED = ("opt", "gpt_oss", "phimoe")
WINDOWED = (
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi3",
    "cohere2",
    "phimoe",
    "olmo3",
    "exaone4",
    "granite_swa",
    "vaultgemma",
)


@pytest.mark.parametrize("kind", QUICK)
def test_logprobs_are_those_of_transformers(tmp_path: Path, kind: str, without_families: None) -> None:
    check_logprobs(make_known(tmp_path, kind))


def test_a_model_with_its_own_class_may_be_served_by_the_adapter(tmp_path: Path) -> None:
    target = make_known(tmp_path / "target", "llama", num_hidden_layers=2)
    source = ModelSource(path=str(target), device="cpu")
    assert read_target_config(source, 1).served_by is None
    assert read_target_config(replace(source, implementation="transformers"), 1).served_by is not None


@pytest.mark.parametrize("value_dim", [40, *slow(33)])
def test_values_may_be_longer_than_keys(tmp_path: Path, value_dim: int, without_families: None) -> None:
    target = make_known(tmp_path, "deepseek_v3", v_head_dim=value_dim, num_hidden_layers=2)
    check_greedy(target)


def read(folder: Path, kind: str, tensor_parallel: int = 1, **options: Any) -> ModelConfig:
    known_config(kind, **options).save_pretrained(folder)
    set_field(folder, "architectures", [architecture_of(kind)])
    return read_target_config(ModelSource(path=str(folder), device="cpu"), tensor_parallel)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # by transformers
def test_a_shared_expert_may_have_no_width(tmp_path: Path, without_families: None) -> None:
    target = make_known(tmp_path, "dots1", n_shared_experts=0, num_hidden_layers=2)
    check_greedy(target)


def test_attention_beside_a_draft_may_be_viewed(tmp_path: Path, without_families: None) -> None:
    """AFMoE views what attention returns, which several rows of a request give in another order of heads."""
    target = make_known(tmp_path, "afmoe", num_attention_heads=2)
    suffix = SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8)
    check_greedy(target, speculative=suffix)


def test_a_vocabulary_need_not_divide_among_ranks(tmp_path: Path, without_families: None) -> None:
    target = make_known(tmp_path, "ernie4_5", vocab_size=97)
    check_greedy(target, 2)


def test_a_class_that_never_ties_its_embeddings_is_not_tied(tmp_path: Path) -> None:
    target = make_known(tmp_path, "moshi", tie_word_embeddings=True, num_hidden_layers=2)
    check_greedy(target)


def test_a_field_that_refuses_none_does_not_refuse_its_model(tmp_path: Path) -> None:
    assert read(tmp_path, "modernbert-decoder").served_by is not None


def test_a_head_does_not_share_an_embedding_that_is_narrower_than_the_layers(tmp_path: Path) -> None:
    target = make_known(tmp_path / "t", "opt", hidden_size=96, word_embed_proj_dim=64)
    source = ModelSource(path=str(target), device="cpu")
    head = head_for(read_target_config(source, 1), tmp_path)
    spec = EngineSpec(WorkerConfig(source), SpeculativeConfig(str(head), "eagle3"))
    with pytest.raises(
        ValueError, match="hidden_size=96 but no embed_tokens.weight, and that of the target has width 64"
    ):
        check_weights(spec, plan_engine(spec))


def test_plans_that_do_not_fit_a_model_are_refused(tmp_path: Path) -> None:
    """Cohere's norms of all heads, of which transformers' plan gives a rank a part."""
    read(tmp_path, "cohere", 2)
    read(tmp_path, "cohere", 1, use_qk_norm=True)
    with pytest.raises(ValueError, match="tensor_parallel=2: transformers' plan .* does not fit it .*use tensor_p"):
        read(tmp_path, "cohere", 2, use_qk_norm=True)


def test_experts_of_another_activation_are_refused(tmp_path: Path) -> None:
    read(tmp_path, "olmoe")
    with pytest.raises(ValueError, match=r"experts \(model.layers.0.mlp.experts\) with an activation or gate that"):
        read(tmp_path, "olmoe", hidden_act="gelu")


@pytest.mark.parametrize("num_kv_heads", [3, 8])
def test_query_heads_that_cannot_share_their_keys_are_refused(tmp_path: Path, num_kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"has 4 query heads, no multiple of its {num_kv_heads} key and value heads"):
        read(tmp_path, "olmo", num_attention_heads=4, num_key_value_heads=num_kv_heads)


def test_angles_of_one_kind_of_layer_may_depend_on_the_length(tmp_path: Path, without_families: None) -> None:
    kinds = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    assert read(tmp_path, "gemma3_text", rope_parameters=kinds, max_position_embeddings=128).max_position == 128


def test_padding_is_masked_in_logits_of_more_rows_than_a_shard_has_tokens() -> None:
    """transformers' models call their head with a dimension more; rank 1 of 2 has 48 of 97 tokens."""
    logits = VocabShard(97, TPGroup(1, 2)).mask_padding(torch.zeros(1, 60, 49))
    assert logits.isinf().sum(1).tolist() == [[0] * 48 + [60]]


def test_an_embedding_that_does_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.normalize(super().forward(ids), dim=-1)

    from transformers.models.olmo import modeling_olmo

    monkeypatch.setattr(
        modeling_olmo.OlmoForCausalLM, "get_input_embeddings", lambda self: Normed(96, 64, device="meta")
    )
    with pytest.raises(ValueError, match="has an embedding of its own .Normed."):
        read(tmp_path, "olmo")


def test_constants_that_transformers_does_not_compute_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_known(tmp_path, "helium", num_hidden_layers=1)
    from transformers.models.helium import modeling_helium

    monkeypatch.setattr(modeling_helium.HeliumPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match="HeliumRotaryEmbedding whose .*inv_freq transformers does not compute"):
        by_us(target)


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [9.0] * 8, "attention_factor": 1.1}
LONG_ROPE |= {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "limit", "options"),
    [
        ("phi3", 128, {"rope_parameters": LONG_ROPE, "head_dim": 16, "original_max_position_embeddings": 128}),
        ("cohere", 256, {"rope_parameters": DYNAMIC}),
    ],
)
def test_angles_that_depend_on_the_length_are_served_up_to_the_original_one(
    tmp_path: Path, kind: str, limit: int, options: dict[str, Any]
) -> None:
    target = make_known(tmp_path, kind, **options)
    check_greedy(target)
    config = read_target_config(ModelSource(path=str(target), device="cpu"), 1)
    assert config.max_position == limit


@pytest.mark.parametrize("kind", ["phi3", pytest.param("cohere", marks=pytest.mark.slow)])
def test_linear_layers_of_4_bits_are_served(tmp_path: Path, kind: str) -> None:
    folder = quantise(make_known(tmp_path / "t", kind), tmp_path / "q", pack_quantized())
    check_greedy(folder, like=folder / "plain")


@pytest.mark.parametrize("kind", ["mixtral", *slow("olmoe")])  # weights that sum to 1, and others
def test_experts_of_4_bits_are_served(tmp_path: Path, kind: str) -> None:
    folder = quantise(make_known(tmp_path / "t", kind, num_hidden_layers=2), tmp_path / "q", pack_quantized())
    check_greedy(folder, like=folder / "plain")


def test_experts_of_fp8_are_served(tmp_path: Path) -> None:
    """MiniMax-M2 as it is published, with the names that its experts have in checkpoints."""
    source = make_known(tmp_path / "t", "minimax_m2", num_hidden_layers=2)
    names = load_file(str(source / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    folder = quantised(source, tmp_path / "q")
    check_greedy(folder, like=folder / "plain")


def test_logits_of_chosen_experts_choose_them_with_their_weights() -> None:
    """Weights over their sum; a weight of 0 may fall to any expert, and is 0 there."""
    chosen = torch.tensor([[3, 0], [1, 2], [2, 3]])
    weight = torch.tensor([[0.9, 1.6], [1e-9, 3.0], [0.5, 0.0]])
    found, scaled = logits_of(chosen, weight, Routing(4, 2, normalise=True)).choose()
    dense = torch.zeros(3, 4).scatter_add(1, found, scaled)
    torch.testing.assert_close(dense, torch.zeros(3, 4).scatter(1, chosen, weight / weight.sum(1, keepdim=True)))


@pytest.mark.slow  # a head that reads layers of gpt-oss: `test_prompts_longer_than_windows`
def test_a_head_that_reads_its_layers_changes_no_token(tmp_path: Path, without_families: None) -> None:
    target = make_known(tmp_path / "target", "granite", head_dim=16)
    ids = [0, 2, 4]  # the last is what leaves the layers
    head = make_eagle3(tmp_path / "head", target, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    alone = by_us(target)
    for shape in ((3, 1, 4), (3, 4, 12)):
        assert by_us(target, speculative=SpeculativeConfig(str(head), "eagle3", *shape)) == alone


def test_a_head_is_refused_where_layers_pass_on_several_streams(tmp_path: Path) -> None:
    """Gemma 3n's layers have four. The plan took such a head, and the engine failed as it started."""
    target = make_known(tmp_path / "target", "gemma3n_text")
    config = read_target_config(ModelSource(path=str(target), device="cpu"), 1)
    spec = EngineSpec(worker_of(target), SpeculativeConfig(str(head_for(config, tmp_path)), "eagle3"))
    with pytest.raises(ValueError, match="Gemma3nForCausalLM: the draft reads hidden states between layers"):
        check_weights(spec, plan_engine(spec))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("mamba", {}, "a MambaForCausalLM, which keeps a state"),
        ("bamba", {}, "a BambaForCausalLM, which keeps a state"),  # its infinity is an object in config.json
        ("stablelm", {}, "attention transformers does not let others replace"),
        ("bart", {}, "an encoder and a decoder"),
        ("bert", {}, "rows that see later ones"),
        ("bert", {"is_decoder": True}, "one tensor as cls.predictions.bias and as cls.predictions.decoder.bias"),
        ("roberta", {"is_decoder": True, "tie_word_embeddings": False}, "counts positions (roberta.embeddings) from"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}, "layers of conv"),
        ("minimax", {}, "layers of linear_attention"),
        ("deepseek_v32", {}, "layers of deepseek_sparse_attention"),
        ("emu3", {}, "model_type='emu3_text_model', of which transformers has no causal language model"),
        ("dbrx", {}, "reads numbers from the device in a pass"),
        ("doge", {}, "a mask of its own"),
        ("gemma4_assistant", {}, "a draft whose layers all read the KV of another model"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as error:
        read(tmp_path, kind, **options)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        ("create_causal_mask", {"and_mask_function": print}, "a mask of its own"),
        ("create_sliding_window_causal_mask", {"block_sequence_ids": torch.zeros(1)}, "a mask of its own"),
        ("create_chunked_causal_mask", {}, "attention by chunks"),
    ],
)
def test_masks_that_are_not_ours_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, given: dict[str, Any], words: str
) -> None:
    """transformers makes no mask for an attention function of another name than its own: nothing else tells of it."""
    from transformers.models.helium import modeling_helium

    plain = modeling_helium.HeliumModel.forward

    @wraps(plain)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        getattr(modeling_helium, function)(config=self.config, **given)
        return plain(self, *args, **options)

    monkeypatch.setattr(modeling_helium, function, lambda **_: None, raising=False)
    monkeypatch.setattr(modeling_helium.HeliumModel, "forward", forward)
    with pytest.raises(ValueError, match=words):
        read(tmp_path, "helium")


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    known_config("cohere").save_pretrained(tmp_path)
    set_field(tmp_path, "architectures", ["CohereForCausalLM"])
    set_field(tmp_path, "model_type", "unheard_of")
    set_field(tmp_path, "auto_map", {"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(ValueError, match="code that the checkpoint brings along"):
        read_target_config(ModelSource(path=str(tmp_path), device="cpu"), 1)


def test_what_attention_is_asked_is_read_from_the_model(tmp_path: Path, without_families: None) -> None:
    """A window that hides nothing is none. Phi-MoE says its window to its mask alone."""
    asked = {
        "mistral": ScoreRule(0.25, window=100),
        "phimoe": ScoreRule(0.25, window=100),
        "gemma2": ScoreRule(256**-0.5, window=100, soft_cap=50.0),
        "gpt_oss": ScoreRule(0.25, window=100, has_sinks=True),
        "granite": ScoreRule(1.0),
    }
    for kind, rule in asked.items():
        for window in (100, 256):
            known_config(kind, sliding_window=window).save_pretrained(tmp_path / kind)
            set_field(tmp_path / kind, "architectures", [architecture_of(kind)])
            config = read_target_config(ModelSource(path=str(tmp_path / kind), device="cpu"), 1)
            assert config.max_position == 256
            assert config.score_rule(0) == (rule if window == 100 else replace(rule, window=None)), kind
    assert config.score_rule(0) == config.score_rule(1)
    assert read_target_config(ModelSource(path=str(tmp_path / "gemma2"), device="cpu"), 1).score_rule(1).window is None


@pytest.mark.parametrize("kind", ["gpt_oss", *(pytest.param(kind, marks=pytest.mark.slow) for kind in WINDOWED)])
def test_prompts_longer_than_windows(tmp_path: Path, kind: str, without_families: None) -> None:
    """Alone, on two ranks, and by trees of a head, whose rows are further apart than positions."""
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6}
    target = make_known(tmp_path / "target", kind, **settings)
    check_logprobs(target)
    if kind not in UNSHARED:
        check_logprobs(target, tensor_parallel=2)
    set_field(target, "rms_norm_eps", 1e-5)  # of the head, which Cohere's LayerNorms say nothing of
    head = make_eagle3(tmp_path / "head", target, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    check_logprobs(target, speculative=SpeculativeConfig(str(head), "eagle3", 3, 4, 12))


@pytest.mark.parametrize("kind", UNSHARED)
def test_a_plan_is_needed_for_ranks(tmp_path: Path, kind: str, without_families: None) -> None:
    known_config(kind).save_pretrained(tmp_path)
    set_field(tmp_path, "architectures", [architecture_of(kind)])
    with pytest.raises(ValueError, match="no plan of how ranks share"):
        read_target_config(ModelSource(path=str(tmp_path), device="cpu"), 2)


def architecture_of(kind: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def set_field(folder: Path, name: str, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def test_tokens_beyond_a_second_embedding_have_its_first_row(tmp_path: Path) -> None:
    """Gemma 3n's vocabulary is larger than its embedding of each layer's inputs (images begin there), and a client may
    send such ids. transformers fails on them in a text model; where it knows images it takes row 0."""
    target, name, known = make_known(tmp_path / "whole", "gemma3n_text"), "model.embed_tokens_per_layer.weight", 40
    tensors = load_file(target / "model.safetensors")
    tensors[name][known:] = tensors[name][0]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    short = tmp_path / "short"
    shutil.copytree(target, short)
    save_file(tensors | {name: tensors[name][:known].clone()}, short / "model.safetensors", {"format": "pt"})
    config = json.loads((short / "config.json").read_text()) | {"vocab_size_per_layer_input": known}
    (short / "config.json").write_text(json.dumps(config))
    check_greedy(short, like=target)


@pytest.fixture
def without_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has a family of ours is served as if it had none."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
