"""Offline generation with the embedded pair: the names of vLLM's `LLM`, what comes back, and that whatever ends a call
early leaves the engine usable."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from aerie.cluster.config import ConfigError
from aerie.deploy.offline import llm as offline
from aerie.deploy.offline import sampling_params
from aerie.deploy.offline.llm import LLM
from aerie.deploy.offline.sampling_params import SamplingParams
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.runner.local_engine import RankProcesses
from aerie.workers.scheduling.request import RequestTooLargeError
from tests.support import MODELS
from tests.support.slow import slow

GREETING = {"role": "user", "content": "Hello"}
HELLO = "Hello! How can I help you today?"
PROBLEM = [{"role": "user", "content": "Tom has 3 bags with 4 apples each. How many apples does he have?"}]
TARGET = MODELS / "target"


def _executor(llm: LLM) -> StepExecutor:
    return llm._engine.thread.call(lambda engine: engine.executor).result()


def _num_requests(llm: LLM) -> int:
    return llm._engine.thread.call(lambda engine: engine.scheduler.num_running + engine.scheduler.num_waiting).result()


def _greets(llm: LLM) -> bool:
    return llm.chat([GREETING])[0].outputs[0].text == HELLO


def test_chat_answers_in_order_and_ends_at_the_models_end_of_turn(llm: LLM) -> None:
    greeting, solved = llm.chat([[GREETING], PROBLEM], SamplingParams(max_tokens=60, temperature=0.0))
    answer = greeting.outputs[0]
    assert answer.text == HELLO and greeting.finished and "Hello" in (greeting.prompt or "")
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == llm.get_tokenizer().eos_token_id
    assert "apples" in solved.outputs[0].text
    assert solved.outputs[0].acceptance_length is not None and solved.outputs[0].acceptance_length > 1.2


def test_one_conversation_and_a_list_of_them_are_told_apart(llm: LLM) -> None:
    assert [result.outputs[0].text for result in llm.chat([GREETING])] == [HELLO]
    assert [result.outputs[0].text for result in llm.chat([[GREETING], [GREETING]])] == [HELLO, HELLO]


def test_a_text_is_one_prompt(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, speculative=False)
    text = "Question: What is 2 + 2? Answer:"
    (result,) = llm.generate(text, sampling)
    answer = result.outputs[0]
    assert result.prompt == text and answer.finish_reason == "length" and len(answer.token_ids) == 9
    assert answer.acceptance_length is None and answer.logprobs is None
    ids = result.prompt_token_ids
    forms: list[Any] = [ids, {"prompt": text}, {"prompt_token_ids": ids}, [text], [ids]]
    for form in forms:
        (same,) = llm.generate(form, sampling)
        assert (same.prompt_token_ids, same.outputs[0].text) == (ids, answer.text)
    with pytest.raises(TypeError, match="prompt 7: must be a text"):
        llm.generate([text, 7])


@pytest.mark.parametrize("use_tqdm", [True, *slow(False)])
def test_progress_counts_answers_and_is_shown_on_request(
    llm: LLM, use_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; tqdm shows nothing elsewhere where `disable` is None."""
    bars, made = [], offline.tqdm

    def bar(**settings: Any) -> Any:
        bars.append(made(**settings | {"disable": False, "file": io.StringIO()}))
        assert settings["disable"] is (None if use_tqdm else True)
        return bars[-1]

    monkeypatch.setattr(offline, "tqdm", bar)
    sampling = SamplingParams(max_tokens=4, n=2)
    llm.generate(["One", "Two"], sampling, use_tqdm)
    llm.chat([GREETING], sampling, use_tqdm=use_tqdm)
    assert [(each.n, each.total) for each in bars] == [(4, 4), (2, 2)]


def test_log_probabilities_come_with_every_token(llm: LLM) -> None:
    answer = llm.generate("Two and two", SamplingParams(max_tokens=5, temperature=0.0, logprobs=2))[0].outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 5
    for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(found)) == token and found[token].rank == 1 and len(found) == 2
        assert found[token].logprob == max(each.logprob for each in found.values()) <= 0
        assert found[token].decoded_token == llm.get_tokenizer().decode([token])
    assert answer.cumulative_logprob == pytest.approx(
        sum(f[t].logprob for t, f in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    only = llm.generate("Two and two", SamplingParams(max_tokens=5, temperature=0.0, logprobs=0))[0].outputs[0]
    assert only.logprobs is not None and [list(found) for found in only.logprobs] == [[t] for t in answer.token_ids]


def test_a_stop_text_ends_an_answer_and_is_not_shown(llm: LLM) -> None:
    first, second = llm.chat(
        [[GREETING], [GREETING]], [SamplingParams(stop="can", temperature=0.0), SamplingParams(temperature=0.0)]
    )
    assert first.outputs[0].text == "Hello! How " and first.outputs[0].stop_reason == "can"
    assert second.outputs[0].text == HELLO and second.outputs[0].stop_reason is None
    shown = SamplingParams(stop=["can"], include_stop_str_in_output=True, temperature=0.0)
    assert llm.chat([GREETING], shown)[0].outputs[0].text == "Hello! How can"


def test_several_answers_with_a_seed_are_the_same_again(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=5, max_tokens=8)
    texts = [[each.text for each in llm.generate("Once", sampling)[0].outputs] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_what_cannot_be_honoured_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="^prompt_adapter_request is not supported: prompt adapters are not"):
        llm.generate("x", prompt_adapter_request="an adapter")
    with pytest.raises(TypeError, match="generate.. got an unexpected keyword argument 'temprature'"):
        llm.generate("x", temprature=1)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'beam_search': beam search is not"):
        llm.beam_search(["x"], None)  # type: ignore[attr-defined]
    assert not hasattr(llm, "embed") and not hasattr(llm, "anything")
    with pytest.raises(TypeError, match="^hf_token_: LLM has no such option"):
        LLM("eagle", hf_token_="x")
    with pytest.raises(ConfigError, match="^quantization_config|is not quantised"):
        LLM(str(TARGET), quantization="awq")
    with pytest.raises(ConfigError, match="^enable_moe_shared_loras=True: Aerie's adapters are of peft's forms"):
        LLM("eagle", enable_moe_shared_loras=True)
    with pytest.raises(ConfigError, match="^ingress.api_keys: is a server's"):
        LLM("eagle", api_key="a-secret-key")
    with pytest.raises(ValueError, match="sampling_params: 2 for 1 prompts"):
        llm.generate("x", [SamplingParams()] * 2)
    with pytest.raises(TypeError, match="prompt.'multi_modal_data'.: is not supported"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}})


def test_harmless_parameters_are_accepted(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=1)
    assert llm.generate("x", sampling, use_tqdm=False, lora_request=None, priority=0, tokenization_kwargs={})
    assert llm.chat([GREETING], sampling, lora_request=None, mm_processor_kwargs=None)


def test_what_requests_over_http_ignore_is_ignored_and_named(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = list[str]()
    monkeypatch.setattr("aerie.deploy.offline.sampling_params._log_ignored", named.append)
    sampling = SamplingParams(max_tokens=1, length_penalty=0.5, early_stopping=False, service_tier="fast")
    assert set(named) == {"length_penalty", "service_tier"}
    assert llm.generate(["x", "y"], sampling, priority=[3, 1]) and named[2:] == ["priority"]
    assert llm.chat([GREETING], sampling, priority=3) and named[3:] == ["priority"]
    monkeypatch.undo()
    sampling_params._log_ignored.cache_clear()
    for _ in range(2):
        llm.generate("x", sampling, priority=2)
    assert [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()] == [
        "priority has no effect here and is ignored"
    ], "named once"


def test_outputs_have_the_times_of_their_answers(llm: LLM) -> None:
    before_s, before_ts = time.time(), time.monotonic()
    (result,) = llm.generate("Count", SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    found = result.metrics
    assert found is not None and found.num_generation_tokens == 10
    assert before_s <= found.arrival_time <= time.time()
    assert before_ts <= found.queued_ts <= found.scheduled_ts <= found.first_token_ts < found.last_token_ts
    assert found.last_token_ts <= time.monotonic()
    assert found.first_token_latency == found.first_token_ts - found.queued_ts


def test_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestTooLargeError, match="2048"):
        llm.generate(["short", "seven " * 4000])
    assert _greets(llm)


def test_ctrl_c_ends_the_answers_and_the_engine_goes_on(llm: LLM) -> None:
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Count"] * 4, SamplingParams(max_tokens=1900, ignore_eos=True))
    assert time.monotonic() - started_s < 30
    timer.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert _num_requests(llm) == 0
    assert _greets(llm)


async def test_it_answers_in_a_running_event_loop(llm: LLM) -> None:
    """As in a notebook's cell, or in a handler of a web server; long texts are encoded in threads."""
    assert _greets(llm)
    (result,) = llm.generate("Count " * 800, SamplingParams(max_tokens=3, temperature=0.0))
    assert len(result.outputs[0].token_ids) == 3 and len(result.prompt_token_ids) > 800


def test_several_threads_share_the_engine(llm: LLM) -> None:
    """More threads than encode long texts at once."""
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    text = "One two " * 600
    alone = llm.generate(text, sampling)[0].outputs[0].text
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: llm.generate([text, "Once"], sampling), range(6)))
    assert {each[0].outputs[0].text for each in found} == {alone} and len(
        {each[1].outputs[0].text for each in found}
    ) == 1


def test_messages_that_the_template_refuses(llm: LLM) -> None:
    template = "{{ raise_exception('role ' ~ messages[0].role ~ ' is unknown') }}"
    with pytest.raises(ValueError, match="role tool is unknown"):
        llm.chat([{"role": "tool", "content": "x"}], chat_template=template)


def test_configuration_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="absent: no such file or folder; give a model"):
        LLM(Path("absent"))
    with pytest.raises(ConfigError, match="tensor_parallel=3"):
        LLM("eagle", tensor_parallel_size=3)


def test_ctrl_c_reaches_ranks_and_does_not_end_them() -> None:
    with LLM("eagle3", tensor_parallel_size=2) as llm:
        executor = _executor(llm)
        assert isinstance(executor, RankProcesses)
        pids = [process.pid for process in executor._processes]

        def interrupt() -> None:
            """As a terminal does: every process of the command."""
            for pid in (*pids, os.getpid()):
                os.kill(pid, signal.SIGINT)

        timer = threading.Timer(0.5, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Count", SamplingParams(max_tokens=1900, ignore_eos=True))
        timer.join()
        assert _greets(llm)


# The same of spawned ranks in a process group. A script, because they import the main module.
TWO_RANKS = """
import os, signal, threading
from aerie import LLM, SamplingParams

if __name__ == "__main__":
    with LLM("eagle3", tensor_parallel_size=2) as llm:
        threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
        try:
            llm.generate("Count", SamplingParams(max_tokens=1900, ignore_eos=True))
        except KeyboardInterrupt:
            print("interrupted")
        print(llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text)
"""


@pytest.mark.slow
def test_ctrl_c_does_not_end_ranks_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    variables = os.environ | {"PYTHONPATH": str(TARGET.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=variables,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert done.stdout == f"interrupted\n{HELLO}\n", done.stderr


def test_embeddings_stand_for_a_prompts_tokens(llm: LLM) -> None:
    """Those of the embedding layer give the tokens' own answer."""
    tokens = llm.get_tokenizer().encode("Once upon a time there was")
    params = SamplingParams(max_tokens=6, temperature=0.0)
    (weights,) = [
        tensor for name, tensor in load_file(MODELS / "target" / "model.safetensors").items() if "embed_tokens" in name
    ]
    embeds = weights[tokens]
    by_tokens, by_embeds = llm.generate([tokens, {"prompt_embeds": embeds}], params)
    assert by_embeds.outputs[0].token_ids == by_tokens.outputs[0].token_ids
    as_array = llm.generate({"prompt_embeds": embeds.float().numpy()}, params)[0]
    assert as_array.outputs[0].token_ids == by_tokens.outputs[0].token_ids
    with pytest.raises(ValueError, match="hidden_size=512"):
        llm.generate({"prompt_embeds": embeds[:, :8]}, params)
    with pytest.raises(ValueError, match=r"prompt_embeds: must be a tensor \[tokens, hidden_size\] of numbers"):
        llm.generate({"prompt_embeds": embeds[0]}, params)
    with pytest.raises(ValueError, match="prompt_logprobs: embeddings stand for the whole prompt"):
        llm.generate({"prompt_embeds": embeds}, SamplingParams(prompt_logprobs=1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), "^prompt None: must be a text"),
        ((5,), "^prompt 5: must be a text"),
        (("a", "greedy"), "^sampling_params: must be SamplingParams, or a list of them, not 'greedy'"),
        ((["a"], [{"temperature": 0}]), "^sampling_params: must be SamplingParams, or a list of them, not {'temp"),
    ],
)
def test_arguments_of_another_kind_are_named(llm: LLM, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(*given)
    for messages in ("hi", ["hi"], [["hi"]]):
        with pytest.raises(TypeError, match=r"^messages: 'hi' must be a mapping such as {\"role\""):
            llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_script_that_its_ranks_cannot_import_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('from aerie import LLM\nLLM("eagle3", tensor_parallel_size=2)\n')
    variables = os.environ | {"PYTHONPATH": str(TARGET.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1], done.stderr
