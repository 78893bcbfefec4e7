"""SmolLM2-135M-Instruct from its published GGUF file, against transformers."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import dequantize
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from aerie.attention.config import CacheConfig
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.models.gguf.header import read_gguf
from aerie.workers.models.weights import checkpoint_tensors
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.support.targets.published import published_file, published_folder
from tests.support.tiny_models import make_eagle

TEXT = "The lighthouse keeper counted 1,024 ships; 37 of them flew a blue flag. "
QUESTIONS = ("What is the capital of France?", "Write one sentence about the number 365.", "¿Qué hora es? 🕰️")


@functools.cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_folder(published_folder())


def encoded(text: str) -> list[int]:
    return tokenizer()._tokenizer.encode(text).ids  # type: ignore[no-any-return]


def chat(*turns: str) -> list[int]:
    roles = ("user", "assistant")
    text = tokenizer().render([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)])
    return encoded(text.text)


@functools.cache
def by_transformers() -> torch.nn.Module:
    """The model as transformers computes it, with the weights that llama.cpp's library dequantises."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = published_folder()
    file = read_gguf((published_file(),))
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    content, tensors = published_file().read_bytes(), {}
    names = {each.name: each for each in file.tensors.values()}
    for ours, theirs, heads in _names(config.num_hidden_layers):
        tensor = names[theirs]
        raw = torch.frombuffer(bytearray(content[tensor.offset : tensor.offset + tensor.num_bytes]), dtype=torch.uint8)
        value = torch.from_numpy(dequantize(raw.numpy(), Type[tensor.type])).view(tensor.shape)
        if heads:  # llama.cpp rotates neighbours, transformers halves
            value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        tensors[ours] = value
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def _names(layers: int) -> list[tuple[str, str, int]]:
    """Names in transformers and in the file, and the heads whose rows llama.cpp orders otherwise."""
    found = [("model.embed_tokens.weight", "token_embd.weight", 0), ("model.norm.weight", "output_norm.weight", 0)]
    parts = {"self_attn.q_proj": ("attn_q", 9), "self_attn.k_proj": ("attn_k", 3), "self_attn.v_proj": ("attn_v", 0)}
    parts |= {"self_attn.o_proj": ("attn_output", 0), "input_layernorm": ("attn_norm", 0)}
    parts |= {f"mlp.{each}_proj": (f"ffn_{each}", 0) for each in ("gate", "up", "down")}
    parts |= {"post_attention_layernorm": ("ffn_norm", 0)}
    for i in range(layers):
        found += [(f"model.layers.{i}.{a}.weight", f"blk.{i}.{b}.weight", heads) for a, (b, heads) in parts.items()]
    return found


def spec(speculative: SpeculativeConfig | None, tensor_parallel: int = 1, pages: int = 300) -> EngineSpec:
    model = ModelSource(path=str(published_folder()), device="cpu")
    worker = WorkerConfig(
        model,
        CacheConfig(16, num_pages=pages),
        SchedulerConfig(4, 512),
        tensor_parallel=tensor_parallel,
        measure_costs=False,
    )
    return EngineSpec(worker, speculative)


def suffix() -> SpeculativeConfig:
    return SpeculativeConfig(str(published_folder()), "suffix", num_steps=4, num_draft_tokens=5)


def check_greedy(prompt: list[int], answer: list[int], tops: list[tuple[float, ...]] = ()) -> None:  # type: ignore[assignment]
    """Every token of the answer is transformers' best one, and `tops` are its log-probabilities."""
    with torch.inference_mode():
        logits = by_transformers()(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    assert logits.argmax(-1).tolist() == answer
    if tops:
        expected = torch.log_softmax(logits, -1).topk(len(tops[0])).values
        # float32 through 30 layers in another order of sums
        torch.testing.assert_close(torch.tensor(tops), expected, atol=1e-3, rtol=0)


def run(engine: Any, prompts: list[list[int]], num_tokens: int, logprobs: int = -1) -> list[tuple[Request, list[Any]]]:
    params = SamplingParams(num_tokens, 0.0, logprobs=logprobs)
    requests = [Request(f"{id(prompts)}-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    tops: dict[str, list[Any]] = {request.request_id: [] for request in requests}

    def listen(output: RequestOutput) -> None:
        tops[output.request.request_id] += [item.top_logprobs for item in output.logprobs or ()]

    engine.run(requests, 4, listen)
    return [(request, tops[request.request_id]) for request in requests]


def test_tokens_and_logprobs_are_those_of_transformers() -> None:
    """One token, chats, a text of 400 tokens that repeats itself, and a second turn, whose first one is cached."""
    torch.set_num_threads(1)
    long = (encoded(TEXT) * 40)[:400]
    first = [[260], chat(QUESTIONS[0]), long]
    with local_engine(spec(suffix())) as engine:
        answered = run(engine, first, 8) + run(engine, [chat(QUESTIONS[2])], 6, logprobs=4)
        said = tokenizer().decode(answered[1][0].output, True)
        again = chat(QUESTIONS[0], said, "And of Spain?")
        answered += run(engine, [again], 6)
        assert answered[-1][0].cached_tokens >= 16
    for request, tops in answered:
        check_greedy(request.prompt, request.output, tops)
    assert "Paris" in said


def test_every_tensor_is_what_llama_cpps_library_reads() -> None:
    state = by_transformers().state_dict()
    for name, tensor, file in checkpoint_tensors(published_folder()):
        assert file == published_file().name and torch.equal(tensor.float(), state[name]), name


def test_texts_are_split_as_by_the_published_tokenizer() -> None:
    """As SmolLM2's tokenizer.json has it: digits one by one, then GPT-2's rule."""
    metadata = read_gguf((published_file(),)).metadata
    numbers = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    published = Tokenizer(BPE(numbers, merges))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)]
    )
    published.decoder = decoders.ByteLevel()
    texts = [TEXT, *QUESTIONS, "  two  spaces\n\n\ttab 12345 x2 don't I'LL", "a\r\n b\u00a0c", "e\u0301"]
    texts += ["日本語の文 ١٢٣ Ⅷ ½", "👩\u200d👩\u200d👧"]
    for text in texts:
        ids = encoded(text)
        assert ids == published.encode(text).ids and tokenizer().decode(ids) == text
    assert encoded("<|im_start|>user")[0] == 1 and tokenizer().eos_token_ids == (2,)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 3])
def test_long_prompts_trees_and_ranks_change_no_token(tmp_path: Path, tensor_parallel: int) -> None:
    """9 heads divide over 3 ranks; a random EAGLE head's trees are verified and dropped."""
    torch.set_num_threads(1)
    means = tmp_path / "means"
    means.mkdir()
    (means / "config.json").write_text((published_folder() / "config.json").read_text())
    head = make_eagle(tmp_path / "head", means)
    prompts = [(encoded(TEXT) * 300)[:count] for count in (17, 600, 2000)] + [chat(each) for each in QUESTIONS]
    tree = SpeculativeConfig(str(head), "eagle", num_steps=3, top_k=2, num_draft_tokens=6)
    for speculative in (suffix(), tree):
        with local_engine(spec(speculative, tensor_parallel, pages=400)) as engine:
            for request, _ in run(engine, prompts, 16):
                check_greedy(request.prompt, request.output)


@pytest.mark.slow
def test_transformers_reads_the_same_model_from_the_file() -> None:
    """transformers' own reading of names, values and configuration."""
    from transformers import AutoModelForCausalLM

    file = published_file()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    state = by_transformers().state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
