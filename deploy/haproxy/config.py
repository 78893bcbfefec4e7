"""Serve's HAProxy configuration as this server runs it: limits for clients, errors that clients can act on, and
requests that wait while no ingress is reachable. Used by `deploy.haproxy.process`. Needs the standard library only.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

RETRY_AFTER_S = 2
HEADER_LIMIT_S = 10  # for a request's head to be complete, from the connection's first moment on
IDLE_LIMIT_S = 90  # between two requests of a connection; clients pool theirs for less
MAX_CONNECTIONS = 20_000
STREAM_SHARE = 0.85  # share of connections for requests; the rest refuses further ones, and answers health checks
SOURCE_SHARE = 0.8  # share of connections for the requests of one address
CUT_SHARE = 0.95  # share of connections for one address in all, with those that have no request
AMPLE = 4096  # connections from which on an address is cut off: bursts are smaller than what is left then
_BACKLOG = 4096  # connections that the system keeps until HAProxy takes them
_UNHEARD_S = 8  # after which a host that acknowledges nothing is given up: one that has lost its power says nothing
_DEAD_PEERS = (
    "    option srvtcpka",
    f"    srvtcpka-idle {_UNHEARD_S // 2}s",
    f"    srvtcpka-intvl {_UNHEARD_S // 4}s",
    "    srvtcpka-cnt 2",
)
NEXT_WAIT_S = 15  # for an ingress to follow the last one
_NEXT = "aerie-next"
_CHECKED = ("/health", "/ready")
_FULL = "too_many_connections", "service_unavailable_error"
# Headers by which clients would steer Serve: its replica reads them before our application, decodes them strictly (a
# byte that is not UTF-8 is a bare 500) and obeys them (no limit of time, no end when the client leaves).
SERVES_OWN = (
    "^(x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-(timeout-seconds|disconnect-disabled))$"
)
OF_TRACES = "traceparent", "tracestate"
METHODS = "GET POST DELETE HEAD OPTIONS PUT PATCH"
_BAD, _FAILED = "invalid_request_error", "server_error"
_UNAVAILABLE = (
    "Service Unavailable",
    "No part of the server that could answer is reachable now; try again",
    "service_unavailable_error",
    "service_unavailable",
)
# Status -> reason, and of the error message, type, code. Bytes that are not HTTP/1 (TLS, broken heads and chunks) get
# HAProxy's own page instead: its parser (2.8) answers those before there is a request that `errorfile` applies to.
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
    """Serve's `config` with limits and errors of our own, and without the Python proxy that Serve names as a last
    resort: it answers 404 and 500. folder: where `write_error_files` put its files. last: the configuration before,
    used in place of one without routes: such a one comes at the start of Serve's actor and at its end. ports: at least
    two of this machine that are free for it, used in turn by a HAProxy and the next (`_with_waiting`)."""
    if not has_routes(config):
        if last is not None:
            return last
        # All paths are this application's soon.
        config = re.sub(r"http-request return status 404 .*", lambda _: _unavailable(), config)
    config = re.sub(r"(?m)^\s*server .* backup$\n?", "", config)
    bound = [number for number, port in enumerate(ports) if f"bind 127.0.0.1:{port}\n" in (last or "")]
    own = ports[(bound[0] + 1) % len(ports) if bound else 0]
    config = _with_waiting(config, last or "", [port for port in ports if port != own])
    # HAProxy's own statistics are for this machine only.
    config = re.sub(r"(?m)^((?:frontend|listen) (?:prometheus|stats)\n\s*bind) \S*:(\d+)", r"\1 127.0.0.1:\2", config)
    return _with_frontend(_with_defaults(config, folder), own)


def has_routes(config: str) -> bool:
    """Whether it sends any path anywhere."""
    return re.search(r"(?m)^\s*use_backend ", config) is not None


def _with_waiting(config: str, last: str, next_ports: Sequence[int]) -> str:
    """Let routes keep requests for `NEXT_WAIT_S` while none of their servers can be reached; health checks are answered
    at once. Every second such a request tries the route's servers and, in turn, `next_ports`, where the next HAProxies
    listen: several may come in a second. Routes without servers use those of `last` while these listen.

    Serve (Ray 2.60) names no server from an update's arrival until it has imported and built the application again,
    seconds in which the former ingresses serve as before; nor while the only ingress is replaced. One that is about to
    end fails its check before HAProxy knows its successor."""
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
            f"    {_unavailable()} if {{ path_beg {' '.join(_CHECKED)} }} {gone}",
            f"    retries {NEXT_WAIT_S}",
            *(f"    server {server} {place} check inter 200ms fall 1 rise 1" for server, place in former),
            "    option allbackups",
            *(f"    server {_NEXT}-{port} 127.0.0.1:{port} no-check backup" for port in next_ports),
            "",
        ]
        config = config.replace(section, "\n".join(lines))
    return config


def _backends(config: str) -> list[tuple[str, str]]:
    """Names and texts of its sections that name servers."""
    return [(at[1], at[0]) for at in re.finditer(r"(?m)^backend (\S+)\n(?:[ \t#].*\n|\n)*", config)]


def _servers(section: str) -> list[tuple[str, str]]:
    """Names and places of a backend's ingresses."""
    found = re.findall(r"(?m)^[ \t]*server (\S+) (\S+)", section)
    return [(name, place) for name, place in found if not name.startswith(_NEXT)]


def _with_defaults(config: str, folder: Path) -> str:
    """Add time limits and the answers to faults. Let no request use a connection that served another client: if the
    ingress has gone meanwhile, the request would be lost, whereas a new connection tries the next ingress."""
    config = re.sub(r"(?m)^(\s*default-server .*)$", rf"\1 tcp-ut {_UNHEARD_S}s", config)
    config = config.replace("http-reuse always", "http-reuse safe")
    # Pipes for splicing would take a fifth of the open files, and events are too short for them.
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
    """Add limits of connections, and remove what this server does not do.

    port: listen on it, too, for requests that the former HAProxy has kept waiting.

    Requests above a limit are refused in words, and their connections closed. Where there are connections enough, an
    address that has nearly all of them is cut off, because one that says nothing takes up room for `HEADER_LIMIT_S`.
    Where there are few, a burst of requests looks the same for a moment; what comes then waits for the system to hand
    it over."""
    found = re.search(r"(?m)^\s*maxconn (\d+)", config)
    most = int(found[1]) if found else MAX_CONNECTIONS
    unknown = _rule(404, "Unknown route", "not_found")
    full = _rule(503, "The server carries as many connections as it can; try again", *_FULL)
    full += f' hdr Retry-After "{RETRY_AFTER_S}" hdr Connection close if !{{ path_beg {" ".join(_CHECKED)} }}'
    cut = "tcp-request connection reject"
    rules = [
        f"    bind 127.0.0.1:{port}",
        "    stick-table type ipv6 size 200k expire 10m store conn_cur",
        "    tcp-request connection track-sc0 src",
        *([f"    {cut} if {{ sc0_conn_cur gt {_share(most, CUT_SHARE)} }}"] if most >= AMPLE else []),
        f"    backlog {_BACKLOG}",
        f"    {full} {{ sc0_conn_cur gt {_share(most, SOURCE_SHARE)} }}",
        f"    {full} {{ fe_conn gt {num_streams(most)} }}",
        f"    {_rule(405, f'This method is not one of {METHODS}', 'method_not_allowed')} if !{{ method {METHODS} }}",
        # The ingress refuses it in words once it has read the body, which a refusal here would cut off.
        "    http-request set-header x-request-id 'not printable' if { req.fhdr(x-request-id) -m reg [^!-~] }",
        f"    http-request del-header {SERVES_OWN} -m reg",
        *(f"    http-request del-header {name} if {{ req.fhdr({name}) -m reg '[^ -~]' }}" for name in OF_TRACES),
        f"    {_rule(400, 'There are no WebSockets here', 'bad_request')} if {{ req.hdr(upgrade) -m found }}",
        f"    {unknown} if {{ path -i /-/routes }}",
        f"    {unknown} if {{ path -i /-/healthz }} !{{ src 127.0.0.0/8 ::1 }}",
    ]
    return re.sub(r"(?m)^(frontend http_frontend\n\s*bind .*)$", lambda at: "\n".join([at[1], *rules]), config, count=1)


def num_streams(most: int) -> int:
    """Requests that are carried at a time by a HAProxy of `most` connections."""
    return _share(most, STREAM_SHARE)


def _share(most: int, share: float) -> int:
    return max(1, int(most * share))


def write_error_files(folder: Path) -> None:
    """Write the bodies of HAProxy's own error replies."""
    for status in _ERRORS:
        _error_file(folder, status).write_text(answer(status))


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"aerie-error-{status}.http"


def answer(status: int) -> str:
    """A whole HTTP answer. What no server could answer is a 503 with Retry-After."""
    reason, message, kind, code = _ERRORS[status]
    body = _json(message, kind, code)
    unavailable = kind == "service_unavailable_error"
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if unavailable else ""
    start = f"HTTP/1.1 {503 if unavailable else status} {reason}\r\nContent-Type: application/json\r\n"
    return f"{start}Connection: close\r\n{retry}Content-Length: {len(body)}\r\n\r\n{body}"


def _json(message: str, kind: str, code: str) -> str:
    """Return an error as JSON, in the form of all errors (`cluster.http.errors`)."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":"))


def _rule(status: int, message: str, code: str, kind: str = "invalid_request_error") -> str:
    return f"http-request return status {status} content-type application/json string '{_json(message, kind, code)}'"


def _unavailable() -> str:
    _, message, kind, code = _UNAVAILABLE
    return f'{_rule(503, message, code, kind)} hdr Retry-After "{RETRY_AFTER_S}"'
