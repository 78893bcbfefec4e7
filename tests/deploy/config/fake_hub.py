"""A hub on the loopback, as far as downloads of whole repositories need one."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMIT = "0" * 40
REVISION = "v1"  # beside main


@dataclass
class FakeHub:
    """repositories: files by name, each repository's. gated: those that want `token`. asked: paths of requests.
    is_down: answer everything with 503."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    token: str = "hf_right"
    asked: list[str] = field(default_factory=list)
    is_down: bool = False
    url: str = ""

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        self.asked.append(path)
        if self.is_down:
            return 503, {}, b""
        parts = path.partition("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = self.repositories.get(name)
        if files is None:
            return 404, {"x-error-code": "RepoNotFound"}, b""
        if name in self.gated and token != self.token:
            return 401, {"x-error-code": "GatedRepo"}, b""
        if parts[0] != "api":
            content = files.get("/".join(parts[4:]))
            return (404, {"x-error-code": "EntryNotFound"}, b"") if content is None else (200, {}, content)
        revision = parts[5] if len(parts) > 5 else "main"
        if revision not in ("main", REVISION, COMMIT):
            return 404, {"x-error-code": "RevisionNotFound"}, b""
        if len(parts) > 4 and parts[4] == "tree":
            listing: Any = [
                {"type": "file", "path": each, "size": len(content), "oid": COMMIT} for each, content in files.items()
            ]
        else:
            listing = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": each} for each in files]}
        return 200, {}, json.dumps(listing).encode()


def checkpoint(folder: Path) -> dict[str, bytes]:
    """A folder's files as a repository's."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextlib.contextmanager
def running_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Sets its `url`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("authorization", "").removeprefix("Bearer ")
            status, headers, body = hub.answer(self.path, token)
            self.send_response(status)
            for name, value in (*headers.items(), ("content-length", str(len(body)))):
                self.send_header(name, value)
            self.send_header("etag", f'"{self.path.rpartition("/")[2]}"')
            self.send_header("x-repo-commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
