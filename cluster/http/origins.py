"""Hosts and origins that a server without API keys answers to. Used by `aerie.cluster.http.middleware`.

A foreign web page in a user's browser must not use a server that the browser can reach. It could do so through its own
host name that resolves to this machine (DNS rebinding; the Host header has that name), or by a cross-origin request (it
cannot read the reply, but the server would do the work). With API keys, only the key is checked.
"""

import ipaddress
import platform
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from aerie.cluster.http.errors import ApiError

# Endings of names that the public DNS never resolves.
_PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test", ".svc", ".svc.cluster.local")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """allowed_hosts: names in addition to those that can only be local: addresses, names without a dot, private
    domains, this machine's name.
    allowed_origins: such as "https://chat.example.com"; "*": all.
    """

    def __init__(self, allowed_hosts: Collection[str], allowed_origins: Collection[str]) -> None:
        self._hosts = frozenset(host.lower() for host in (*allowed_hosts, platform.node()))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    def check(self, headers: Headers) -> None:
        """Check Host and Origin. Raises ApiError."""
        given = headers.get("host", "")
        host = urlsplit(f"//{given}").hostname or "" if _is_authority(given) else given
        if given and "*" not in self._hosts and host not in self._hosts and not _is_private(host):
            raise _forbidden(
                "host_not_allowed",
                f"This server has no API keys and does not answer to the host {host[:100]!r}, which another's page may "
                "have made up; give it keys (ingress.api_keys) or allow the name (ingress.allowed_hosts)",
            )
        origin = headers.get("origin", "").lower()
        if origin and not self._is_allowed(origin, given.lower()):
            raise _forbidden(
                "origin_not_allowed",
                f"This server has no API keys and does not answer to pages of {origin[:100]!r}; give it keys "
                "(ingress.api_keys) or allow the origin (ingress.allowed_origins)",
            )

    def _is_allowed(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, authority = origin.partition("://")
        if not _is_authority(authority):
            return False
        port = _DEFAULT_PORTS.get(scheme)
        if authority.removesuffix(f":{port}") == host.removesuffix(f":{port}"):
            return True
        return _is_loopback(urlsplit(f"//{authority}").hostname or "")


def _is_authority(text: str) -> bool:
    """Whether `text` is a host, perhaps with a port."""
    try:
        parts = urlsplit(f"//{text}")
        return parts.netloc == text and bool(parts.hostname) and "@" not in text and (parts.port or 0) >= 0
    except ValueError:
        return False


def _is_private(host: str) -> bool:
    """Whether the public DNS can never resolve this name (in lower case) to another machine."""
    if "." not in host or host.endswith(_PRIVATE_DOMAINS):
        return True
    return _address(host) is not None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _forbidden(code: str, message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)
