"""Every error that a client can get, in OpenAI's format: {"error": {message, type, param, code}}. Handlers raise them
as `ApiError`; `aerie.cluster.http.app` converts them to replies. Callers without HTTP get `RequestError`."""

import math
import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from aerie.cluster.http.schema.response import ErrorDetail, ErrorReply
from aerie.cluster.transport.messages import Refusal

RATE_LIMITED = "rate_limit_exceeded"
JSON_HEADERS = {"content-type": "application/json"}


class ApiError(Exception):
    """An error reply. headers: sent with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def detail(self) -> ErrorDetail:
        """Return the error's fields."""
        return ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)

    def body(self) -> bytes:
        """Return the JSON document; also the payload of a stream's error event."""
        return msgspec.json.encode(ErrorReply(error=self.detail()))

    def response(self) -> Response:
        return Response(self.body(), self.status, {**JSON_HEADERS, **self.headers})


class RequestError(Exception):
    """An error reply as callers in Python get it (`aerie.cluster.http.calls`). Can be pickled.

    status: HTTP status; None if the stream had begun.
    kind, param, code: as in the reply's `error`.
    retry_after_s: when to try again, if that helps.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: the client must change `param`."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    """400: a parameter that is known but cannot be honoured, and why."""
    return ApiError(400, f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")


def too_long(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def model_not_found(name: str, served: str) -> ApiError:
    message = f"The model {_quoted(name)} does not exist here; this server serves '{served}'"
    return ApiError(404, message, param="model", code="model_not_found")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes", code="request_too_large")


def not_json(content_type: str) -> ApiError:
    """415. Browsers let pages of other origins send other content types without a preflight request."""
    what = f"not {content_type[:100]!r}" if content_type else "which is missing"
    message = f"Unsupported media type: send the body with content-type application/json, {what}"
    return ApiError(415, message, code="unsupported_media_type")


def body_lost() -> ApiError:
    """400: a server between client and application took the rest of the connection for another protocol."""
    message = (
        "The request's body was lost: the client offers another protocol (header Upgrade), and the HTTP server here "
        "stops reading. Let the client speak HTTP/1.1 alone (Java: HttpClient.Version.HTTP_1_1), or start the cluster "
        "with `aerie serve` or `aerie start`, which read such requests"
    )
    return ApiError(400, message, code="request_body_lost")


def body_too_slow(limit_s: float) -> ApiError:
    message = f"The request's body did not come within {limit_s:g} s"
    return ApiError(408, message, code="request_timeout", headers={"connection": "close", "x-should-retry": "false"})


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Incorrect or missing API key; send it as 'Authorization: Bearer <key>'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def forbidden(name: str) -> ApiError:
    """403 for a route of administrators. name: of the key; "" on a server without keys."""
    who = f"The key {name} does not administer this server" if name else "This route needs an API key"
    return ApiError(
        403,
        f"{who}; use one with `admin: true` in ingress.api_keys",
        kind="permission_error",
        code="admin_key_required",
    )


def overloaded(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429, message, kind="rate_limit_error", code="server_overloaded", headers=_retry_after(retry_after_s)
    )


def rate_limited(kind: str, message: str, retry_after_s: float, may_retry: bool = True) -> ApiError:
    """429 of a key's own limit. kind: "requests" or "tokens", as OpenAI's. may_retry: whether waiting helps."""
    headers = _retry_after(retry_after_s) if may_retry else {"x-should-retry": "false"}
    return ApiError(429, message, kind=kind, code=RATE_LIMITED, headers=headers)


def unavailable(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        503, message, kind="service_unavailable_error", code="service_unavailable", headers=_retry_after(retry_after_s)
    )


def unfinished(message: str, retry_after_s: float) -> ApiError:
    """409: the request needs an idle engine."""
    return ApiError(
        409, message, kind="conflict_error", code="requests_unfinished", headers=_retry_after(retry_after_s)
    )


def conflict(message: str) -> ApiError:
    """409: the engines refuse, and have changed nothing that the message does not name."""
    return ApiError(409, message, kind="conflict_error", code="refused")


def timed_out(limit_s: float) -> ApiError:
    """504 that tells OpenAI's client not to repeat the work."""
    return ApiError(
        504,
        f"The request took longer than this server's limit of {limit_s:g} s",
        kind="timeout_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def engine_failed(request_id: str, reason: str = "") -> ApiError:
    """500: the reason is in the log under the request's id, and in the message if clients may see it."""
    return ApiError(
        500,
        f"The engine failed while it worked on this request (request id {request_id})" + (reason and f": {reason}"),
        kind="server_error",
        code="engine_error",
    )


def internal(request_id: str) -> ApiError:
    return ApiError(500, f"Internal server error (request id {request_id})", kind="server_error", code="internal_error")


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Rename the parameters of `error`, of a chat's body, in place. names: another API's, by the chat's. A place in
    `messages` becomes the parameter as a whole, because the other API counts its turns differently."""
    for chat, own in names.items():
        pattern = rf"\b{re.escape(chat)}\b" + (r"(\[\d+\]|\.\w+)*" if chat == "messages" else "")
        if error.param is not None:
            error.param = re.sub("^" + pattern, own, error.param)
        # Names of one word may be prose inside a message.
        error.message = re.sub(pattern if "_" in chat else f"^(?:Invalid value for )?{pattern}", own, error.message)
    return error


def refused(refusal: Refusal, param: str) -> ApiError:
    """Return the error for a request that the engine refused. param: name of its prompt."""
    match refusal.kind:
        case "too_large":
            return too_long(refusal.message, param)
        case "queue_full":
            return overloaded(refusal.message, refusal.retry_after_s)
        case _:
            return unavailable(refusal.message, refusal.retry_after_s)


def _retry_after(seconds: float) -> dict[str, str]:
    """Return Retry-After in whole seconds (HTTP), and in milliseconds, which OpenAI's client prefers."""
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def _quoted(name: str) -> str:
    return f"'{name[:100]}'" + (" (shortened)" if len(name) > 100 else "")
