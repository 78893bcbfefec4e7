"""Ray's files before Ray is there: whether there is room."""

import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.processes.server_record import remove_session
from aerie.deploy.serve import ray_start
from aerie.deploy.serve.ray_start import check_room, make_ray_folder, ray_root


def test_rays_folder_is_inside_one_that_only_its_owner_enters_and_goes_with_the_session(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(prefix="rf", dir="/tmp"))
    try:
        folders = {make_ray_folder({"RAY_TMPDIR": str(root / "new")}) for _ in range(3)}
        assert len(folders) == 3
        for folder in folders:
            folder.chmod(0o777)  # as Ray does
            assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700 and folder.parent.parent == root / "new"
            remove_session(folder / "session_")
        assert not list((root / "new").iterdir())
        session = root / "ray" / "session_1"  # another Ray's
        session.mkdir(parents=True)
        remove_session(session)
        assert (root / "ray").is_dir()
    finally:
        shutil.rmtree(root)


def test_sockets_fit_and_a_folder_that_is_too_long_is_refused_or_replaced() -> None:
    fits = "/" + "x" * 30
    assert ray_root({"RAY_TMPDIR": fits}) == Path(fits) and ray_root({"TMPDIR": fits}) == Path(fits)
    longest = f"{fits}/ae-1a2b3c/r/session_2026-11-28_20-33-04_516587_4194304/sockets/plasma_store"
    assert len(longest) == 107
    assert ray_root({"TMPDIR": f"{fits}y"}) == ray_root({}) == Path("/tmp")
    for use in (ray_root, check_room, make_ray_folder):
        with pytest.raises(ConfigError, match=r"RAY_TMPDIR=/xxx.*: .* 107 bytes.* at most 31$"):
            use({"RAY_TMPDIR": f"{fits}y"})


def test_a_full_folder_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_room({"TMPDIR": str(tmp_path)})
    check_room({"RAY_TMPDIR": "/missing"})
    usage = shutil.disk_usage(tmp_path)._replace(free=65_536)
    monkeypatch.setattr(ray_start.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"/tmp/x: 0.1 MB are free, and Ray.s logs .* 32 MB; .* set RAY_TMPDIR"):
        check_room({"TMPDIR": "/tmp/x"})
