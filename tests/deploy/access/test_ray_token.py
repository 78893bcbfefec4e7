"""Whose token Ray uses: a server's own, a cluster's, the user's, which is never touched."""

import os
import stat
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.access import ensure_token, make_own_token, use_token


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def _users_own(home: Path, mode: int = 0o644) -> Path:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("the user's")
    path.chmod(mode)
    return path


def _state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, time of change and content of each file."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            facts = path.stat()
            found[str(path)] = facts.st_mode, facts.st_mtime_ns, path.read_text()
    return found


def test_a_servers_token_is_in_its_own_folder_and_the_home_stays_as_it_was(home: Path, tmp_path: Path) -> None:
    _users_own(home)
    before, environment = _state(home), {"HOME": str(home)}
    make_own_token(environment, tmp_path)
    made = tmp_path / "auth_token"
    assert environment == {"HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(made)}
    assert stat.S_IMODE(made.stat().st_mode) == 0o600 and len(made.read_text()) == 64
    assert _state(home) == before


@pytest.mark.parametrize(
    "chosen", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/some/where"}]
)
def test_what_the_user_chose_stays(home: Path, tmp_path: Path, chosen: dict[str, str]) -> None:
    environment = {"HOME": str(home)} | chosen
    make_own_token(environment, tmp_path)
    assert environment == {"HOME": str(home), "RAY_AUTH_MODE": "token"} | chosen
    assert not _state(tmp_path)


def test_a_head_makes_a_token_that_only_its_owner_reads_and_hosts_and_servers_find_it(home: Path) -> None:
    for chosen in ({}, {"RAY_AUTH_TOKEN_PATH": f"{home}/own/token"}):
        with pytest.raises(ConfigError, match="a host joins with the head's token"):
            ensure_token({"HOME": str(home)} | chosen, is_head=False)
        environment = {"HOME": str(home)} | chosen
        assert ensure_token(environment, is_head=True) == ""
        path = Path(environment["RAY_AUTH_TOKEN_PATH"])
        made = path.read_text()
        assert len(made) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.parent.stat().st_mode & 0o077 == 0 and path.parent != home / ".ray"
        assert ensure_token(environment, is_head=True) == ensure_token(environment, is_head=False) == ""
        assert path.read_text() == made
        joining = {"HOME": str(home)} | chosen
        use_token(joining)
        assert joining["RAY_AUTH_TOKEN_PATH"] == str(path) and joining["RAY_AUTH_MODE"] == "token"


def test_the_users_token_is_used_for_a_cluster_as_it_is_with_a_warning_if_others_read_it(home: Path) -> None:
    path = _users_own(home)
    before, environment = _state(home), {"HOME": str(home)}
    assert ensure_token(environment, is_head=True).startswith(f"{path}: other users of this machine can read it")
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(path) and _state(home) == before
    path.chmod(0o600)
    assert ensure_token(environment, is_head=False) == ""


def test_a_cluster_without_a_token_is_joined_without_one(home: Path) -> None:
    environment = {"HOME": str(home)}
    use_token(environment)
    assert environment == {"HOME": str(home)}


def test_nothing_is_written_where_no_token_is_used(home: Path) -> None:
    for environment in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}):
        assert ensure_token(environment | {"HOME": str(home)}, is_head=True) == ""
    assert not os.listdir(home)
