"""What `aerie serve` says before Ray starts."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.serve.launch import serve
from aerie.workers.distributed.ports import free_port
from tests.support import ROOT


class RefusingCheck:
    """A check process that cannot start, so that the start ends before Ray."""

    def begin(self, task: Any, receive: Any) -> None:
        raise ConfigError("no process")


@pytest.mark.parametrize("compiles", [True, False])
def test_a_start_tells_that_every_process_compiles_its_imports(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aerie.deploy.serve.launch.always_compiles", lambda: compiles)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wanted = argparse.Namespace(
        address=None,
        host=None,
        port=free_port(),
        verbose=True,
        name=None,
        replace=False,
        root_path=None,
        route_prefix=None,
    )
    with pytest.raises(ConfigError, match="no process"):
        serve(ROOT / "deploy" / "eagle.yaml", RefusingCheck(), wanted, time.time(), lambda: None)  # type: ignore[arg-type]
    assert ("PYTHONDONTWRITEBYTECODE is set" in "".join(capfd.readouterr())) is compiles
