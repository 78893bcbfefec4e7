"""The server keeps digests of API keys, and no key."""

import hashlib
from pathlib import Path

import msgspec
import pytest
import yaml

from aerie.cluster.config import ConfigError, IngressConfig, parse
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.keys import KeyConfig, digest, matches, named
from aerie.deploy.cli import with_digests
from aerie.deploy.config.files import starting_point
from tests.support import MODELS
from tests.support.embedded import read_config_file

KEY = "sk-a-secret-of-ours"
DIGEST = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"


def test_a_key_or_its_digest_lets_the_key_in_and_nothing_else() -> None:
    for entry in (KEY, DIGEST, DIGEST.upper()):
        digests = EdgeConfig(api_keys=(entry, "another-key")).api_keys
        assert digests[0] == DIGEST
        assert matches(KEY, digests) and matches("another-key", digests)
        for other in (DIGEST, "", KEY[:-1], f"{KEY}é"):
            assert not matches(other, digests)


@pytest.mark.parametrize("entry", ["short", "has a space in it", "nön-ascii-key", "sha256:0123"])
def test_what_is_wrong_with_a_key_is_said_without_it(entry: str) -> None:
    with pytest.raises(ValueError, match="api_keys: ") as caught:
        digest(entry)
    if not entry.startswith("sha256:"):
        assert entry not in str(caught.value)
    model = MODELS / "target"
    for given in ([entry], entry, [12345678]):
        with pytest.raises(ConfigError, match="api_keys") as refused:
            parse({"model": {"path": str(model)}, "ingress": {"api_keys": given}}, Path("/"))
        assert str(given) not in str(refused.value) and "12345678" not in str(refused.value)


def test_a_command_line_gets_digests_in_the_place_of_keys() -> None:
    words = ["aerie", "serve", "x.yaml", "--api-key", KEY, DIGEST, "short", "--port", "8000", f"--api-key={KEY}"]
    hidden = ["aerie", "serve", "x.yaml", "--api-key", DIGEST, DIGEST, "short", "--port", "8000", f"--api-key={DIGEST}"]
    assert with_digests(words) == hidden
    assert with_digests(hidden) == hidden


def test_neither_what_serve_is_given_nor_the_configuration_shows_a_key(tmp_path: Path) -> None:
    content = yaml.safe_load(starting_point("eagle"))
    content["applications"][0]["args"]["ingress"] = {"api_keys": [KEY]}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    given = read_config_file(path)["applications"][0]["args"]
    assert given["ingress"]["api_keys"] == [DIGEST]
    config = parse(given, tmp_path)
    assert config.ingress.api_keys == (DIGEST,)
    assert KEY not in str(given) + repr(config)
    content["applications"][0]["args"]["ingress"] = {
        "api_keys": [{"name": "a", "key": KEY}, {"name": "b", "file": "k"}]
    }
    path.write_text(yaml.safe_dump(content))
    (tmp_path / "k").write_text("another-secret\n")
    given = read_config_file(path)["applications"][0]["args"]
    keys = [{"name": "a", "key": DIGEST}, {"name": "b", "file": str(tmp_path / "k")}]
    assert given["ingress"]["api_keys"] == keys
    config = parse(given, Path("/"))
    assert [(key.name, key.file) for key in named(config.ingress.api_keys)] == [("a", ""), ("b", "")]
    assert msgspec.convert(msgspec.to_builtins(config.ingress), IngressConfig) == config.ingress, "as Serve passes it"
    assert "secret" not in str(given).replace(str(tmp_path), "") + repr(config)
    content["applications"][0]["args"]["ingress"] = {"api_keys": ["short"]}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"^ingress.api_keys: each key must have at least 8 "):
        read_config_file(path)


def _keys(entries: object, base: Path = Path("/")) -> list[KeyConfig]:
    args = {"model": {"path": str(MODELS / "target")}, "ingress": {"api_keys": entries}}
    return list(named(parse(args, base).ingress.api_keys))


def test_a_name_has_the_keys_of_its_file_which_may_change(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\r\n\nthe-next-key\n")
    plain, team = _keys(["a-plain-key", {"name": "team", "file": "keys"}], tmp_path)
    assert plain.name == "key-1" and team.name == "team"
    for key in (KEY, "the-next-key"):
        assert matches(key, team.digests) and not matches(key, plain.digests)
    (listed,) = _keys([{"name": "team", "key": [KEY, "the-next-key"]}])
    assert listed.digests == team.digests


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([{"name": "a b", "key": KEY}], r"ingress.api_keys.0.name: must be 1 to 64 letters"),
        ([{"name": "a"}], r"ingress.api_keys.0.key: give either `key` or `file`"),
        ([{"name": "a", "key": KEY, "file": "f"}], r"ingress.api_keys.0.key: give either"),
        ([{"name": "a", "key": "short"}], r"ingress.api_keys.0.key: each key must have at least 8"),
        ([{"name": "a", "file": "/no/such"}], r"ingress.api_keys.0.file=/no/such: /no/such cannot be read \(No such"),
        ([{"name": "a", "file": "/dev/null"}], r"ingress.api_keys.0.file=/dev/null: /dev/null is empty"),
        ([{"key": KEY}], r"ingress.api_keys.0.name: is missing"),
        ([{"nme": "a", "key": KEY}], r"ingress.api_keys.0.nme: unknown key; did you mean ingress.api_keys.0.name\?"),
        ([{KEY: "a"}], r"ingress.api_keys.0: unknown key; known are name, key, file"),
        ({"a": KEY}, r"ingress.api_keys: "),
        ([KEY, {"name": "a", "key": DIGEST}], r"ingress.api_keys: one key is given twice"),
        ([KEY, {"name": "key-1", "key": "another-key"}], r"ingress.api_keys: two keys are named key-1"),
        ([{"name": "a", "key": KEY, "admin": 3}], r"ingress.api_keys.0.admin: input should be a valid boolean"),
    ],
)
def test_a_wrong_entry_is_named_without_its_key(entries: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        _keys(entries)
    assert KEY not in str(refused.value)
