"""Ray's files before Ray is there: who may read the token, and whether there is room."""

import os
import shutil
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.serve import ray_start
from aerie.deploy.serve.ray_start import check_room, keep_to_owner


def test_a_token_that_everybody_may_read_and_new_files_become_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        token, linked = tmp_path / "token", tmp_path / "linked"
        token.write_text("0" * 64)
        token.chmod(0o644)
        linked.symlink_to(token)
        keep_to_owner({"RAY_AUTH_TOKEN_PATH": str(linked)})
        assert token.stat().st_mode & 0o777 == 0o600
        (tmp_path / "log").touch()
        assert (tmp_path / "log").stat().st_mode & 0o077 == 0
        keep_to_owner({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")})
    finally:
        os.umask(before)


def test_a_full_folder_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_room({"RAY_TMPDIR": str(tmp_path)})
    check_room({"RAY_TMPDIR": str(tmp_path / "missing")})
    usage = shutil.disk_usage(tmp_path)._replace(free=65_536)
    monkeypatch.setattr(ray_start.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"/tmp/x: 0.1 MB are free, and Ray.s logs .* 32 MB; .* set RAY_TMPDIR"):
        check_room({"TMPDIR": "/tmp/x"})
