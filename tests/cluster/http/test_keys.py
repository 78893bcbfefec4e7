"""The server keeps digests of API keys, and no key."""

import hashlib
from pathlib import Path

import pytest
import yaml

from cluster.config import ConfigError, parse
from cluster.http.config import EdgeConfig
from cluster.http.keys import digest, is_known
from deploy.config.files import starting_point
from deploy.serve.private_arguments import with_digests
from tests.support import MODELS
from tests.support.embedded import read_config_file

KEY = "sk-a-secret-of-ours"
DIGEST = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"


def test_a_key_or_its_digest_lets_the_key_in_and_nothing_else() -> None:
    for entry in (KEY, DIGEST, DIGEST.upper()):
        digests = EdgeConfig(api_keys=(entry, "another-key")).api_keys
        assert digests[0] == DIGEST
        assert is_known(KEY, digests) and is_known("another-key", digests)
        for other in (DIGEST, "", KEY[:-1], f"{KEY}é"):
            assert not is_known(other, digests)


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
    content["applications"][0]["args"]["ingress"] = {"api_keys": ["short"]}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"^ingress.api_keys: each key must have at least 8 "):
        read_config_file(path)
