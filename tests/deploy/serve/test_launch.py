"""What `aerie serve` says before Ray starts."""

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.arguments import parser
from aerie.deploy.command_line import parsed
from aerie.deploy.config.model import read_command_line
from aerie.deploy.serve.launch import serve
from aerie.workers.distributed.ports import free_port


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
    wanted = parsed(parser(), ["serve", "eagle", "--port", str(free_port()), "--verbose"])
    with pytest.raises(ConfigError, match="no process"):
        serve(read_command_line(wanted), RefusingCheck(), wanted, time.time(), lambda: None)  # type: ignore[arg-type]
    assert ("PYTHONDONTWRITEBYTECODE is set" in "".join(capfd.readouterr())) is compiles
