"""How the requests of one ingress ended: by route, status and reason. Counted by `cluster.http.middleware`, exported by
`cluster.http.metrics`.

These numbers are the ingress's own, so their series carry its id: of load-balanced scrapes each brings one ingress's,
and a sum of rates over ingresses is right as long as each is scraped twice in its range.
"""

import uuid
from collections import Counter
from collections.abc import Collection, Mapping

from starlette.types import Scope

from workers.scheduling.stats import Histogram

CLIENT_LEFT = "client_left"
OTHER = "other"
_KEY = "reason"
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)  # as vLLM's


class RequestCounts:
    """ingress: an id of its own. choices: n of the generation requests that were begun."""

    def __init__(self) -> None:
        self.ingress = uuid.uuid4().hex[:8]
        self._routes: Collection[str] = ()
        self.choices = Histogram.empty(_CHOICES)
        self._ended: Counter[tuple[str, str, str]] = Counter()

    def tell_apart(self, routes: Collection[str]) -> None:
        """Count these by themselves; requests elsewhere count together, because clients choose paths."""
        self._routes = frozenset(routes)

    def ended(self, path: str, status: int, reason: str) -> None:
        """One request more. status: 0 if the client left before there was one. reason: "" for success."""
        route = path if path in self._routes else OTHER
        self._ended[route, str(status), reason] += 1

    def by_route_status_reason(self) -> Mapping[tuple[str, str, str], int]:
        """So far."""
        return self._ended


def set_reason(scope: Scope, reason: str | None) -> None:
    """Why the request of `scope` ends as it does: an error's code, or CLIENT_LEFT. Also of a stream whose status had
    been sent before."""
    scope.setdefault("state", {})[_KEY] = reason or OTHER


def reason_of(scope: Scope) -> str:
    """What `set_reason` said last; "" if nothing went wrong."""
    reason: str = scope.get("state", {}).get(_KEY, "")
    return reason
