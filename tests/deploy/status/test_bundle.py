"""`aerie doctor --bundle`: everything is there, and none of the secrets that are planted in it."""

import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
import yaml

from aerie.deploy.processes.server_record import VARIABLE, Record, begin
from aerie.deploy.status import bundle
from aerie.deploy.status.bundle import redacted, without_secrets

HEX = "0123456789abcdef" * 4
PLANTED = {
    "api key": "plain-words-as-a-key",
    "tenant's key": "another.tenants.key",
    "variable of the runtime": "hunter2-is-long",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQr",
    "WANDB_API_KEY": "wandb0123456789",
    "Ray's token": HEX,
    "bearer": "eyJhbGciOi.eyJzdWIiOiI.c2lnbmF0dXJl",
    "option": "key-on-a-command-line",
    "password in a URL": "pa55w0rd!",
    "OpenAI's": "sk-proj-abcdefgh12345678",
    "AWS's": "AKIAIOSFODNN7EXAMPLE",
}
LOG = f"""INFO ingress: engine ready, max_tokens=40 of 128 tokens, token_map.json has 32768 rows
Authorization: Bearer {PLANTED["bearer"]}
aerie serve model --api-key {PLANTED["option"]} --max-model-len 4096
proxy http://me:{PLANTED["password in a URL"]}@proxy:3128/ and {{"api_key": "{PLANTED["OpenAI's"]}", "n": 2}}
x-api-key: {PLANTED["api key"]}; AWS_SECRET_ACCESS_KEY={PLANTED["AWS's"]} and {PLANTED["HF_TOKEN"]}
copies: {PLANTED["tenant's key"]} {PLANTED["variable of the runtime"]} {PLANTED["WANDB_API_KEY"]} {HEX}
"""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files of a bundle, by name."""
    for name in (VARIABLE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_TOKEN", PLANTED["HF_TOKEN"])
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["WANDB_API_KEY"])
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    session = tmp_path / "ray" / "session_1"
    token = tmp_path / "auth_token"
    token.write_text(HEX)
    begin(Record("server", port=8000, session=str(session), ray={"RAY_AUTH_TOKEN_PATH": str(token)}))
    for folder in (tmp_path / "state" / "aerie", session / "logs" / "serve"):
        folder.mkdir(parents=True)
    (tmp_path / "state" / "aerie" / "serve-8000.log").write_text(LOG)
    (session / "logs" / "raylet.out").write_text(LOG)
    (session / "logs" / "serve" / "replica.log").write_text("x" * 100 + "\n" + LOG)
    (session / "logs" / "socket").write_text("not a log")
    config = {
        "applications": [
            {
                "args": {
                    "model": {"path": "nowhere", "load_format": "dummy"},
                    "ingress": {"api_keys": [PLANTED["api key"], {"name": "team", "key": [PLANTED["tenant's key"]]}]},
                },
                "runtime_env": {"env_vars": {"DB_PASSWORD": PLANTED["variable of the runtime"], "A": "B"}},
            }
        ]
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(bundle, "_output", lambda *words: f"output of {words[0]}")
    monkeypatch.setattr(bundle, "MAX_LOG_BYTES", len(LOG) + 10)
    file = tmp_path / "report.tar.gz"
    file.touch(mode=0o644)
    bundle.write_bundle(file, str(tmp_path / "my.yaml"), ["ok    gpu: none"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = {}
    with tarfile.open(file) as content:
        for entry in content:
            extracted = content.extractfile(entry)
            assert extracted is not None
            found[entry.name.removeprefix("aerie-doctor/")] = extracted.read().decode()
    return found


def test_no_planted_secret_is_in_a_bundle(archive: dict[str, str]) -> None:
    for what, secret in PLANTED.items():
        assert not [name for name, text in archive.items() if secret in text], what


def test_what_helps_is_in_it(archive: dict[str, str]) -> None:
    logs = {"logs/aerie/serve-8000.log", "logs/ray/session_1/raylet.out", "logs/ray/session_1/serve/replica.log"}
    parts = {"versions.txt", "findings.txt", "environment.txt", "config.yaml", "plan.txt", "status.json"}
    assert set(archive) == logs | parts
    assert "ray 2." in archive["versions.txt"] and "RAY_health_check_period_ms=1000" in archive["environment.txt"]
    for name in logs:
        assert archive[name].startswith("INFO ingress: engine ready, max_tokens=40 of 128 tokens, token_map.json has")
        assert "--max-model-len 4096" in archive[name]
    (application,) = yaml.safe_load(archive["config.yaml"])["applications"]
    assert application["args"]["ingress"]["api_keys"] == ["(removed)", {"name": "team", "key": ["(removed)"]}]
    assert application["runtime_env"]["env_vars"] == {"DB_PASSWORD": "(removed)", "A": "B"}
    assert application["args"]["model"]["path"] == "nowhere"


def test_an_unreadable_configuration_is_no_obstacle(tmp_path: Path) -> None:
    bundle.write_bundle(tmp_path / "r.tar.gz", str(tmp_path / "none.yaml"), [])
    with tarfile.open(tmp_path / "r.tar.gz") as content:
        config = content.extractfile("aerie-doctor/config.yaml")
        assert config is not None and b"cannot be read" in config.read()


@pytest.mark.parametrize(
    "harmless",
    [
        "num_draft_tokens: 8, max_step_tokens=512",
        "tokenizer.json, token_map.json; bonus token 5",
        "speculative: {draft_vocab_size: 32768}",
        "engine 0c05d19c.1: ready; page_size=32",
        "http://127.0.0.1:8000/v1",
    ],
)
def test_ordinary_lines_stay(harmless: str) -> None:
    assert redacted(harmless) == harmless


def test_settings_that_are_named_after_tokens_stay() -> None:
    content = {"scheduler": {"max_step_tokens": 512}, "draft": {"token_map": "a.json", "tokenizer": "b"}}
    assert without_secrets(content) == content
