"""Every decoder that transformers lists as a causal language model, made tiny, through the adapter: log-probabilities
equal to transformers', or one line at `aerie plan` that says why it is refused.

    pytest -m slow tests/workers/models/adapter/test_every_decoder.py    # an hour on one core

`OUTCOMES` is the table of what was found with transformers 5.17."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aerie.speculative.build import EngineSpec, check_weights, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.adapter.config import AdapterConfig, transformers_config
from aerie.workers.models.adapter.streams import capture_streams
from aerie.workers.models.adapter.survey import decoder
from aerie.workers.models.loading import read_target_config
from tests.support.known_models import known_config, make_known
from tests.support.target_answers import TREE, as_text_part, check_logprobs, head_for
from tests.workers.models.test_targets import worker_of

EQUAL = "answers are equal"
ENCODER = "has an encoder and a decoder"
OUTCOMES: dict[str, str] = {
    EQUAL: """
        afmoe apertus arcee axk1 bitnet cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm deepseek_v2 deepseek_v3
        dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma2 gemma3 gemma3_text gemma3n
        gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe
        glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
        granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2
        laguna lfm2 llama mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral
        ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt
        persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
        solar_open starcoder2 vaultgemma youtu got_ocr2
    """,
    "reads numbers from the device in a pass": """
        aria_text dbrx jetmoe longcat_flash
    """,
    "keeps a state that only its own family could serve": """
        bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2 nemotron_h
        olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
        recurrent_gemma rwkv xlstm zamba zamba2 zaya
    """,
    "attention transformers does not let others replace": """
        big_bird biogpt bloom blt codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj inkling_text
        megatron-bert mpt openai-gpt reformer rembert roformer stablelm trocr xglm xlm xlnet
    """,
    ENCODER: """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus
        plbart prophetnet whisper
    """,
    "rows that see later ones": """
        bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
        xlm-roberta xlm-roberta-xl xmod
    """,
    "of which transformers has no causal language model": """
        emu3 mllama
    """,
    "is a draft whose layers all read the KV of another model": """
        gemma4_assistant gemma4_unified_assistant
    """,
    "layers of deepseek_sparse_attention": """
        axk2 deepseek_v32 glm_moe_dsa hy_v4
    """,
    "has a mask of its own": """
        doge
    """,
    "calls attention of one layer twice": """
        diffllama hrm_text
    """,
    "layers of conv": """
        lfm2_moe
    """,
    "layers of chunked_attention": """
        llama4 llama4_text
    """,
    "layers of linear_attention": """
        minimax
    """,
}
# Kinds that are refused by their configuration; transformers cannot make a random model of these sizes.
UNBUILT = (
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "musicgen",
    "musicgen_melody",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "zamba",
)
# Kinds for which transformers' tensor-parallel plan is missing, or covers the vocabulary only.
ONE_RANK = """
    afmoe axk1 bitnet ctrl deepseek_v3 fuyu gpt-sw3 gpt2 gpt_bigcode gpt_oss granitemoe granitemoeshared
    hunyuan_v1_dense hunyuan_v1_moe lfm2 modernbert-decoder moshi nemotron opt persimmon phimoe youtu
"""
# Kinds whose layers pass on several streams side by side, which no head reads.
NO_STREAMS = ("gemma3n", "gemma3n_text")
BY_KIND = {kind: outcome for outcome, kinds in OUTCOMES.items() for kind in kinds.split()}


def test_the_table_has_every_decoder() -> None:
    assert sum(len(kinds.split()) for kinds in OUTCOMES.values()) == len(BY_KIND)
    assert set(BY_KIND) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make(folder: Path, kind: str) -> None:
    """A checkpoint, or config.json alone."""
    if kind == "gemma3n":  # its towers need a package that is not installed
        as_text_part(make_known(folder, "gemma3n_text"), "Gemma3nForConditionalGeneration", "model.language_model.")
    elif kind in UNBUILT or BY_KIND[kind] == ENCODER:  # transformers' decoder alone would say that it has no encoder
        config_of(kind).save_pretrained(folder)
        path = folder / "config.json"
        named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
        path.write_text(json.dumps(json.loads(path.read_text()) | named))
    else:
        make_known(folder, kind)


def config_of(kind: str) -> PreTrainedConfig:
    if not kind.startswith("musicgen"):
        return known_config(kind)
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": f"{kind}_decoder"}
    return CONFIG_MAPPING[kind](**{part: CONFIG_MAPPING[of]().to_dict() for part, of in parts.items()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # transformers' GPT-BigCode
@pytest.mark.parametrize("kind", BY_KIND)
def test_a_decoder_is_served_with_equal_answers_or_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank: plain, with suffix drafts, with a tree of an EAGLE-3 head. On two ranks, where its plan fits."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    make(tmp_path, kind)
    source = ModelSource(path=str(tmp_path), device="cpu")
    if BY_KIND[kind] != EQUAL:
        assert BY_KIND[kind] in refusal(source, 1)
        return
    config = read_target_config(source, 1)
    assert config.served_by is not None
    like = make_known(tmp_path / "text", "gemma3n_text") if kind == "gemma3n" else tmp_path
    check_logprobs(tmp_path, like=like)
    check_logprobs(tmp_path, like=like, speculative=SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8))
    head = SpeculativeConfig(str(head_for(config, tmp_path)), "eagle3", *TREE)
    if kind in NO_STREAMS:
        spec = EngineSpec(worker_of(tmp_path), head)
        with pytest.raises(ValueError, match="reads hidden states between layers"):
            check_weights(spec, plan_engine(spec))
    else:
        check_logprobs(tmp_path, like=like, speculative=head)
    if kind in ONE_RANK.split():
        assert "tensor_parallel=2: " in refusal(source, 2)
    else:
        check_logprobs(tmp_path, like=like, tensor_parallel=2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # transformers' GPT-BigCode
@pytest.mark.parametrize(
    "kind", ["phi4_multimodal", *(pytest.param(each, marks=pytest.mark.slow) for each in OUTCOMES[EQUAL].split())]
)
def test_captured_streams_are_the_hidden_states_between_layers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transformers' own model. Copies, since a model might add to a stream in place afterwards."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    known_config(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    config = read_target_config(ModelSource(path=str(tmp_path), device="cpu"), 1)
    assert isinstance(config, AdapterConfig)
    if kind in NO_STREAMS:
        assert config.layers is None
        return
    assert config.layers is not None
    model = AutoModelForCausalLM.from_config(transformers_config(json.loads(config.raw), kind)).eval()
    found: dict[int, torch.Tensor] = {}
    layers = model.get_submodule(config.layers)
    capture_streams(layers, range(len(layers) + 1), lambda layer, stream: found.update({layer: stream.clone()}))
    ids = torch.tensor([[5, 3, 11]])
    with torch.no_grad():
        hidden = decoder(model)(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    assert sorted(found) == list(range(len(layers) + 1))
    for layer in range(len(layers)):
        assert torch.equal(found[layer], hidden[layer]), layer
    assert found[len(layers)].shape == hidden[0].shape and not torch.equal(found[len(layers)], hidden[-2])


def refusal(source: ModelSource, tensor_parallel: int) -> str:
    with pytest.raises(ValueError) as error:
        read_target_config(source, tensor_parallel)
    assert "\n" not in str(error.value)
    return str(error.value)
