"""What strangers may do to Serve's HAProxy: time limits for headers and idle connections, connections per source, and
errors as JSON where HAProxy leaves the choice. Used by `deploy.launch`.

Serve (Ray 2.60) has settings for few of these, and starts HAProxy through RAY_SERVE_HAPROXY_BINARY_PATH. What is named
there is a script that runs this file, which adds the limits to the configuration that Serve wrote and becomes HAProxy,
or the next such script. Needs the standard library only: each change of routes starts it.
"""

import json
import os
import re
import resource
import sys
from pathlib import Path

HEADER_LIMIT_S = 10  # for a request's head to be complete, from the connection's first moment on
IDLE_LIMIT_S = 90  # between two requests of a connection; clients pool theirs for less
MAX_CONNECTIONS = 20_000
SOURCE_SHARE = 0.8  # of them for one address; the rest is room for others, health checks among them
_FILES_EACH = 2.5
_FILES_BESIDE = 512  # files that HAProxy has open for other things
_MARK = "# limits of Aerie"
METHODS = "GET POST DELETE HEAD OPTIONS PUT PATCH"
# Not of 502 to 504, which are `deploy.haproxy`'s, nor of 400 and 408: what HAProxy 2.8 says of a head that it cannot
# read, or that does not come, is built in.
_ERRORS = {
    403: ("Forbidden", "The server does not take this request", "forbidden"),
    413: ("Payload Too Large", "The request is too large", "request_too_large"),
    500: ("Internal Server Error", "Internal server error", "internal_error"),
    501: ("Not Implemented", "The server does not know this kind of request", "not_implemented"),
}


def max_connections() -> int:
    """As many as the open files of this machine's processes allow: HAProxy counts two for each connection and half a
    one for splicing, and does not start where they are too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(256, int((most - _FILES_BESIDE) / _FILES_EACH)))


def limited(config: str, folder: Path) -> str:
    """Serve's `config` with the limits; unchanged if it has them. folder: where `write_error_files` put its files."""
    if _MARK in config:
        return config
    found = re.search(r"(?m)^\s*maxconn (\d+)", config)
    per_source = max(1, int((int(found[1]) if found else MAX_CONNECTIONS) * SOURCE_SHARE))
    config = re.sub(r"(?m)^\s*timeout http-(request|keep-alive) .*\n", "", config)
    errors = [f"    errorfile {status} {_error_file(folder, status)}" for status in _ERRORS]
    defaults = [
        _MARK,
        f"    timeout http-request {HEADER_LIMIT_S}s",
        f"    timeout http-keep-alive {IDLE_LIMIT_S}s",
        *errors,
    ]
    config = re.sub(r"(?m)^(defaults\n\s*mode http)$", "\\1\n" + "\n".join(defaults), config, count=1)
    frontend = [
        "    stick-table type ipv6 size 200k expire 10m store conn_cur",
        "    tcp-request connection track-sc0 src",
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {per_source} }}",
        f"    http-request return {_json(405, 'This method is not one of ' + METHODS, 'method_not_allowed')} "
        f"if !{{ method {METHODS} }}",
        f"    http-request return {_json(400, 'There are no WebSockets here', 'bad_request')} "
        "if { req.hdr(upgrade) -m found }",
        f"    http-request return {_json(404, 'Unknown route', 'not_found')} if {{ path -i /-/routes }}",
        f"    http-request return {_json(404, 'Unknown route', 'not_found')} "
        "if { path -i /-/healthz } !{ src 127.0.0.0/8 ::1 }",
    ]
    config = re.sub(
        r"(?m)^(frontend http_frontend\n\s*bind .*)$", lambda at: at[1] + "\n" + "\n".join(frontend), config, count=1
    )
    # Metrics of HAProxy itself are for this machine.
    return re.sub(r"(?m)^(frontend (?:prometheus|stats)\n\s*bind) (?:\*|0\.0\.0\.0)?:(\d+)", r"\1 127.0.0.1:\2", config)


def write_error_files(folder: Path) -> None:
    """What HAProxy answers by itself, in OpenAI's form."""
    for status, (reason, message, code) in _ERRORS.items():
        body = _body(message, code)
        _error_file(folder, status).write_text(
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nCache-Control: no-cache\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"aerie-error-{status}.http"


def _body(message: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})


def _json(status: int, message: str, code: str) -> str:
    return f"status {status} content-type application/json string '{_body(message, code)}'"


def _become_haproxy(binary: str, arguments: list[str]) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    write_error_files(path.parent)
    path.write_text(limited(path.read_text(), path.parent))
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    _become_haproxy(sys.argv[1], sys.argv[2:])
