"""Ray's files before Ray is there: whether there is room."""

import shutil
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.serve import ray_start
from aerie.deploy.serve.ray_start import check_room


def test_a_full_folder_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_room({"RAY_TMPDIR": str(tmp_path)})
    check_room({"RAY_TMPDIR": str(tmp_path / "missing")})
    usage = shutil.disk_usage(tmp_path)._replace(free=65_536)
    monkeypatch.setattr(ray_start.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"/tmp/x: 0.1 MB are free, and Ray.s logs .* 32 MB; .* set RAY_TMPDIR"):
        check_room({"TMPDIR": "/tmp/x"})
