"""The options of `vllm serve`: what each becomes, what is said of a difference, and what is refused by name."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cluster.config import ConfigError, parse
from aerie.deploy.cli import main
from aerie.deploy.config import vllm_options
from aerie.deploy.config.option_table import DECLARED, OPTIONS, Option
from aerie.deploy.config.vllm_values import DOWNLOADS, OWN_TOKENIZER, QUANTIZATION, SPECULATIVE_PARTS, OptionError
from tests.support import MODELS

TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
KEY = "a-secret-key"


def _args(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The `args` that `aerie plan TARGET options` amounts to."""
    saved = tmp_path / "my.yaml"
    assert main(["plan", TARGET, *options, "--nodes", "0", "--save", str(saved)]) == 0
    (application,) = yaml.safe_load(saved.read_text())["applications"]
    args: dict[str, Any] = application["args"]
    return args


def test_a_command_line_of_vllms_amounts_to_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speculative = {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}
    line = (
        "--served-model-name a b --max-model-len 1k -tp 2 --gpu-memory-utilization 0.8 --max-num-seqs 4 "
        f"--max-num-batched-tokens 512 --api-key {KEY} --dtype half --seed 3 --enable-prefix-caching --block-size 32 "
        "--kv-cache-dtype fp8 --model-impl transformers "
        "--allowed-origins https://a.example --strict "
        "--tool-call-parser hermes --reasoning-parser qwen3 --enable-auto-tool-choice --trust-remote-code"
    )
    args = _args(tmp_path, *line.split(), "--speculative-config", json.dumps(speculative))
    (digest,) = args["ingress"].pop("api_keys")
    assert digest.startswith("sha256:") and KEY not in (tmp_path / "my.yaml").read_text()
    assert args == {
        "model": {
            "path": TARGET,
            "max_model_len": 1000,
            "dtype": "float16",
            "implementation": "transformers",
            "seed": 3,
        },
        "ingress": {
            "served_model_name": "a",
            "model_aliases": ["b"],
            "output_parser": "hermes",
            "allowed_origins": ["https://a.example"],
            "strict": True,
        },
        "parallel": {"tensor_parallel": 2},
        "cache": {"memory_share": 0.8, "prefix_cache": True, "page_size": 32, "dtype": "fp8_e4m3"},
        "scheduler": {"max_running": 4, "max_step_tokens": 512},
        "speculative": {"method": "eagle3", "path": DRAFT, "num_steps": 2, "num_draft_tokens": 3, "draft_tp": 1},
    }
    printed = capsys.readouterr().out
    assert "--gpu-memory-utilization 0.8: cache.memory_share=0.8; a share of the memory that is free" in printed
    assert "--trust-remote-code: Aerie runs no code of checkpoints\n" in printed and "--max-model-len" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat-template", "x.jinja"], "--chat-template x.jinja: no such file; leave it out"),
        (["--tokenizer", "x/y"], "--tokenizer x/y: the tokenizer is the model's own; put its tokenizer.json"),
        (["--enable-moe-shared-loras"], "--enable-moe-shared-loras: Aerie's adapters are of peft's forms"),
        (["-pp", "2"], "--pipeline-parallel-size 2: Aerie has no pipelines: raise --tensor-parallel-size"),
        (["--quantization", "awq"], "--quantization awq: .*target is not quantised, .* leave it out"),
        (["--max-model-len", "many"], "--max-model-len many: must be a whole number"),
        (["--gpu-memory-utilization", "x"], "--gpu-memory-utilization x: must be a number"),
        (["--gpu-memory-utilization", "2"], "cache.memory_share=2.0: must be above 0"),
        (["--model-impl", "vllm"], "--model-impl vllm: Aerie knows auto, transformers"),
        (["--dtype", "int8"], "--dtype int8: Aerie knows auto, float16"),
        (["--tool-call-parser", "hermess"], "--tool-call-parser hermess: no parser of vLLM or SGLang; is hermes meant"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2: Aerie knows auto, fp8, fp8_e4m3"),
        (["--speculative-config", "{"], r"--speculative-config \{: is not JSON"),
        (["--speculative-config", "[]"], r"must be a JSON object"),
        (
            ["--speculative-config", '{"method": "medusa"}'],
            "method medusa: Aerie speculates with eagle, eagle3, mtp, dflash, dspark, dflash2, domino, suffix",
        ),
        (["--speculative-config", '{"method": "suffix", "prompt_lookup_max": 4}'], "prompt_lookup_max: not known here"),
        (["--speculative-config", '{"method": "eagle3"}'], "model is missing"),
        (["--speculative-config", '{"model": "x", "parallel_drafting": true}'], "parallel_drafting: not known here"),
        (["--api-key", "short"], "ingress.api_keys: each key must have at least 8"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_with_the_remedy(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", TARGET, *options, "--nodes", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_beside_a_config_file_the_key_to_write_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "eagle", "--max-model-len", "4096", "--nodes", "0"]) == 2
    assert capsys.readouterr().err.startswith("model.max_model_len=4096: vLLM's options are allowed only with a model")


_READ = [option for option in DECLARED if option.name not in SPECULATIVE_PARTS]


@pytest.mark.parametrize("option", _READ, ids=lambda option: option.name)
def test_every_key_of_the_table_exists(option: Option) -> None:
    samples = ["1", "auto", "hermes", "qwen3", "FLASHINFER", "vllm", "generate", '{"model": "x"}', '{"top_p": 0.5}']
    became = []
    for sample in samples:
        try:
            found, _ = vllm_options.changes({option.name: sample})
        except OptionError as error:
            assert str(error).startswith(f"{option.flags[0]} {sample}: ")
            continue
        became.append(found)
    for keys in became:
        args: dict[str, Any] = {"model": {"path": TARGET}}
        for key, value in keys.items():
            if key in (QUANTIZATION, DOWNLOADS, OWN_TOKENIZER, "speculative.path", "ingress.api_keys"):
                continue  # no keys of the configuration, a folder, and a key of at least 8 characters
            section, _, name = key.partition(".")
            args.setdefault(section, {})[name] = True if option.nargs == 0 else value
        try:
            parse(args, MODELS)
        except ConfigError as error:  # a share of 1, for one
            assert "unknown key" not in str(error)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("aerie ")


def test_no_option_is_there_twice() -> None:
    parser = argparse.ArgumentParser()
    vllm_options.add_options(parser)
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
