"""Headers before Serve's Python proxy, whose part here decodes them as strictly as Ray 2.60's does."""

import asyncio
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from cluster.logs import REQUEST_ID
from deploy.serve.python_proxy import ENVIRONMENT, middlewares

_STEERING = (b"x-session-id", b"serve_multiplexed_model_id", b"serve-multiplexed-model-id")
STRICT = (b"x-request-id", *_STEERING, b"traceparent")
NAMES = (*STRICT, b"tracestate", b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"user-agent")
Headers = list[tuple[bytes, bytes]]


def passed_on(headers: Headers) -> Headers:
    """What the proxy is given."""
    seen: Headers = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def unused(*_: Any) -> Message:
        raise AssertionError("nothing is read or sent")

    (middleware,) = middlewares()
    asyncio.run(middleware.cls(proxy)({"type": "http", "headers": headers}, unused, unused))  # type: ignore[call-arg,arg-type]
    return seen


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=200)), max_size=5))
@example([(b"x-request-id", b"\xff")])
@example([(b"x-request-id", b"x" * 8192), (b"x-session-id", b"\x80")])
@example([(b"x-request-id", b"good-1"), (b"user-agent", b"\xff"), (b"traceparent", b"00-ab")])
def test_every_header_that_serve_reads_can_be_read(headers: Headers) -> None:
    seen = passed_on(headers)
    for name, value in seen:
        if name in STRICT:
            value.decode()
    given_ids, ids = ([value for name, value in each if name == b"x-request-id"] for each in (headers, seen))
    for before, after in zip(given_ids, ids, strict=True):
        is_good = REQUEST_ID.fullmatch(before.decode("latin-1")) is not None
        assert after == before if is_good else REQUEST_ID.fullmatch(after.decode()) is None, "an id changed its meaning"
    agents = [value for name, value in headers if name == b"user-agent"]
    assert [value for name, value in seen if name == b"user-agent"] == agents
    assert not {name for name, _ in seen} & set(_STEERING)


def test_serve_finds_it() -> None:
    from ray.serve._private.utils import call_function_from_import_path

    found = call_function_from_import_path(*ENVIRONMENT.values())
    assert [each.cls for each in found] == [each.cls for each in middlewares()]
