"""Hostile requests at all routes of a served engine, beside plain streams: whether anything but 2xx and 4xx comes back.

    python -m tests.load.hostile_requests http://127.0.0.1:8000 --seconds 120 --seed 1

Sixteen at a time: bodies that hypothesis makes of the routes' own fields (all of Unicode, lone surrogates, numbers that
are none, any depth and size, keys twice), headers and paths, whole or in chunks cut anywhere, in JSON or almost. Prints
one line of JSON and ends with 1 if a request got 5xx or no answer within its limit, a stream ended with an error of the
server's, or a plain stream's text changed.
"""

import argparse
import asyncio
import collections
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cluster.http.schema.messages_request import MessagesRequest
from cluster.http.schema.native_request import NativeRequest
from cluster.http.schema.request import ChatCompletionRequest, CompletionRequest
from cluster.http.schema.responses_request import ResponsesRequest
from tests.load.plain_streams import ended, plain_streams

NUM_CONNECTIONS = 16
ANSWER_LIMIT_S = 90.0
_READ_BYTES = 1 << 16
REFUSED_FOR_NOW = (429, 503)
POLITE = b"\r\nretry-after:"  # what a 503 must have

_TALK = {"messages": [{"role": "user", "content": "Say"}]}
_SHORT = {"model": "target", "max_tokens": 8}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _SHORT | _TALK,
    "/v1/completions": _SHORT | {"prompt": "Say"},
    "/v1/messages": _SHORT | _TALK,
    "/v1/messages/count_tokens": {"model": "target"} | _TALK,
    "/v1/responses": {"model": "target", "max_output_tokens": 8, "input": "Say"},
    "/generate": {"text": "Say", "sampling_params": {"max_new_tokens": 8}},
    "/invocations": _SHORT | _TALK,
    "/v1/chat/completions/batch": _SHORT | {"messages": [_TALK["messages"]]},
    "/tokenize": {"model": "target", "prompt": "Say"},
    "/detokenize": {"model": "target", "tokens": [1, 2]},
}
OTHER_PATHS = (
    "/v1/models",
    "/v1/models/%00",
    "/v1/responses/resp_x?stream=true&starting_after=x",
    "/metrics",
    "/version",
)
_SCHEMAS = (ChatCompletionRequest, CompletionRequest, MessagesRequest, NativeRequest, ResponsesRequest)
FIELDS = sorted({name for schema in _SCHEMAS for name in schema.model_fields})

texts = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=20),  # surrogates too
    st.sampled_from(
        ["", "\0", "<s>", "</s>", "<|im_start|>", "\ud800", "é" * 300, "a" * 70_000, "{{", "{% for %}", "../../x"]
    ),
)
numbers = st.one_of(
    st.integers(-5, 70),
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, 5e-324, -0.0, float("nan"), float("inf")]),
)
_scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
_names = st.one_of(st.sampled_from(FIELDS), texts)


def _tool(name: Any, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


# Values of the type that the field expects, with unusual contents.
shaped: dict[str, st.SearchStrategy[Any]] = {
    "model": texts,
    "user": texts,
    "prompt": st.one_of(texts, st.lists(texts, max_size=3), st.lists(st.integers(-2, 5000), max_size=5)),
    "stop": st.one_of(texts, st.lists(texts, max_size=6)),
    "logit_bias": st.dictionaries(st.one_of(texts, st.integers(-3, 5000).map(str)), numbers, max_size=5),
    "tools": st.lists(st.builds(_tool, texts, values), min_size=1, max_size=3),
    "tool_choice": st.one_of(texts, st.builds(lambda n: {"type": "function", "function": {"name": n}}, texts)),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), texts)},
            optional={"content": st.one_of(texts, values), "name": texts, "tool_calls": values, "tool_call_id": texts},
        ),
        max_size=4,
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "structural_tag", "json_object"]),
        st.one_of(texts, st.lists(texts, max_size=4), values),
        max_size=2,
    ),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["json_object", "json_schema", "text", "structural_tag"])},
        optional={"json_schema": st.one_of(values, st.fixed_dictionaries({"name": texts, "schema": values}))},
    ),
    "guided_choice": st.lists(texts, max_size=4),
    "guided_regex": texts,
    "guided_json": values,
    "stop_token_ids": st.lists(st.integers(), max_size=5),
    "chat_template_kwargs": st.dictionaries(texts, values, max_size=3),
    "metadata": st.dictionaries(texts, texts, max_size=4),
    "stream_options": values,
    "cache_salt": texts,
    "input": st.one_of(texts, values),
    "tokens": st.lists(st.integers(), max_size=6),
    "sampling_params": st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
}


@dataclass(frozen=True)
class Asked:
    """A request as bytes. cuts: pieces that are sent one by one. what: for a report."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_chunked: bool
    cuts: list[int]

    def pieces(self) -> list[bytes]:
        """What to send, in order."""
        places = sorted({cut % (len(self.body) + 1) for cut in self.cuts} | {0, len(self.body)})
        parts = [self.body[first:last] for first, last in itertools.pairwise(places)]
        if self.is_chunked:
            parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part] + [b"0\r\n\r\n"]
            length = (b"transfer-encoding", b"chunked")
        else:
            length = (b"content-length", b"%d" % len(self.body))
        headers = [(b"host", b"127.0.0.1"), (b"connection", b"close"), length, *self.headers]
        head = b"%s %s HTTP/1.1\r\n" % (self.method.encode(), self.path.encode())
        return [head + b"".join(b"%s: %s\r\n" % each for each in headers) + b"\r\n", *parts]

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} {self.body[:300]!r}"


@st.composite
def bodies(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """Return the body of a valid request after one to four random changes."""
    body = dict(valid)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.one_of(st.sampled_from(sorted(shaped)), _names))
        body[name] = draw(shaped[name] if name in shaped and draw(st.integers(0, 3)) else values)
    if draw(st.integers(0, 5)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    if draw(st.booleans()):
        body["stream"] = True
    text = json.dumps(body, ensure_ascii=draw(st.booleans()))
    return draw(_mangled(text.encode("utf-8", "surrogatepass")))


@st.composite
def _mangled(draw: st.DrawFn, raw: bytes) -> bytes:
    how = draw(st.integers(0, 30))
    place = draw(st.integers(0, len(raw)))
    if how == 0:
        return raw[:place]
    if how == 1:
        return raw[:place] + draw(st.binary(min_size=1, max_size=4)) + raw[place:]
    if how == 2:
        return b'{"model": "target", ' + raw[1:]  # a key twice
    if how == 3:
        depth = draw(st.sampled_from([50, 500, 5_000, 500_000]))
        return raw[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
    if how == 4:
        return draw(
            st.sampled_from(
                [
                    b"",
                    b"null",
                    b"[]",
                    b"0",
                    b'"x"',
                    b"\xef\xbb\xbf" + raw,
                    raw.decode(errors="replace").encode("utf-16"),
                ]
            )
        )
    if how == 5:
        return raw[:-1] + b', "n": ' + b"1" * 5_000 + b"}"
    return raw


_CONTROLS = bytes([*range(32), 127])  # with them it is no HTTP: HAProxy ends the connection
_header_values = st.one_of(
    st.binary(max_size=20).map(lambda raw: raw.translate(None, _CONTROLS)),
    st.sampled_from([b"", b"x" * 6_000, "é".encode()]),
)
headers = st.lists(
    st.tuples(
        st.sampled_from(
            [b"x-request-id", b"authorization", b"user-agent", b"x-a", b"traceparent", b"anthropic-version", b"origin"]
        ),
        _header_values,
    ),
    max_size=2,
)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Anything."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    given_headers = draw(headers) if draw(st.integers(0, 3)) == 0 else []
    kind = draw(st.sampled_from([b"application/json"] * 8 + [b"text/plain", b"application/json; charset=utf-16", b""]))
    cuts = draw(st.lists(st.integers(0, 2_000), max_size=4))
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "X"]))
        return Asked(method, draw(st.sampled_from([path, *OTHER_PATHS])), given_headers, b"", False, [])
    body = draw(bodies(ROUTES[path]))
    return Asked("POST", path, [(b"content-type", kind), *given_headers], body, draw(st.booleans()), cuts)


def made_requests(number: int, count: int) -> list[Asked]:
    """What hypothesis makes from a seed."""
    found: list[Asked] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(asked=requests())
    def collect(asked: Asked) -> None:
        found.append(asked)

    collect()
    return found


@dataclass
class Report:
    """statuses: of all answers. faults: what must not be."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)


async def send(host: str, port: int, asked: Asked) -> bytes:
    """The whole answer. Raises OSError and TimeoutError."""
    async with asyncio.timeout(ANSWER_LIMIT_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for piece in asked.pieces():
                writer.write(piece)
                await asyncio.sleep(0)
            answer = bytearray()
            while raw := await reader.read(_READ_BYTES):
                answer += raw
            return bytes(answer)
        finally:
            writer.close()


def judged(asked: Asked, answer: bytes) -> tuple[str, str]:
    """The status of an answer, and what is wrong with it or ""."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode(errors="replace")
    if not head.startswith(b"HTTP/1.1 ") or not status.isdigit():
        return "none", f"{asked}: {answer[:100]!r}"
    if int(status) >= 500 and not (int(status) in REFUSED_FOR_NOW and POLITE in head.lower() + b"\r\n"):
        return status, f"{asked}: {status} {body[:300]!r}"
    if status == "200" and (b'"server_error"' in body or b'"internal_error"' in body or b'"api_error"' in body):
        return "200, error", f"{asked}: {body[-500:]!r}"
    return status, ""


async def attack(url: str, seconds: float, number: int, count: int = 3_000) -> Report:
    """Send the requests of a seed again and again until `seconds` are over, beside plain streams."""
    report, parts = Report(), urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    queue = itertools.cycle(made_requests(number, count))
    host, port = parts.hostname, parts.port

    async def one_by_one(end_s: float) -> None:
        while time.monotonic() < end_s:
            asked = next(queue)
            try:
                status, fault = judged(asked, await send(host, port, asked))
            except (OSError, TimeoutError) as error:
                status, fault = type(error).__name__, f"{asked}: {type(error).__name__}: {error}"
            report.statuses[status] += 1
            if fault:
                report.faults.append(fault)

    async with plain_streams(url, "target") as (process, alone):
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(one_by_one(end_s) for _ in range(NUM_CONNECTIONS)))
        report.faults += alone.faults + (await ended(process)).faults
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args(arguments)
    report = asyncio.run(attack(given_.url, given_.seconds, given_.seed))
    print(json.dumps({"statuses": dict(report.statuses.most_common()), "faults": report.faults}, ensure_ascii=True))
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
