"""Images from URLs: only allowed hosts with public addresses, also after redirects and in every spelling."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.requests.image_fetch import Fetcher, data_of, is_public_address

HOST = "images.example.com"


@contextlib.asynccontextmanager
async def web(replies: dict[str, bytes]) -> AsyncIterator[tuple[int, list[str]]]:
    """A server of raw replies by path. Yields its port, and the heads of its requests."""
    heads: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        reply = replies.get(head.split()[1])
        if reply is None:
            await reader.read()  # until the client leaves
        else:
            writer.write(reply)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.release()

    ended = asyncio.Semaphore(0)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()
        for _ in heads:
            await ended.acquire()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def fetcher(names: dict[str, Sequence[str]] | None = None, **changes: Any) -> Fetcher:
    """Return a fetcher that treats 127.0.0.1 as the only public address. names: addresses by host."""
    known = {HOST: ["127.0.0.1"]} | (names or {})

    async def resolve(host: str, port: int) -> Sequence[str]:
        return known[host]

    options: dict[str, Any] = {"hosts": [HOST, "*.example.org"], "max_bytes": 1000, "timeout_s": 2.0} | changes
    return Fetcher(resolve=resolve, is_public=lambda address: address == "127.0.0.1", **options)


async def refusal(of: Fetcher, url: str) -> str:
    with pytest.raises(ApiError) as refused:
        await of.fetch(url, "messages[0]")
    assert refused.value.status == 400 and refused.value.param == "messages[0]"
    return refused.value.message


async def test_an_allowed_host_gives_the_image() -> None:
    replies = {"/a": ok(b"image"), "/b": moved("/a"), "/c": moved("http://other.example.org:PORT/a")}
    async with web(replies) as (port, heads):
        replies["/c"] = moved(f"http://other.example.org:{port}/a")
        of = fetcher({"other.example.org": ["127.0.0.1"]})
        for path in ("/a", "/b", "/c"):
            assert await of.fetch(f"http://{HOST}:{port}{path}", "p") == b"image"
    assert f"Host: {HOST}:{port}" in heads[0] and "other.example.org" in heads[-1]


async def test_other_hosts_and_private_addresses_are_refused() -> None:
    replies = {
        "/file": moved("file:///etc/passwd"),
        "/other": moved("http://evil.example.net/a"),
        "/inner": moved("http://inner.example.org/a"),
        "/loop": moved("/loop"),
    }
    async with web(replies) as (port, heads):
        of, base = (
            fetcher({"inner.example.org": ["10.0.0.7"], "half.example.org": ["127.0.0.1", "::1"]}),
            f"http://{HOST}",
        )
        for url, reason in (
            ("http://127.0.0.1/a", "ingress.image_hosts only"),
            (f"http://{HOST}.evil.example.net/a", "ingress.image_hosts only"),
            (f"http://evil.example.net#{HOST}/a", "ingress.image_hosts only"),
            (f"http://evil.example.net\\@{HOST}/a", "without a user"),
            (f"http://{HOST}/\x00a\n", "cannot be fetched"),
            (f"http://user@{HOST}/a", "without a user"),
            ("http://[::ffff:7f00:1]/a", "ingress.image_hosts only"),
            ("http://example.org/a", "ingress.image_hosts only"),
            (f"ftp://{HOST}/a", "must be a data URL"),
            ("file:///etc/passwd", "must be a data URL"),
            (f"http://{HOST}:99999/a", "is not a URL"),
            ("http://inner.example.org/a", "not public"),
            ("http://half.example.org/a", "not public"),
            (f"{base}:{port}/file", "must be a data URL"),
            (f"{base}:{port}/other", "ingress.image_hosts only"),
            (f"{base}:{port}/inner", "not public"),
            (f"{base}:{port}/loop", "redirects"),
        ):
            assert reason in await refusal(of, url), url
        assert {head.split()[1] for head in heads} == replies.keys()
    assert "image_hosts" in await refusal(fetcher(hosts=()), f"http://{HOST}/a")


async def test_large_slow_and_failing_replies_are_refused() -> None:
    replies = {
        "/large": ok(bytes(2000)),
        "/endless": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5000),
        "/zip": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "/odd": b"hello\r\n\r\n",
    }
    async with web(replies) as (port, _):
        of = fetcher(timeout_s=0.5)
        for path, reason in (
            ("/large", "more than 1000 bytes"),
            ("/endless", "more than 1000 bytes"),
            ("/zip", "answers 404"),
            ("/odd", "cannot be fetched"),
            ("/slow", "did not arrive in 0.5 s"),
        ):
            assert reason in await refusal(of, f"http://{HOST}:{port}{path}"), path


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe"),
        *("64:ff9b::7f00:1", "2002:7f00:1::1", "2001:0:7f00:1::1", "localhost", "2130706433", ""),
    ],
)
def test_private_addresses_are_found_in_all_forms(address: str) -> None:
    assert not is_public_address(address)


def test_public_addresses_are_public() -> None:
    assert all(map(is_public_address, ("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34")))


def test_data_urls_are_read_within_the_limit() -> None:
    assert data_of("data:image/png;base64,aGVs\nbG8=", "p", 10) == b"hello"
    assert data_of("data:,a%20b", "p", 10) == b"a b"
    assert data_of("data:;base64,%2F%2b%3d%3D", "p", 10) == b"\xff", "as URLs are written in queries"
    with pytest.raises(ApiError, match="not base64"):
        data_of("data:;base64,%C3%BC", "p", 10)
    for url in ("data:;base64," + "A" * 400_000, "data:;base64,AAAA" * 2, "data:," + "a" * 20):
        with pytest.raises(ApiError):
            data_of(url, "p", 10)
