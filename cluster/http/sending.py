"""Adapts replies to HEAD, which has no body, and to HTTP/1.0, which has no chunks; uvicorn (0.54) sends chunks anyway.
Used by `cluster.http.middleware`."""

from starlette.types import Message, Scope, Send


def adapted_send(scope: Scope, send: Send) -> Send:
    """Return `send` adapted to the request of `scope`."""
    if scope["method"] == "HEAD":
        return _without_body(send)
    return _in_one_piece(send) if scope.get("http_version") == "1.0" else send


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


def _in_one_piece(send: Send) -> Send:
    """Hold a reply of unknown length, or a stream, until it is complete, so that its length is known."""
    start: Message | None = None
    body = bytearray()

    async def send_whole(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            if any(name.lower() == b"content-length" for name, _ in message["headers"]):
                await send(message)
            else:
                start = message
        elif start is None:
            await send(message)
        else:
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                headers = [*start["headers"], (b"content-length", str(len(body)).encode())]
                await send({**start, "headers": headers})
                await send({**message, "body": bytes(body)})

    return send_whole
