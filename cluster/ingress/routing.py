"""Chooses the engine with the earliest expected first token, from the states that engines report.

Pure: times are arguments. An ingress keeps an `EngineView` per engine, updates it with the engine's reports
(`EngineState`) and with the requests that it sends, and calls `choose`. It knows other ingresses' requests only from
the last report. A choice may therefore be wrong, which costs waiting time only.
"""

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.radix_node import prompt_digests, salt_of_adapter, salt_of_weights, split_digests
from aerie.cluster.transport.messages import AdapterState, EngineState
from aerie.workers.scheduling.adapters import AdapterChange

Routing = Literal["first_token", "least_loaded"]

SILENT_S = 2.0  # silence after which an engine may be lost: it reports at least twice a second
PROMISE_S = 10.0  # time for which pages of a request that was sent count as cached
DEFAULT_TOKENS_PER_S = 5000.0  # prefill speed of an engine that has not measured its own
STUCK_S = 8.0  # time of a fault after which an engine's requests should move
TIE_S = 0.001  # two expected times count as different only if they differ by more than this
TIE_SHARE = 0.1  # and by more than this share


class Prompt:
    """A prompt, and the digests of its pages. num_tokens: its length. adapter: name of its LoRA adapter; "": none."""

    def __init__(self, tokens: Sequence[int], salt: bytes, adapter: str = "") -> None:
        self.num_tokens, self.adapter = len(tokens), adapter
        self._tokens = tokens
        self._salt = salt
        self._digests: dict[tuple[int, int, int, int | None], list[bytes]] = {}

    def digests(self, page_size: int, lookahead: int, weight_epoch: int = 0, adapter: int | None = None) -> list[bytes]:
        """Return the digest of every page that a cache could hold. weight_epoch: see `EngineState`. adapter: number of
        the prompt's adapter."""
        key = (page_size, lookahead, weight_epoch, adapter)
        if key not in self._digests:
            array: npt.NDArray[np.int32] = np.asarray(self._tokens, np.int32)
            own = self._salt if adapter is None else salt_of_adapter(self._salt, adapter)
            salt = salt_of_weights(own, weight_epoch)
            self._digests[key] = prompt_digests(array, page_size, lookahead, salt)
        return self._digests[key]


class EngineView:
    """One engine's state, as one ingress knows it.

    state: the last report; None before the first.
    heard_s: time of the last report.
    num_sent: requests sent to it so far.
    is_suspect: it did not accept a request in time, and has not reported since.
    faulty_since_s: time of the first report of the current fault, during which requests do not run; infinity without
        one.
    adapters, adapter_changes: see `EngineState`.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterState] = {}
        self.adapter_changes: dict[str, AdapterChange] = {}
        self.state: EngineState | None = None
        self.heard_s = 0.0
        self.is_suspect = False
        self.faulty_since_s = math.inf
        self._cached: set[bytes] = set()
        self._promised: dict[bytes, float] = {}  # digest -> time until which the page counts as cached
        self.num_sent = 0
        # (number, prompt tokens) of requests that no report includes yet
        self._unreported: deque[tuple[int, int]] = deque()
        self._unreported_tokens = 0

    def update(self, state: EngineState, now: float) -> None:
        """Update the view by a report."""
        self.state, self.heard_s, self.is_suspect = state, now, False
        self.adapters = self.adapters if state.adapters is None else state.adapters
        self.adapter_changes = self.adapter_changes if state.adapter_changes is None else state.adapter_changes
        self.faulty_since_s = min(self.faulty_since_s, now) if state.fault else math.inf
        while self._unreported and self._unreported[0][0] <= state.num_received:
            self._unreported_tokens -= self._unreported.popleft()[1]
        self._cached.update(split_digests(state.added))
        removed = split_digests(state.removed)
        self._cached.difference_update(removed)
        for digest in removed:
            self._promised.pop(digest, None)
        while self._promised and (oldest := next(iter(self._promised))) and self._promised[oldest] < now:
            del self._promised[oldest]

    def record_request(self, prompt: Prompt, now: float) -> None:
        """Record that a request is sent to the engine now."""
        self.num_sent += 1
        if self.state is None:
            return
        num_tokens = prompt.num_tokens - self.num_cached(prompt)
        self._unreported.append((self.num_sent, num_tokens))
        self._unreported_tokens += num_tokens
        for digest in self._digests(prompt):
            self._promised.pop(digest, None)
            self._promised[digest] = now + PROMISE_S

    @property
    def num_active(self) -> int:
        """Requests that run or wait on the engine, including those that no report includes yet."""
        state = self.state
        return len(self._unreported) + (0 if state is None else state.num_running + state.num_waiting)

    def num_cached(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt that the engine has cached, or will have when earlier requests are computed."""
        digests = self._digests(prompt)
        if not digests or self.state is None or not self._has(digests[0]):
            return 0
        low, high = 1, len(digests)  # binary search: a page is cached only with the pages before it
        while low < high:
            middle = (low + high) // 2
            if self._has(digests[middle]):
                low = middle + 1
            else:
                high = middle
        return low * self.state.stride * self.state.page_size

    def first_token_s(self, prompt: Prompt) -> float:
        """Return the expected seconds to the prompt's first token: the time to prefill pending prompts and this one,
        and the wait for a slot."""
        state = self.state
        assert state is not None
        pending = state.backlog_tokens + self._unreported_tokens
        speed = state.prefill_tokens_per_s or DEFAULT_TOKENS_PER_S
        return (pending + prompt.num_tokens - self.num_cached(prompt)) / speed + state.wait_s

    def _has(self, digest: bytes) -> bool:
        return digest in self._cached or digest in self._promised

    def _digests(self, prompt: Prompt) -> list[bytes]:
        """Return the digests of the prompt's pages that the engine reports, every `stride`-th."""
        state = self.state
        if state is None or state.page_size == 0:
            return []
        adapter = self.adapters.get(prompt.adapter)
        number = None if adapter is None else adapter.number
        pages = prompt.digests(state.page_size, state.lookahead, state.weight_epoch, number)
        return pages[state.stride - 1 :: state.stride]

    def has_adapter(self, prompt: Prompt) -> bool:
        """Return whether the engine has the prompt's adapter, if there is one."""
        return not prompt.adapter or prompt.adapter in self.adapters

    def has_placed(self, prompt: Prompt) -> bool:
        """Return whether the prompt's adapter is on the engine's devices, if there is one."""
        return not prompt.adapter or (prompt.adapter in self.adapters and self.adapters[prompt.adapter].is_placed)


def choose(
    views: Mapping[str, EngineView],
    prompt: Prompt,
    now: float,
    chance: random.Random,
    avoid: frozenset[str] = frozenset(),
    routing: Routing = "first_token",
) -> str | None:
    """Return the name of the engine for a request; None if no engine accepts requests.

    Healthy engines come before those that are silent, draining or have a fault. Among equals, the earliest expected
    first token wins; if several are about equal, the less loaded of two random ones. With "least_loaded", the fewest
    requests win, regardless of cached prefixes. Engines without the prompt's adapter are left out; among about equal
    ones, those win that have it on their devices.

    avoid: engines that did not accept this request.
    """
    known = {name: view for name, view in views.items() if name not in avoid and view.has_adapter(prompt)}
    ranks = {name: rank for name, view in known.items() if (rank := _rank(view, now)) is not None}
    if not ranks:
        return None
    first = min(ranks.values())
    best = [name for name, rank in ranks.items() if rank == first]
    if len(best) == 1:
        return best[0]
    if routing == "least_loaded":
        fewest = min(views[name].num_active for name in best)
        return chance.choice([name for name in best if views[name].num_active == fewest])
    expected_s = {name: views[name].first_token_s(prompt) for name in best}
    late_s = min(expected_s.values()) * (1 + TIE_SHARE) + TIE_S
    near = [name for name in best if expected_s[name] <= late_s]
    near = [name for name in near if views[name].has_placed(prompt)] or near
    two = chance.sample(near, min(2, len(near)))
    return min(two, key=lambda name: views[name].num_active)


def is_stuck(views: Mapping[str, EngineView], name: str, now: float) -> bool:
    """Return whether an engine's requests should move to another one: another engine is healthy, and this one's fault
    has lasted for `STUCK_S`, within which ranks are usually replaced."""
    view = views.get(name)
    if view is None or now - view.faulty_since_s < STUCK_S:
        return False
    return any(other != name and _rank(views[other], now) == 0 for other in views)


def _rank(view: EngineView, now: float) -> int | None:
    """Return 0 for a healthy engine, larger numbers for less certain ones, None for one that accepts no requests."""
    state = view.state
    if state is None or state.is_leaving or state.status == "dead":
        return None
    if state.status == "draining":
        return 3  # it refuses requests with the reason

    if state.status != "ready":
        return 2
    return int(bool(state.fault) or view.is_suspect or now - view.heard_s > SILENT_S)
