"""Every decoder that transformers lists as a causal language model, made tiny, through the adapter: answers equal to
transformers', or one line at `aerie plan` that says why it is refused.

    pytest -m slow tests/workers/models/adapter/test_every_decoder.py    # half an hour on one core

`OUTCOMES` is the table of what was found with transformers 5.17."""

import json
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.known_models import known_config, make_known
from tests.workers.models.test_targets import by_transformers, by_us
from workers.config import ModelSource
from workers.models.loading import read_target_config

EQUAL = "answers are equal"
OUTCOMES: dict[str, str] = {
    EQUAL: """
        afmoe apertus arcee axk1 bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3
        dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma2 gemma3 gemma3_text
        gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe
        glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
        granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2
        laguna lfm2 llama mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral
        ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt
        persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
        solar_open starcoder2 vaultgemma youtu got_ocr2
    """,
    "does not run as a decoder of tokens": """
        aria_text axk2 deepseek_v32 doge glm_moe_dsa hy_v4 jetmoe longcat_flash xmod
    """,
    "Validation error for field 'time_step_limit'": """
        bamba falcon_h1 granitemoehybrid mamba2 nemotron_h
    """,
    "attention transformers does not let others replace": """
        bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt codegen cpmant falcon
        falcon_mamba git gpt_neo gpt_neox_japanese gptj inkling_text jamba kimi_linear mamba marian
        mbart megatron-bert mpt mvp olmo_hybrid openai-gpt pegasus plbart prophetnet qwen3_5 qwen3_5_moe
        qwen3_5_moe_text qwen3_5_text qwen3_next rembert roformer rwkv stablelm trocr whisper xglm xlm
        xlnet xlstm
    """,
    "rows that see later ones": """
        bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
        xlm-roberta xlm-roberta-xl
    """,
    "cannot be made by transformers": """
        cohere_compass_text dbrx emu3 gemma4_assistant gemma4_unified_assistant mllama qwen4_exp
        qwen4_exp_text reformer zamba
    """,
    "keeps a state that only its own family could serve": """
        deepseek_v4 recurrent_gemma
    """,
    "calls attention of one layer twice": """
        diffllama hrm_text
    """,
    "layers of conv": """
        lfm2_moe
    """,
    "no part before its vocabulary head": """
        llama4 llama4_text
    """,
    "layers of linear_attention": """
        minimax
    """,
}
# Of which transformers makes no random model of these sizes: what is asked for is their configuration alone, if it can
# be made; of the last ones it cannot.
UNBUILT = (
    "cohere_compass_text",
    "dbrx",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "zamba",
)
NO_CONFIG = ("gemma3n", "musicgen", "musicgen_melody", "zamba2", "zaya")
BY_KIND = {kind: outcome for outcome, kinds in OUTCOMES.items() for kind in kinds.split()}


def test_the_table_has_every_decoder() -> None:
    assert sum(len(kinds.split()) for kinds in OUTCOMES.values()) == len(BY_KIND)
    assert {*BY_KIND, *NO_CONFIG} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # transformers' GPT-BigCode
@pytest.mark.parametrize("kind", BY_KIND)
def test_a_decoder_is_served_with_equal_answers_or_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.models.registry.ARCHITECTURES", {})
    if kind in UNBUILT:
        known_config(kind).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
        path.write_text(json.dumps(json.loads(path.read_text()) | named))
    else:
        make_known(tmp_path, kind)
    source = ModelSource(path=str(tmp_path), device="cpu")
    if BY_KIND[kind] != EQUAL:
        with pytest.raises(ValueError) as error:
            read_target_config(source, 1)
        assert BY_KIND[kind] in str(error.value) and "\n" not in str(error.value)
        return
    assert read_target_config(source, 1).served_by is not None
    assert by_us(tmp_path) == by_transformers(tmp_path)
