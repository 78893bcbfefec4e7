"""Gets the bytes of an image from its URL: a data URL, or http(s) from an allowed host. Raises ApiError.

An address that a client chooses may lead into the server's own network. So hosts are allowed by name, each name is
resolved once, none of its addresses may be private, the connection goes to that address, and redirects follow the same
rules.
"""

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

import httpx

from aerie.cluster.http.errors import ApiError, invalid, unsupported

MAX_REDIRECTS = 3  # maximum redirects that are followed per image
MAX_URL = 2048  # characters of a URL that is fetched
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = (301, 302, 303, 307, 308)  # HTTP status codes of redirects

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def data_of(url: str, param: str, max_bytes: int) -> bytes:
    """Return the content of a data URL (RFC 2397)."""
    head, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise invalid(param, f"{param}: a data URL is data:image/TYPE;base64,CONTENT")
    if not head.endswith(";base64"):
        data = unquote_to_bytes(body) if len(body) <= 3 * max_bytes else body.encode()
    elif len(body) > max_bytes * 4 // 3 + 4096:
        raise _too_large(param, max_bytes)
    else:
        text = unquote(body) if "%" in body else body
        try:
            data = base64.b64decode("".join(text.split()) if " " in text or "\n" in text else text, validate=True)
        except (binascii.Error, ValueError):
            raise invalid(param, f"{param}: the content is not base64") from None
    if len(data) > max_bytes:
        raise _too_large(param, max_bytes)
    return data


class Fetcher:
    """Fetches images from hosts of an allow-list.

    hosts: names, or `*.` and a domain.
    resolve: (host, port) -> its addresses.
    is_public: whether an address may be connected to.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        max_bytes: int,
        timeout_s: float,
        resolve: Resolve | None = None,
        is_public: Callable[[str], bool] | None = None,
    ) -> None:
        self._hosts = [host.lower().rstrip(".") for host in hosts]
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve or addresses_of
        self._is_public = is_public or is_public_address

    async def fetch(self, url: str, param: str) -> bytes:
        """Return the content of an http(s) URL."""
        if not self._hosts:
            raise unsupported(param, "images come in data URLs here; ingress.image_hosts allows hosts to fetch from")
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    reply = await self._get(url, param)
                    if isinstance(reply, bytes):
                        return reply
                    url = urljoin(url, reply)
        except TimeoutError:
            raise invalid(param, f"{param}: the image did not arrive in {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise invalid(param, f"{param}: the image cannot be fetched: {type(error).__name__}") from None
        raise invalid(param, f"{param}: more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: str, param: str) -> bytes | str:
        """Return the content, or where a redirect leads."""
        host, port, address = await self._checked(url, param)
        is_v6 = ":" in address
        target = httpx.URL(url).copy_with(host=f"[{address}]" if is_v6 else address, port=port)
        default = port == (443 if target.scheme == "https" else 80)
        headers = {"Host": host if default else f"{host}:{port}", "Accept-Encoding": "identity", "Accept": "image/*"}
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None) as client:
            request = client.build_request("GET", target, headers=headers, extensions={"sni_hostname": host})
            response = await client.send(request, stream=True)
            try:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    return response.headers["location"]
                if response.status_code != 200:
                    raise invalid(param, f"{param}: the image's host answers {response.status_code}")
                parts, size = [], 0
                async for part in response.aiter_raw():
                    size += len(part)
                    if size > self._max_bytes:
                        raise _too_large(param, self._max_bytes)
                    parts.append(part)
                return b"".join(parts)
            finally:
                await response.aclose()

    async def _checked(self, url: str, param: str) -> tuple[str, int, str]:
        """Return host, port and address of a URL that may be fetched."""
        try:
            split = urlsplit(url)
            host, port = (split.hostname or "").lower().rstrip("."), split.port
        except ValueError:
            raise invalid(param, f"{param}: is not a URL") from None
        if len(url) > MAX_URL or split.scheme not in ("http", "https") or split.username is not None:
            raise invalid(
                param, f"{param}: must be a data URL, or an http(s) URL of {MAX_URL} characters without a user"
            )
        if not any(
            host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:])) for pattern in self._hosts
        ):
            raise unsupported(param, f"host {host[:100]!r}: images are fetched from ingress.image_hosts only")
        port = port or (443 if split.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port)
        except OSError:
            addresses = ()
        if not addresses:
            raise invalid(param, f"{param}: host {host[:100]!r} has no address")
        if not all(map(self._is_public, addresses)):
            raise unsupported(param, f"host {host[:100]!r} has an address that is not public")
        return host, port, addresses[0]


async def addresses_of(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def is_public_address(address: str) -> bool:
    """Whether an address belongs to the public internet, also if it contains an IPv4 address: mapped, NAT64, 6to4 and
    Teredo."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner: list[ipaddress.IPv4Address | None] = []
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = [parsed.ipv4_mapped, parsed.sixtofour, *(parsed.teredo or ())]
        if parsed in _NAT64:
            inner.append(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
        if parsed.ipv4_mapped is not None:
            return is_public_address(str(parsed.ipv4_mapped))
    public = parsed.is_global and not parsed.is_multicast
    return public and all(
        inner_address.is_global and not inner_address.is_multicast
        for inner_address in inner
        if inner_address is not None
    )


def _too_large(param: str, max_bytes: int) -> ApiError:
    return invalid(param, f"{param}: the image has more than {max_bytes} bytes (ingress.max_image_bytes)")
