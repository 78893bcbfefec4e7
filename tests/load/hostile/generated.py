"""Requests that hypothesis generates for all routes: bodies of the routes' fields, headers, paths, cut into pieces."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from aerie.cluster.http.schema.messages import MessagesRequest
from aerie.cluster.http.schema.native import NativeRequest
from aerie.cluster.http.schema.request import ChatCompletionRequest, CompletionRequest
from aerie.cluster.http.schema.responses import ResponsesRequest
from tests.load.hostile.drawing import drawn

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
        """Return what to send, in order."""
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
    """Return the requests of a seed."""
    return drawn(requests(), number, count)
