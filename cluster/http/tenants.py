"""The tenants of one ingress: its API keys, each with what its requests may do. `aerie.cluster.http.middleware` finds a
request's tenant; the routes ask for it with `tenant_of`."""

import hashlib
import time
from collections.abc import Callable, Sequence

from starlette.types import Scope

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import invalid
from aerie.cluster.http.keys import MAX_PRIORITY, KeyConfig, matches, named
from aerie.cluster.http.limits import KeyLimits
from aerie.workers.scheduling.request import Owner

_KEY = "tenant"


class Tenant:
    """A key's rights.

    name: "" for all requests of a server without keys.
    is_admin: whether it may use administrative routes.
    limits: of its requests.
    cache_seed: separates its cached prefixes from those of others; b"": they are shared.
    """

    def __init__(
        self,
        config: KeyConfig | None = None,
        is_admin: bool = True,
        has_own_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "" if config is None else config.name
        self.is_admin = is_admin
        self.limits = KeyLimits(config, clock)
        self._weight = 1.0 if config is None else config.weight
        self._learns = config is None or config.learn
        self._priority_limit = 0 if config is None else config.priority_limit
        self.digests: Sequence[str] = () if config is None else config.digests
        self.cache_seed = _hash(self.name.encode()) if has_own_cache else b""

    def owner(self, priority: int, request_id: str = "", learns: bool = True) -> Owner:
        """Return the key's name, weight and priority for the engine.

        priority: as the client sent it; if it is more urgent than the key's limit, the limit applies.
        request_id: the client's.
        learns: whether the client lets a draft learn from the text; the key may forbid it.
        """
        limited = min(MAX_PRIORITY, max(self._priority_limit, priority))
        return Owner(self.name, self._weight, limited, request_id, learns and self._learns)

    def cache_salt(self, asked: bytes) -> bytes:
        """Return the salt of a request. asked: the client's own. No client can ask for another tenant's salt."""
        return _hash(self.cache_seed + asked) if self.cache_seed else asked


class Tenants:
    """All tenants. `anonymous` stands for requests without a key, where none is needed."""

    def __init__(self, config: EdgeConfig) -> None:
        keys = named(config.api_keys)
        own_cache = len(keys) > 1 and not config.share_prefix_cache
        self.anonymous = Tenant()
        self.named = [Tenant(key, len(keys) == 1 if key.admin is None else key.admin, own_cache) for key in keys]

    def of_key(self, key: str) -> Tenant | None:
        """Return the tenant of a client's key. Takes the same time for every key."""
        found = [tenant for tenant in self.named if matches(key, tenant.digests)]
        return found[0] if found else None

    def of_name(self, name: str) -> Tenant:
        """Return the tenant of a call without a key; "" is anonymous. Raises ApiError."""
        found = [tenant for tenant in (self.anonymous, *self.named) if tenant.name == name]
        if not found:
            names = ", ".join(tenant.name for tenant in self.named) or "none"
            raise invalid("tenant", f"tenant={name[:100]}: no entry of ingress.api_keys has this name; names: {names}")
        return found[0]


def set_tenant(scope: Scope, tenant: Tenant) -> None:
    """Set the tenant of a request."""
    scope["state"][_KEY] = tenant


def tenant_of(scope: Scope) -> Tenant:
    """Return the tenant of a request."""
    found: Tenant = scope["state"][_KEY]
    return found


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, person=b"tenant").digest()
