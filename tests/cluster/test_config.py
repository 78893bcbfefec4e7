"""The configuration: what is accepted, and what every refusal says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cluster.config import AerieConfig, ConfigError, parse, read_args
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.parallel import ReplicasConfig
from tests.support import ROOT


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def _args(**sections: Any) -> dict[str, Any]:
    return {"model": {"path": "target"}, **sections}


def test_sections_become_the_layers_dataclasses(base: Path) -> None:
    config = parse(
        _args(
            speculative={"path": "draft", "num_steps": 2, "top_k": 2, "num_draft_tokens": 5},
            cache={"page_size": 32, "memory_gb": 2},
            parallel={"tensor_parallel": 2},
            ingress={"num_replicas": 3, "api_keys": ["0123456789"]},
            deterministic=True,
        ),
        base,
    )
    assert config.speculative is not None and config.speculative.path == str(base / "draft")
    assert config.worker.cache.page_size == 32 and config.worker.tensor_parallel == 2
    assert isinstance(config.ingress, EdgeConfig) and len(config.ingress.api_keys) == 1
    assert config.ingress.num_replicas == 3
    assert config.worker.deterministic and not parse(_args(), base).worker.deterministic


def test_a_draft_that_comes_with_its_target_needs_no_path(base: Path) -> None:
    for given, path in (({}, "target"), ({"path": "draft"}, "draft")):
        config = parse(_args(speculative={"method": "mtp", **given}), base)
        assert config.speculative is not None and config.speculative.path == str(base / path)
    with pytest.raises(ConfigError, match=r"speculative.path: is missing"):
        parse(_args(speculative={"method": "eagle3"}), base)


@pytest.mark.parametrize(
    ("given", "steps", "width"),
    [({}, 15, 16), ({"num_steps": 7}, 7, 8), ({"num_draft_tokens": 5}, 4, 5), ({"match_min": 3}, 15, 16)],
)
def test_copied_drafts_need_no_path_and_have_a_length_of_their_own(
    base: Path, given: dict[str, Any], steps: int, width: int
) -> None:
    found = parse(_args(speculative={"method": "suffix", **given}), base).speculative
    assert found is not None and found.path == str(base / "target")
    assert (found.num_steps, found.num_draft_tokens, found.top_k) == (steps, width, 1)
    with pytest.raises(ConfigError, match=r"speculative.path=draft: method suffix has no checkpoint"):
        parse(_args(speculative={"method": "suffix", "path": "draft", **given}), base)


def test_replicas_are_a_number_or_a_range(base: Path) -> None:
    parallel = parse(_args(parallel={"replicas": {"min": 2, "max": 5, "up_after_s": 1.5}}), base).parallel
    assert parallel.replicas == ReplicasConfig(2, 5, 1.5) and parallel.min_replicas == 2
    assert parse(_args(parallel={"replicas": 3}), base).parallel.min_replicas == 3
    for given, message in (
        ({"min": 3, "max": 2}, "parallel.replicas.min=3, max=2: min must be at least 1, and max not below it"),
        ({"min": 1, "max": 2, "down_after_s": -1}, "parallel.replicas.down_after_s=-1.0: must be at least 0 seconds"),
        ({"min": 1, "max": 2, "up_after": 1}, r"parallel.replicas.up_after: unknown key; did you mean"),
        ({"min": "one", "max": 2}, "^parallel.replicas.min='one': input should be a valid integer$"),
        (0, "parallel.replicas=0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(_args(parallel={"replicas": given}), base)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"specutive": {}}, "specutive: unknown key; did you mean speculative?"),
        ({"cache": {"page_sice": 16}}, "cache.page_sice: unknown key; did you mean cache.page_size?"),
        ({"speculative": {"path": "draft", "depth": 3}}, "speculative.depth: unknown key; known are path, method"),
        ({"cache": {"page_size": 24}}, "cache.page_size=24: must be a power of two up to 64; try 16 or 32"),
        ({"cache": {"dtype": "int4"}}, "cache.dtype=int4: is not a dtype of KV; choose one of auto, model, fp8_e4m3"),
        ({"cache": {"draft_dtype": "fp8"}}, "cache.draft_dtype=fp8: is not a dtype of KV"),
        ({"cache": {"page_size": "16"}}, "cache.page_size='16': input should be a valid integer"),
        ({"parallel": {"tensor_parallel": 0}}, "parallel.tensor_parallel=0: must be at least 1"),
        ({"engine": {"on_worker_loss": "retry"}}, "engine.on_worker_loss='retry': input should be 'resume' or 'error'"),
        ({"ingress": {"num_replicas": 0}}, "ingress.num_replicas=0: must be at least 1"),
        ({"scheduler": 3}, "scheduler=3: "),
        (
            {"scheduler": {"max_step_tokens": "many"}},
            "scheduler.max_step_tokens='many': input should be a valid integer or input should be 'auto'",
        ),
        ({"scheduler": {"max_step_tokens": 0}}, "scheduler.max_step_tokens=0: must be at least 1"),
        ({"scheduler": {"itl_target_ms": 0}}, "scheduler.itl_target_ms=0.0: must be above 0 milliseconds"),
        ({"deterministic": "yes"}, "deterministic='yes': input should be a valid boolean"),
        ({"speculative": {"path": "nowhere"}}, "speculative.path=nowhere: "),
        (
            {"speculative": {"path": "draft", "num_steps": 3, "num_draft_tokens": 9}},
            "speculative.num_draft_tokens=9: a chain (top_k=1) has num_steps + 1 = 4 tokens",
        ),
    ],
)
def test_fault_names_key_value_rule_and_remedy(base: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(_args(**sections), base)
    assert str(error.value).startswith(message)


def test_all_faults_are_told_at_once(base: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse(_args(cache={"page_size": 24}, parallel={"replicas": -1}), base)
    assert len(str(error.value).splitlines()) == 2


def test_model_is_required(base: Path) -> None:
    with pytest.raises(ConfigError, match="model: is missing"):
        parse({}, base)
    with pytest.raises(ConfigError, match=r"model\.path: is missing; give the folder"):
        parse({"model": {}}, base)


def test_args_are_read_from_the_serve_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    application = {"import_path": "aerie.deploy.app:build", "args": {"model": {"path": "x"}}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    assert read_args(path) == {"model": {"path": "x"}}
    path.write_text("applications: []")
    with pytest.raises(ConfigError, match="no application has import_path aerie.deploy.app:build$"):
        read_args(path)
    path.write_text("applications: [{import_path: 'deploy.app:build'}]")
    with pytest.raises(ConfigError, match="deploy.app:build is its name before 0.2"):
        read_args(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_args(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_args(tmp_path / "absent.yaml")


def test_every_shipped_file_has_only_known_keys(base: Path) -> None:
    root = ROOT / "deploy"
    for path in sorted(root.glob("*.yaml")):
        args = dict(read_args(path))
        args["model"] = {**args["model"], "path": "target"}
        if "speculative" in args:
            args["speculative"] = {**args["speculative"], "path": "draft"}
        assert isinstance(parse(args, base), AerieConfig), path


def test_a_number_or_auto_is_one_rule(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    args = {"model": {"path": "."}, "cache": {"memory_gb": "lots"}, "scheduler": {"max_running": 1.5}}
    with pytest.raises(ConfigError) as error:
        parse(args, tmp_path)
    assert str(error.value).splitlines() == [
        "cache.memory_gb='lots': input should be a valid number or input should be 'auto'",
        "scheduler.max_running=1.5: input should be a valid integer or input should be 'auto'",
    ]
