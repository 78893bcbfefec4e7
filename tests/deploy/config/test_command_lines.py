"""Command lines that people have for vLLM and SGLang: understood by `aerie plan`, or refused with a remedy."""

import shlex
from pathlib import Path

import pytest

from aerie.cluster.config import parse
from aerie.deploy.arguments import parser
from aerie.deploy.cli import main
from aerie.deploy.command_line import normalised, parsed
from aerie.deploy.config import vllm_options
from aerie.deploy.config.model import use_options
from aerie.deploy.config.vllm_values import DOWNLOADS, OWN_TOKENIZER, QUANTIZATION, OptionError
from tests.support import MODELS

LINES = Path(__file__).parent / "command_lines"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
_PARSER = parser()
_FILES = ("ingress.api_keys", "ingress.chat_template", "lora.modules")


def lines(name: str) -> tuple[list[str], list[str]]:
    """The lines of a file that are understood, and those below `# refused`."""
    understood, _, refused = (LINES / f"{name}.txt").read_text().partition("# refused\n")
    return [line for line in understood.splitlines() if not line.startswith("#")], refused.splitlines()


def keys_of(line: str) -> tuple[dict[str, object], list[str]]:
    return vllm_options.changes(vllm_options.given(parsed(_PARSER, ["plan", *shlex.split(line)])))


@pytest.mark.parametrize(("name", "least"), [("vllm", 43), ("sglang", 11), ("recipes", 146), ("guides", 72)])
def test_command_lines_are_understood(name: str, least: int) -> None:
    understood, _ = lines(name)
    assert len(understood) >= least
    for line in understood:
        keys, _ = keys_of(line)
        args = {"model": {"path": TARGET}}
        for key in (QUANTIZATION, DOWNLOADS, OWN_TOKENIZER, *_FILES):
            keys.pop(key, None)  # keys of other places, and a file of the one who has this line
        if "speculative.path" in keys:
            keys["speculative.path"] = DRAFT
        if "model.rope_scaling" in keys:
            keys.pop("model.max_model_len", None)  # of a model with more positions
        for key in [key for key in keys if key.startswith(("speculative.", "parallel."))]:
            if key != "speculative.path":
                del keys[key]  # they depend on the model, which is another one here
        parse(use_options(args, keys), MODELS)


@pytest.mark.parametrize("name", ["vllm", "sglang", "recipes", "guides"])
def test_other_command_lines_are_refused_with_a_remedy(name: str) -> None:
    for line in lines(name)[1]:
        with pytest.raises(OptionError, match=r"^--?[\w-]+.*: .*[a-z]{3}"):
            keys_of(line)


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("--max_model_len=32K --gpu_memory_utilization 0.5", {"model.max_model_len": 32768, "cache.memory_share": 0.5}),
        ("--max-model-len 131_072", {"model.max_model_len": 131072}),
        ("--max-model-len auto", {}),
        ("--enable-expert-parallel=false", {"parallel.expert_parallel": False}),
        ("--no-enable-prefix-caching", {"cache.prefix_cache": False}),
        ("--disable-radix-cache", {"cache.prefix_cache": False}),
        ("--enable_prefix_caching True", {"cache.prefix_cache": True}),
        ("--ep 8", {"parallel.expert_parallel": True}),
        (
            "--speculative-draft-model-path a/b --speculative-draft-model-revision 67ca",
            {"speculative.path": "a/b@67ca"},
        ),
        ("--tp 4 --dp 4 --enable-dp-attention", {"parallel.tensor_parallel": 4}),
        ("--reasoning-parser qwen3 --tool-call-parser hermes", {"ingress.output_parser": "hermes"}),
        ("--tool-call-parser hermes --reasoning-parser qwen3", {"ingress.output_parser": "hermes"}),
        ("--reasoning-parser qwen3 --tool-call-parser lfm2", {"ingress.output_parser": "auto"}),
        ("--reasoning-parser deepseek-r1", {"ingress.output_parser": "think"}),
        (
            "--default-chat-template-kwargs.enable_thinking false --default_chat_template_kwargs.mode fast",
            {"ingress.chat_template_kwargs": {"enable_thinking": False, "mode": "fast"}},
        ),
        (
            "--speculative-config.method=mtp --speculative-config.num_speculative_tokens=2",
            {"speculative.method": "mtp", "speculative.num_steps": 2, "speculative.num_draft_tokens": 3},
        ),
        (
            "--spec-method ngram --spec-tokens 3",
            {"speculative.method": "suffix", "speculative.num_steps": 3, "speculative.num_draft_tokens": 4}
            | {"speculative.match_min": 5, "speculative.match_max": 5},
        ),
        ("--speculative-algorithm NEXTN", {"speculative.method": "mtp"}),
        ("--speculative-algorithm EAGLE", {"speculative.method": "mtp"}),
        ("--speculative-algo EAGLE3 --speculative-draft x", {"speculative.path": "x"}),
        (
            "--speculative-num-steps 3 --speculative-eagle-topk 1",
            {"speculative.num_steps": 3, "speculative.top_k": 1, "speculative.num_draft_tokens": 4},
        ),
        ("-O3 --compilation-config.mode=3 --cudagraph-capture-sizes 1 2 4", {}),
        ("--chunked-prefill-size -1", {}),
        ("--max-total-tokens 24576", {"cache.num_pages": 1536}),
        ("--max-total-tokens 100 --page-size 64", {"cache.page_size": 64, "cache.num_pages": 2}),
        (
            '--rope-scaling \'{"rope_type": "yarn", "factor": 4.0}\'',
            {"model.rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        (
            "--hf-overrides.text_config.rope_scaling.factor=2 --hf_overrides.text_config.rope_scaling.type yarn",
            {"model.rope_scaling": {"type": "yarn", "factor": 2}},
        ),
        (
            '--speculative-config \'{"method": "ngram", "model": "X/Y", "prompt_lookup_max": 4}\'',
            {"speculative.method": "suffix", "speculative.match_min": 4, "speculative.match_max": 4},
        ),
        ("--ssl-keyfile none --cpu-offload-gb 0 --nnodes 1", {}),
    ],
)
def test_a_spelling_sets_its_key(line: str, keys: dict[str, object]) -> None:
    assert keys_of(f"X/Y {line}")[0] == keys


def test_options_without_effect_are_named_in_one_line() -> None:
    _, notes = keys_of("X/Y --moe-backend triton --disable-log-stats --no-async-scheduling --mm-processor-cache-gb 0")
    (line,) = notes
    assert line.startswith("no effect here: ") and line.count(",") == 3
    for name in ("--moe-backend triton", "--disable-log-stats", "--no-async-scheduling", "--mm-processor-cache-gb 0"):
        assert name in line


def test_paths_that_routes_are_below() -> None:
    line = ["serve", "X/Y", "--fastapi-root-path", "/proxy/a/", "--route-prefix=/chat"]
    found = parsed(_PARSER, line)
    assert (found.root_path, found.route_prefix) == ("/proxy/a", "/chat")
    assert parsed(_PARSER, ["serve", "--route_prefix", "/"]).route_prefix == "/"


def test_model_is_the_first_argument_by_another_name() -> None:
    for name in ("--model", "--model-path", "--model_path"):
        assert parsed(_PARSER, ["plan", name, "X/Y"]).config == "X/Y"
    assert parsed(_PARSER, ["serve", "X/Y", "--model=X/Y"]).config == "X/Y"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("X/Y --model A/B", "--model A/B: the model is X/Y already"),
        ("X/Y --route-prefix chat", "--route-prefix: chat: must be a path with a slash before it, such as /chat"),
        ("X/Y --max-model-length 4", "aerie plan: --max-model-length: unknown option; did you mean --max-model-len?"),
        ("X/Y --max-model 4", "did you mean --max-model-len?"),
        ("X/Y --model-imp auto", "did you mean --model-impl?"),
        ("X/Y --zebra", "--zebra: unknown option; `aerie plan --help` and docs/coming-from-vllm.md have them all"),
        ("X/Y --port 0", "must be a number from 1 to 65535"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *line.split()])
    (said,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in said


@pytest.mark.parametrize(("command", "meant"), [("srve", "; did you mean serve?"), ("zebra", "'chat')")])
def test_an_unknown_command_is_refused_with_the_nearest_one(
    command: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert capsys.readouterr().err.replace(", chat)", ", 'chat')").endswith(f"{meant}\n")


def test_plan_takes_every_argument_of_serve() -> None:
    (commands,) = _PARSER._subparsers._group_actions  # type: ignore[union-attr]
    known = {name: set(command._option_string_actions) for name, command in commands.choices.items()}  # type: ignore[union-attr,arg-type]
    assert known["serve"] <= known["plan"]


def test_help_shows_groups_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for text in ("parallelism:", "speculation:", "examples:", "--max-model-len", "--chat-template FILE", "--draft"):
        assert text in shown
    assert "--moe-backend" not in shown and "--enable-moe-shared-loras" not in shown


def test_a_part_of_an_object_joins_the_whole_one() -> None:
    found = normalised(
        ["--compilation-config", '{"a": 1}', "--compilation_config.b.c+=x", "-cc.d", "2", "--x_y", "a_b"]
    )
    assert found == ["--x-y", "a_b", "--compilation-config", '{"a": 1, "b": {"c": ["x"]}}', "-cc", '{"d": 2}']


def test_a_template_and_its_variables_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ mood }}")
    options = ["--chat-template", str(template), "--default-chat-template-kwargs", '{"mood": "fast"}', "--nodes", "0"]
    assert main(["plan", TARGET, *options]) == 0
    printed = capsys.readouterr().out
    assert f"chat_template: {template}" in printed and "mood: fast" in printed
    template.unlink()
    assert main(["plan", TARGET, *options]) == 2
    assert f"--chat-template {template}: no such file" in capsys.readouterr().err


FILE = """
model: Qwen/Qwen3-8B
served_model_name: [a, b]
enable-prefix-caching: false
max-model-len: 8192
speculative-config: {method: ngram, num_speculative_tokens: 3}
gpu-memory-utilization: 0.8
chat-template: null
"""


def test_options_come_from_a_file_and_the_command_line_has_priority(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(FILE)
    found = parsed(_PARSER, ["plan", "--max-model-len", "4k", "--config", f"{tmp_path}/o.yaml"])
    keys, _ = vllm_options.changes(vllm_options.given(found))
    assert found.config == "Qwen/Qwen3-8B" and keys["model.max_model_len"] == 4000
    assert keys["ingress.model_aliases"] == ["b"] and keys["cache.prefix_cache"] is False
    assert keys["speculative.method"] == "suffix" and "ingress.chat_template" not in keys
    (tmp_path / "o.yaml").write_text("served_model_name: [a, b]")  # a list does not swallow the model
    assert parsed(_PARSER, ["serve", "X/Y", f"--config={tmp_path}/o.yaml"]).config == "X/Y"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("a: [", "is not YAML"),
        ("- a", "must be a mapping of options"),
        ("applications: []", "give it as the first argument, without --config"),
        ("max-model-length: 4", "--max-model-length: unknown option; did you mean --max-model-len?"),
        ("max-model-len: many", "--max-model-len many: must be a whole number"),
    ],
)
def test_a_wrong_file_of_options_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "o.yaml").write_text(content)
    try:
        status = main(["plan", TARGET, "--config", f"{tmp_path}/o.yaml"])
    except SystemExit as ended:
        status = int(str(ended.code))
    (said,) = capsys.readouterr().err.splitlines()
    assert status == 2 and message in said
