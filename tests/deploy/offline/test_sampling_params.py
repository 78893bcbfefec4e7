"""Parameters of requests: each has its effect, is refused by name, or has none; and the other requests of `LLM`."""

import json
from argparse import ArgumentParser
from typing import Any

import pytest

from aerie import LLM, Counter, EngineArgs, Histogram, SamplingParams, StructuredOutputsParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}


def _text(llm: LLM, prompt: Any = "Hello", **values: Any) -> str:
    return llm.generate(prompt, SamplingParams(**GREEDY | values))[0].outputs[0].text


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"n": 0}, "^n must be from 1"),
        ({"max_tokens": 0}, "^max_tokens=0: must be at least 1"),
        ({"top_p": 1.5}, "^Invalid value for top_p: input should be less than or equal to 1$"),
        ({"logprobs": 21}, "^Invalid value for logprobs"),
        ({"logprobs": -1}, "^Invalid value for logprobs"),
        ({"top_k": -2}, "^Invalid value for top_k"),
        ({"temperature": "hot"}, "^Invalid value for temperature: input should be a valid number"),
        ({"stop": ["a", ""]}, "^stop: each entry must be a string"),
        ({"stop": 3}, "^stop must be a string or a list of strings"),
        ({"bad_words": [""]}, "^Invalid value for bad_words.0."),
        ({"logits_processors": [print]}, "^logits_processors is not supported: code from requests"),
        ({"guided_decoding": 1}, "^guided_decoding is not supported: use structured_outputs"),
        ({"best_of": 5}, "^best_of is not supported: ask for n answers"),
        ({"thinking_token_budget": 5}, "^thinking_token_budget is not supported"),
        ({"repetition_detection": {}}, "^repetition_detection is not supported"),
    ],
)
def test_invalid_and_refused_parameters_are_named(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        SamplingParams(**values)


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(TypeError, match="'temprature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_vllms_defaults_are_accepted() -> None:
    given: dict[str, Any] = {
        "stop": None,
        "stop_token_ids": None,
        "spaces_between_special_tokens": True,
        "logits_processors": None,
        "flat_logprobs": False,
        "extra_args": None,
        "skip_clone": True,
        "length_penalty": 1.0,
        "repetition_detection": None,
    }
    assert SamplingParams(**given) == SamplingParams()


def test_parameters_are_changed_and_cloned_and_checked_again(llm: LLM) -> None:
    params = SamplingParams(stop=["a"], logit_bias={5: 1.0})
    copy = params.clone()
    params.temperature = 0.3
    assert copy.temperature == 1.0 and copy.stop is not params.stop
    copy.top_p = 7
    with pytest.raises(ValueError, match="^Invalid value for top_p"):
        llm.generate("x", copy)


def test_forms_of_answers(llm: LLM) -> None:
    """Also as a dictionary, with several answers, and streamed drafts."""
    assert _text(llm, structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"])) in (
        "Positive",
        "Negative",
    )
    sampled = SamplingParams(n=3, max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    for answer in llm.generate("Weather:", sampled)[0].outputs:
        found = json.loads(answer.text)
        assert set(found) == {"unit", "days"} and 1 <= found["days"] <= 9 and answer.finish_reason == "stop"
    assert _text(llm, structured_outputs={"regex": r"[a-c]{4}"}).strip("abc") == ""
    assert _text(llm, structured_outputs={"grammar": 'root ::= "yes" | "no"'}) in ("yes", "no")
    for form, fault in (
        ({"json": {"type": "nothing"}}, "JSON schema"),
        ({"regex": "("}, "^structured_outputs: .* parenthesis is not closed"),
        ({"regex": "a", "json": SCHEMA}, "cannot be combined"),
        ({"grammar": "not a grammar"}, "^structured_outputs: The grammar cannot be used: "),
        ({"jsn": 1}, "Unknown parameter: structured_outputs.jsn"),
    ):
        with pytest.raises(ValueError, match=fault):
            _text(llm, structured_outputs=form)


def test_no_request_of_a_list_runs_if_a_grammar_among_them_is_invalid(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(llm._engine.thread, "_submit", taken.append)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(grammar='root ::= missing "x"'))
    with pytest.raises(ValueError, match="^structured_outputs: The grammar cannot be used: .*missing"):
        llm.generate(["x", "y"], [SamplingParams(), bad])
    assert not taken


def test_tokens_that_are_allowed_forbidden_or_biased(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    allowed = tokenizer.encode(" a b c", add_special_tokens=False)
    (result,) = llm.generate("x", SamplingParams(allowed_token_ids=allowed, **GREEDY))
    assert set(result.outputs[0].token_ids) <= {*allowed, tokenizer.eos_token_id}
    plain = _text(llm)
    word = plain.split()[0]
    assert word not in _text(llm, bad_words=[word])
    token = llm.generate("Hello", SamplingParams(**GREEDY))[0].outputs[0].token_ids[0]
    assert (
        llm.generate("Hello", SamplingParams(logit_bias={token: -100.0}, **GREEDY))[0].outputs[0].token_ids[0] != token
    )


def test_log_probabilities_of_the_prompt(llm: LLM) -> None:
    first, second = llm.generate(["Two and two", "One"], SamplingParams(prompt_logprobs=2, max_tokens=1, n=2))
    for result in (first, second):
        assert result.prompt_logprobs is not None
        none, *scores = result.prompt_logprobs
        assert none is None and len(scores) == len(result.prompt_token_ids) - 1
        for token, found in zip(result.prompt_token_ids[1:], scores, strict=True):
            assert found is not None and 2 <= len(found) <= 3 and next(iter(found)) == token
            best = max(found.values(), key=lambda each: each.logprob)
            assert best.rank == 1 and (found[token].rank or 0) >= 1
    assert llm.generate("One", SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_answers_end_at_the_models_length(llm: LLM) -> None:
    prompt = [3] * 2040
    for max_tokens in (None, 100_000):
        (result,) = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert len(result.outputs[0].token_ids) == 8 and result.outputs[0].finish_reason == "length"
    (result,) = llm.generate([3] * 5000, SamplingParams(max_tokens=2, truncate_prompt_tokens=12))
    assert len(result.prompt_token_ids) == 12


def test_prompts_that_cannot_be(llm: LLM) -> None:
    with pytest.raises(ValueError, match="must be a token id from 0 to"):
        llm.generate({"prompt_token_ids": [999999]})
    with pytest.raises(ValueError, match="must contain at least one token"):
        llm.generate({"prompt_token_ids": []})
    with pytest.raises(ValueError, match="min_tokens"):
        llm.generate("x", SamplingParams(min_tokens=20, structured_outputs={"regex": "a"}))


def test_text_that_is_not_wanted(llm: LLM) -> None:
    (result,) = llm.generate("Hello", SamplingParams(detokenize=False, **GREEDY))
    assert result.outputs[0].text == "" and result.outputs[0].token_ids and result.outputs[0].finished()


def test_defaults_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=256)


def test_the_prefix_cache_is_emptied_and_shown(llm: LLM) -> None:
    prompt, sampling = list(range(3, 203)), SamplingParams(max_tokens=1)
    llm.generate(prompt, sampling)
    assert llm.generate(prompt, sampling)[0].num_cached_tokens > 100
    assert llm.generate({"prompt_token_ids": prompt, "cache_salt": "mine"}, sampling)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, sampling)[0].num_cached_tokens == 0


def test_metrics_are_plain_values(llm: LLM) -> None:
    before = _count(llm, "vllm:generation_tokens")
    llm.generate("x", SamplingParams(max_tokens=7, ignore_eos=True))
    assert _count(llm, "vllm:generation_tokens") == before + 7
    histograms = [each for each in llm.get_metrics() if isinstance(each, Histogram)]
    assert histograms and all(each.buckets["+Inf"] == each.count for each in histograms)


def _count(llm: LLM, name: str) -> float:
    (found,) = (each for each in llm.get_metrics() if isinstance(each, Counter) and each.name == name)
    return found.value


def test_conversations_continue_have_tools_and_other_templates(llm: LLM) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello! How"}]
    (result,) = llm.chat(
        turns, SamplingParams(**GREEDY), continue_final_message=True, add_generation_prompt=False, use_tqdm=False
    )
    assert result.outputs[0].text == " can I help you today?" and (result.prompt or "").endswith("Hello! How")
    with pytest.raises(ValueError, match="continue_final_message needs add_generation_prompt: false"):
        llm.chat(turns, continue_final_message=True)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools[0].function.name }}"
        "{% if brief %} BRIEF{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    (result,) = llm.chat(
        turns[:1],
        SamplingParams(max_tokens=1),
        tools=[tool],
        chat_template=template,
        chat_template_kwargs={"brief": True},
    )
    assert result.prompt == "<user>Helloweather BRIEF"
    with pytest.raises(ValueError, match="must be a template's text"):
        llm.chat(turns, chat_template="template.jinja")
    assert [each.outputs[0].text for each in llm.chat([turns[:1]] * 2)] == ["Hello! How can I help you today?"] * 2


def test_the_tokenizer_is_transformers_own(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tokenizer.encode("Hello", add_special_tokens=False)) == "Hello"
    assert llm.chat([{"role": "user", "content": "Hello"}])[0].prompt == text


def test_scripts_have_the_options_of_a_model_and_defaults_of_their_own() -> None:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.add_argument("--temperature", type=float)
    line = ["--model", "eagle3", "-tp", "2", "--enforce-eager", "--temperature", "0.5"]
    args = EngineArgs.from_cli_args(parser.parse_args(line))
    assert (args.model, args.options) == ("eagle3", {"tensor_parallel_size": "2", "enforce_eager": True})
    given = vars(parser.parse_args(["--max-model-len", "512"]))
    del given["temperature"]
    own = {"override_generation_config": {"temperature": 0.7, "top_k": 5}, "quantization": None}
    with LLM(**given | own) as llm:
        with pytest.raises(ValueError, match="maximum context length is 512"):
            llm.generate([3] * 600)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=5, max_tokens=256)
