"""The tenants of one ingress: its API keys, each with what its requests may do, and its limits: requests and tokens a
minute, and generations in flight. `aerie.cluster.http.middleware` finds a request's tenant; the routes ask for it with
`tenant_of`."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Scope

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import invalid, rate_limited
from aerie.cluster.http.keys import MAX_PRIORITY, KeyConfig, matches, named
from aerie.workers.scheduling.request import Owner

MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0  # Retry-After while a key has all its generations in flight
HEADERS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))


class Bucket:
    """A number that may be taken, which grows by `per_minute` up to one minute's. It may be overdrawn."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self.capacity = max(1.0, per_minute)
        self._clock = clock
        self._left, self._at_s = self.capacity, clock()

    def left(self) -> float:
        """Return what may be taken now; below 0 if overdrawn."""
        now = self._clock()
        self._left = min(self.capacity, self._left + (now - self._at_s) * self.per_minute / MINUTE_S)
        self._at_s = now
        return self._left

    def take(self, amount: float) -> None:
        """Take an amount, whether it is there or not."""
        self._left = self.left() - amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is there."""
        return max(0.0, amount - self.left()) * MINUTE_S / self.per_minute


class KeyLimits:
    """The limits of a key. With None, there are none."""

    def __init__(self, config: KeyConfig | None, clock: Callable[[], float]) -> None:
        self._name = "" if config is None else config.name
        requests, tokens = (None, None) if config is None else (config.requests_per_minute, config.tokens_per_minute)
        self._requests = None if requests is None else Bucket(requests, clock)
        self._tokens = None if tokens is None else Bucket(tokens, clock)
        self._max_generations = math.inf if config is None else config.max_concurrent_requests or math.inf
        self._num_generations = 0

    def begin(self) -> None:
        """Count a request, before its body is read. Raises ApiError."""
        self._check_tokens(1.0)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1.0):
                rule = f"{self._requests.per_minute:g} requests a minute"
                raise rate_limited("requests", f"The key {self._name} has sent its {rule}", wait_s)
            self._requests.take(1.0)

    @contextmanager
    def enter(self, num_generations: int, num_tokens: int) -> Iterator[None]:
        """Count generations while they run, and their prompt tokens. Raises ApiError."""
        if self._num_generations + num_generations > self._max_generations:
            message = (
                f"The key {self._name} has {self._num_generations} of {self._max_generations:g} generations in flight, "
                f"and this request needs {num_generations}"
            )
            raise rate_limited("requests", message, CONCURRENT_RETRY_S, num_generations <= self._max_generations)
        self._check_tokens(num_tokens)
        self.spend(num_tokens)
        self._num_generations += num_generations
        try:
            yield
        finally:
            self._num_generations -= num_generations

    def spend(self, num_tokens: int) -> None:
        """Count tokens of prompts and answers."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def headers(self) -> Iterator[tuple[str, str]]:
        """Yield OpenAI's headers (`HEADERS`) for each limit that the key has."""
        for of, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{of}", f"{bucket.per_minute:.0f}"
                yield f"x-ratelimit-remaining-{of}", str(max(0, math.floor(bucket.left())))
                yield f"x-ratelimit-reset-{of}", _duration(bucket.wait_s(bucket.capacity))

    def _check_tokens(self, num_tokens: float) -> None:
        tokens = self._tokens
        if tokens is None:
            return
        rule = f"{tokens.per_minute:g} tokens a minute"
        if num_tokens > tokens.capacity:
            message = f"The key {self._name} may compute {rule}, and this prompt has {num_tokens:g}: shorten it"
            raise rate_limited("tokens", message, MINUTE_S, may_retry=False)
        if wait_s := tokens.wait_s(num_tokens):
            raise rate_limited("tokens", f"The key {self._name} has used its {rule}", wait_s)


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it, such as `6m0s`, `1.5s` or `120ms`."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


_KEY = "tenant"


class Tenant:
    """A key's rights.

    name: "" for all requests of a server without keys.
    is_admin: whether it may use administrative routes.
    limits: limits on its requests.
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

    def by_key(self, key: str) -> Tenant | None:
        """Return the tenant of a client's key. Takes the same time for every key."""
        tenants = [tenant for tenant in self.named if matches(key, tenant.digests)]
        return tenants[0] if tenants else None

    def by_name(self, name: str) -> Tenant:
        """Return the tenant of a call without a key; "" is anonymous. Raises ApiError."""
        tenants = [tenant for tenant in (self.anonymous, *self.named) if tenant.name == name]
        if not tenants:
            names = ", ".join(tenant.name for tenant in self.named) or "none"
            raise invalid("tenant", f"tenant={name[:100]}: no entry of ingress.api_keys has this name; names: {names}")
        return tenants[0]


def set_tenant(scope: Scope, tenant: Tenant) -> None:
    """Set the tenant of a request."""
    scope["state"][_KEY] = tenant


def tenant_of(scope: Scope) -> Tenant:
    """Return the tenant of a request."""
    tenant: Tenant = scope["state"][_KEY]
    return tenant


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, person=b"tenant").digest()
