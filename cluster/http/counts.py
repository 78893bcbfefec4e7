"""Counts how the requests of one ingress ended: by route, status and reason. Filled by `cluster.http.middleware`,
exported by `cluster.http.metrics`.

The counts are of one ingress, and the series carry its id. A load-balanced scrape reaches one ingress; a sum of rates
over ingresses is right if each is scraped at least twice in the range.
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
    """Counts of this ingress's requests, by route, status and reason.

    ingress: a random id of this ingress.
    choices: histogram of `n` of generation requests.
    """

    def __init__(self) -> None:
        self.ingress = uuid.uuid4().hex[:8]
        self._routes: Collection[str] = ()
        self.choices = Histogram.empty(_CHOICES)
        self._ended: Counter[tuple[str, str, str]] = Counter()

    def count_separately(self, routes: Collection[str]) -> None:
        """Count these routes separately; all others count together, because clients choose paths."""
        self._routes = frozenset(routes)

    def ended(self, path: str, status: int, reason: str) -> None:
        """Count one request. status: 0 if the client disconnected before a status was sent. reason: "" for success."""
        route = path if path in self._routes else OTHER
        self._ended[route, str(status), reason] += 1

    def by_route_status_reason(self) -> Mapping[tuple[str, str, str], int]:
        """Return the counts so far."""
        return self._ended


def set_reason(scope: Scope, reason: str | None) -> None:
    """Set why the request of `scope` ends: an error's code, or CLIENT_LEFT. Streams may set it after their status was
    sent."""
    scope.setdefault("state", {})[_KEY] = reason or OTHER


def reason_of(scope: Scope) -> str:
    """Return the reason set last; "" without one."""
    reason: str = scope.get("state", {}).get(_KEY, "")
    return reason
