"""Wraps every request: sets its id, checks the API key, or without keys the Host and Origin, and handles exceptions
that nothing else has. Plain ASGI, so that streams pass unchanged.

A foreign web page in a user's browser must not use a server that the browser can reach. It could do so through its own
host name that resolves to this machine (DNS rebinding; the Host header has that name), or by a cross-origin request (it
cannot read the reply, but the server would do the work). With API keys, only the key is checked.
"""

import base64
import ipaddress
import logging
import platform
import time
import uuid
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aerie.cluster.http.calls import CALLER
from aerie.cluster.http.endpoint import GENERATES, IGNORED, IGNORED_HEADER, ignored_header, route_path
from aerie.cluster.http.errors import ApiError, internal, invalid, unauthorized
from aerie.cluster.http.metrics import CLIENT_LEFT, RequestCounts, log_generation, reason_of, set_reason
from aerie.cluster.http.page.files import PAGE_ROUTES
from aerie.cluster.http.tenants import Tenants, set_tenant, tenant_of
from aerie.cluster.http.tracing import ARRIVED
from aerie.cluster.start_log import REQUEST_ID, fields, request_id

# Endings of names that the public DNS never resolves.
_PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test", ".svc", ".svc.cluster.local")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """The hosts and origins that requests without keys may name.

    allowed_hosts: names in addition to those that can only be local: addresses, names without a dot, private
    domains, this machine's name.
    allowed_origins: such as "https://chat.example.com"; "*": all.
    """

    def __init__(self, allowed_hosts: Collection[str], allowed_origins: Collection[str]) -> None:
        self._hosts = frozenset(host.lower() for host in (*allowed_hosts, platform.node()))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    def check(self, headers: Headers) -> None:
        """Check Host and Origin. Raises ApiError."""
        header = headers.get("host", "")
        host = urlsplit(f"//{header}").hostname or "" if _is_authority(header) else header
        if header and "*" not in self._hosts and host not in self._hosts and not _is_private(host):
            raise _forbidden(
                "host_not_allowed",
                f"This server has no API keys and does not answer to the host {host[:100]!r}, which another's page may "
                "have made up; give it keys (ingress.api_keys) or allow the name (ingress.allowed_hosts)",
            )
        origin = headers.get("origin", "").lower()
        if origin and not self._is_allowed(origin, header.lower()):
            raise _forbidden(
                "origin_not_allowed",
                f"This server has no API keys and does not answer to pages of {origin[:100]!r}; give it keys "
                "(ingress.api_keys) or allow the origin (ingress.allowed_origins)",
            )

    def _is_allowed(self, origin: str, host: str) -> bool:
        """Return whether a page from `origin` may send requests to this `host`: one of its own pages, a configured
        origin, or one of this machine."""
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


logger = logging.getLogger(__name__)

# Probes have no keys, and the page asks its reader for one.
# "" is the prefix itself, which redirects to the page.
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/ready", "/health_generate", "/ping"})
OPEN_ROUTES = PROBES | PAGE_ROUTES | {""}
QUIET_ROUTES = frozenset({"/metrics"}) | OPEN_ROUTES  # polled often, so not logged


class EdgeMiddleware:
    """Gives each request an id: the client's X-Request-Id or a new one, in `scope["state"]["request_id"]`, which a
    route may replace. Checks the API key if there are keys. Answers unexpected exceptions with 500.

    echo_request_id: send the id back, unless the server around the application does.
    counts: counts every request's end.
    tenants: found by their keys.
    origins: checked if there are no keys.
    """

    def __init__(
        self, app: ASGIApp, tenants: Tenants, origins: Origins, echo_request_id: bool, counts: RequestCounts
    ) -> None:
        self._app = app
        self._counts = counts
        self._echo_request_id = echo_request_id
        self._tenants = tenants
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with an id and a tenant. Errors become replies, and the end is counted and logged."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        route = route_path(scope)
        started = False
        status = 0
        begin_s = time.monotonic()
        former = request_id.set("")
        send = adapted_send(scope, send)

        async def send_with_id(message: Message) -> None:
            """Send a message of the reply; its start gets further headers."""
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                headers = list(message.get("headers", ()))
                if self._echo_request_id:
                    headers.append((b"x-request-id", state["request_id"].encode()))
                if ignored := state.get(IGNORED):
                    headers.append((IGNORED_HEADER, ignored_header(ignored)))
                if GENERATES in state:
                    headers += [(name.encode(), value.encode()) for name, value in tenant_of(scope).limits.headers()]
                message = {**message, "headers": headers}
            await send(message)

        try:
            state["request_id"] = uuid.uuid4().hex
            set_tenant(scope, self._tenants.anonymous)
            state[ARRIVED] = time.time_ns()
            self._open(scope, route)
            request_id.set(state["request_id"])
            # "" is the web page without a final slash, which its relative links need.
            answer = self._app if route else RedirectResponse(scope["path"].rpartition("/")[2] + "/")
            await answer(scope, receive, send_with_id)
        except ApiError as error:
            set_reason(scope, error.code)
            await error.response()(scope, receive, send_with_id)
        except ClientDisconnect:
            set_reason(scope, CLIENT_LEFT)
            logger.info("request %s: the client left before its request was read", state["request_id"])
        except Exception:
            set_reason(scope, "internal_error")
            logger.exception("request %s: unexpected", state["request_id"])
            if started:
                raise  # the reply has started, so no error can be sent; the server closes the connection
            await internal(state["request_id"]).response()(scope, receive, send_with_id)
        finally:
            reason = reason_of(scope)
            self._counts.count(route, status, reason)
            if GENERATES in state:
                log_generation(scope, self._counts, status, reason, time.monotonic() - begin_s)
            elif route not in QUIET_ROUTES:
                ended = fields(path=scope["path"], status=status, reason=reason, seconds=time.monotonic() - begin_s)
                logger.info("request %s ended", state["request_id"], extra=ended)
            request_id.reset(former)

    def _open(self, scope: Scope, route: str) -> None:
        """Read the client's id, and check its key or origin, unless the call is from the cluster. Raises ApiError."""
        headers = Headers(scope=scope)
        header = headers.get("x-request-id")
        if header is not None:
            if REQUEST_ID.fullmatch(header) is None:
                raise invalid("X-Request-Id", "X-Request-Id must be 1 to 128 printable ASCII characters without spaces")
            scope["state"]["request_id"] = header
        caller = scope["state"].get(CALLER)
        if caller is not None:
            set_tenant(scope, self._tenants.by_name(caller))
        elif self._tenants.named and route not in OPEN_ROUTES:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if not key:  # Anthropic's clients send it so
                scheme, key = "bearer", headers.get("x-api-key", "")
            if scheme.lower() == "basic":  # clients that are given a URL only: http://any:KEY@host
                scheme, key = "bearer", password_of(key)
            tenant = self._tenants.by_key(key.strip()) if scheme.lower() == "bearer" else None
            if tenant is None:
                raise unauthorized()
            set_tenant(scope, tenant)
        elif not self._tenants.named and route not in QUIET_ROUTES:
            self._origins.check(headers)


def password_of(credentials: str) -> str:
    """Return the password of HTTP basic authentication (RFC 7617); "" for what is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def adapted_send(scope: Scope, send: Send) -> Send:
    """Return `send` adapted to the request of `scope`."""
    if scope["method"] == "HEAD":
        return _without_body(send)
    return _in_one_piece(send) if scope.get("http_version") == "1.0" else send


def _without_body(send: Send) -> Send:
    """Send replies without their bodies, for HEAD requests."""

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
