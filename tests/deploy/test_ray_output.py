"""What of Ray's output `aerie serve` leaves out, and that it leaves out nothing else."""

import logging
from collections.abc import Iterator

import pytest
from ray._private.authentication import authentication_token_setup as setup
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from deploy.ray_output import leave_out_ends, leave_out_token_line


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What Ray's authentication logs."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    before, disabled = list(setup.logger.filters), setup.logger.disabled
    setup.logger.disabled = False  # as whoever configures logging from a file leaves loggers that are there already
    setup.logger.filters.clear()  # of commands that ran in this process
    setup.logger.addHandler(handler)
    yield found
    setup.logger.removeHandler(handler)
    setup.logger.filters[:], setup.logger.disabled = before, disabled


def test_that_a_token_protects_the_cluster_is_no_warning(lines: list[str]) -> None:
    setup._warn_token_auth_enabled()
    assert len(lines) == 1, "Ray's own line, without which this test says nothing"
    leave_out_token_line()
    setup._warn_token_auth_enabled()
    assert len(lines) == 1
    setup._warn_token_auth_disabled()
    assert len(lines) == 2 and "disabled" in lines[1]


def test_after_the_end_began_nothing_of_rays_processes_is_printed() -> None:
    printed: list[object] = []
    dispatcher.add_handler("ray_print_logs", printed.append)
    dispatcher.emit("before")
    leave_out_ends()
    dispatcher.emit("after")
    assert printed == ["before"]
