"""Folders of servers that were killed are removed by the next one's start, and no others."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aerie.cluster.transport.sockets import clear_abandoned, private_folder

OWNER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from aerie.cluster.transport.sockets import private_folder
print(private_folder(), flush=True)
time.sleep(120)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_only_folders_whose_process_has_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        killed, alive = (Path(owner.stdout.readline().strip()) for owner in owners)  # type: ignore[union-attr]
        (killed / "below").mkdir()
        (killed / "below" / "socket").touch()
        own, unknown, elsewhere = private_folder(), tmp_path / "aerie-x", tmp_path / "aerie-y"
        for folder, text in ((unknown, "{"), (elsewhere, '{"pid": 1, "namespace": "pid:[1]", "started": "x"}')):
            folder.mkdir()
            (folder / "owner.json").write_text(text)
        later = tmp_path / "aerie-z"  # of a process whose number another one has by now
        later.mkdir()
        (later / "owner.json").write_text((own / "owner.json").read_text().replace('"started": "', '"started": "1'))
        (tmp_path / "other-a").mkdir()
        assert clear_abandoned() == [later]
        owners[0].kill()
        owners[0].wait()
        assert clear_abandoned() == [killed]
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == sorted([alive.name, own.name, unknown.name, elsewhere.name, "other-a"])
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
