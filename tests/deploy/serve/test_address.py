"""The address of HTTP is checked before anything starts: each fault is one line with its remedy."""

import socket
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.cli import main
from aerie.deploy.serve.address import Address, checked_address

IPV6 = Path("/proc/net/if_inet6")


@pytest.mark.parametrize("port", [99999, -1, 0, "abc", None, True, 8000.5])
def test_a_port_out_of_range_names_the_range(port: object) -> None:
    with pytest.raises(ConfigError, match=rf"^http_options.port={port}: must be a number from 1 to 65535"):
        checked_address("127.0.0.1", port)


@pytest.mark.parametrize("text", ["abc", "99999", "-1", "0", "80.5"])
def test_the_option_is_refused_as_it_is_read(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", text])
    assert ended.value.code == 2
    assert f"--port: {text}: must be a number from 1 to 65535, such as 8000\n" in capsys.readouterr().err


def test_a_port_in_use_is_told_and_a_free_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} is in use; stop that, or choose another \(--port\)"):
            checked_address("127.0.0.1", port)
    assert checked_address("127.0.0.1", port) == Address("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no.such.host.invalid", "is no address of this machine"),
        ("198.51.100.1", "cannot listen there"),
        ("", "must be an"),
    ],
)
def test_a_host_that_is_not_here_is_told(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"http_options.host={host}: .*{message}.*127.0.0.1"):
        checked_address(host, 18732)


@pytest.mark.skipif(not (IPV6.exists() and IPV6.read_text()), reason="this machine has no IPv6")
def test_ipv6_is_no_port_in_use() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    assert checked_address("::1", port).url == f"http://[::1]:{port}"


def test_clients_of_this_machine_find_a_server_of_all_interfaces() -> None:
    assert Address("0.0.0.0", 8000).url == "http://127.0.0.1:8000"
    assert Address("::", 8000).url == "http://[::1]:8000"
    assert Address("node1", 80).url == "http://node1:80"
