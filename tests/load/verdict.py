"""Figures of a run, and which expectations it missed. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.load.client import GOOD, HealthSample, Sent
from tests.load.scenario import Expect

Span = tuple[float, float]
SETTLED_S = 300.0  # what is cached and compiled as requests come is there
USAGE_SPAN_S = 60.0  # a mean of so long is compared
NOISE_MB, NOISE_FDS = 4.0, 8


@dataclass(frozen=True)
class Ended:
    """How `aerie serve` ended, if it did. after_s: since the last fault."""

    code: int
    after_s: float
    left_behind: tuple[str, ...]


@dataclass(frozen=True)
class Usage:
    """What all processes of one part use. memory_mb: with proportional shares of shared memory."""

    memory_mb: float = 0.0
    num_fds: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.memory_mb + other.memory_mb, self.num_fds + other.num_fds)


@dataclass(frozen=True)
class Observed:
    """What one run brought. Seconds are since the load's beginning.

    faults: when each was done, and what it met. until_s: when observation ended. usage: now and then, by part; empty
    where it was not looked at.
    """

    sent: Sequence[Sent]
    health: Sequence[HealthSample]
    faults: Sequence[tuple[float, str]]
    until_s: float
    ended: Ended | None = None
    usage: Sequence[tuple[float, Mapping[str, Usage]]] = ()


@dataclass(frozen=True)
class Figures:
    """In seconds and tokens. kinds: number of answers by how they ended.

    tokens_per_s: of all streams, from the first token to the last. ttft_s: 50th and 99th percentile.
    stall_s: the longest time that requests waited without any getting a first token.
    untrue_s: the longest time that a front's /health said 200 while its requests waited so.
    back_s: from the last fault's time to the end of the longest stall after the first one's.
    last_error_s: since the last fault, when the last request was sent that failed; None if none did.
    health_max_s: the slowest answer of /health.
    """

    kinds: dict[str, int]
    tokens_per_s: float
    ttft_s: tuple[float, float]
    stall_s: float
    untrue_s: float
    back_s: float
    last_error_s: float | None
    health_max_s: float
    missed: list[str] = field(default_factory=list)


def figures(observed: Observed, expect: Expect) -> Figures:
    """Return the figures of a run; `missed` names the expectations that did not hold."""
    first_fault_s = observed.faults[0][0] if observed.faults else 0.0
    last_fault_s = observed.faults[-1][0] if observed.faults else 0.0
    spans = [span for span in stalls(observed.sent, _last_sent_s(observed)) if span[1] > first_fault_s]
    longest = max(spans, key=lambda span: span[1] - span[0], default=(0.0, 0.0))
    firsts = [sent.first_s - sent.sent_s for sent in observed.sent if sent.first_s is not None]
    tokens = [at_s for sent in observed.sent for at_s in sent.token_s]
    errors = [sent.sent_s for sent in observed.sent if sent.kind not in GOOD]
    found = Figures(
        kinds=dict(Counter(sent.kind for sent in observed.sent)),
        tokens_per_s=len(tokens) / max(1e-9, max(tokens) - min(tokens)) if tokens else 0.0,
        ttft_s=(float(np.quantile(firsts, 0.5)), float(np.quantile(firsts, 0.99))) if firsts else (0.0, 0.0),
        stall_s=longest[1] - longest[0],
        untrue_s=max((_untrue_s(observed, front) for front in {sent.front for sent in observed.sent}), default=0.0),
        back_s=max(0.0, longest[1] - last_fault_s) if observed.faults else 0.0,
        last_error_s=max(errors) - last_fault_s if errors else None,
        health_max_s=max((sample.took_s for sample in observed.health), default=0.0),
    )
    found.missed.extend(_missed(found, observed, expect, last_fault_s))
    return found


def stalls(sent: Sequence[Sent], until_s: float) -> Iterator[Span]:
    """Times in which requests were sent, or waited, and none got its first token. A refusal is no first token.

    until_s: when it was over, at least for requests that wait in vain."""
    sends = sorted(sent, key=lambda each: each.sent_s)
    firsts = sorted(each.first_s for each in sent if each.first_s is not None)
    since_s: float | None = None
    position = 0
    for first_s in [*firsts, *([until_s] if until_s > max(firsts, default=0.0) else [])]:
        while position < len(sends) and sends[position].sent_s <= first_s:
            since_s = sends[position].sent_s if since_s is None else since_s
            position += 1
        if since_s is not None:
            yield since_s, first_s
        waits = any(each.first_s is None or each.first_s > first_s for each in sends[:position] if _open(each, first_s))
        since_s = first_s if waits else None


def _last_sent_s(observed: Observed) -> float:
    """After it nobody comes who could be served: that some wait in vain till the end is no stall."""
    return max((sent.sent_s for sent in observed.sent), default=0.0)


def _open(sent: Sent, at_s: float) -> bool:
    """Whether its client still waits."""
    return sent.end_s is None or sent.end_s > at_s


def _untrue_s(observed: Observed, front: str) -> float:
    """The longest time that /health of this front said 200 while requests sent there waited in vain."""
    own = [sent for sent in observed.sent if sent.front == front]
    samples = sorted((each for each in observed.health if each.front == front), key=lambda each: each.at_s)
    longest = 0.0
    for begin_s, end_s in stalls(own, _last_sent_s(observed)):
        since_s: float | None = None
        for sample in samples:
            if begin_s <= sample.at_s <= end_s and sample.status == 200:
                since_s = sample.at_s if since_s is None else since_s
                longest = max(longest, sample.at_s - since_s)
            else:
                since_s = None
    return longest


def _missed(found: Figures, observed: Observed, expect: Expect, last_fault_s: float) -> Iterator[str]:
    if found.kinds.get("wrong text"):
        yield f"{found.kinds['wrong text']} wrong texts"
    if not found.kinds.get("done"):
        yield "no request was answered"
    for kind, count in sorted(found.kinds.items()):
        if kind not in GOOD | expect.errors | {"wrong text"}:
            yield f"{count} x {kind}"
    if found.untrue_s > expect.untrue_s:
        yield f"/health 200 for {found.untrue_s:.1f} s while nothing came (limit {expect.untrue_s:g})"
    if expect.ends_s is not None:
        yield from _missed_end(observed.ended, expect.ends_s)
        return
    if observed.ended is not None:
        yield f"aerie serve ended with {observed.ended.code}"
    if expect.growth is not None:
        yield from _missed_growth(observed, expect.growth)
    if found.stall_s > expect.stall_s:
        yield f"no first token for {found.stall_s:.1f} s (limit {expect.stall_s:g})"
    late = [s for s in observed.sent if observed.faults and s.sent_s > last_fault_s + expect.clean_after_s]
    unclean = Counter(sent.kind for sent in late if sent.kind not in ("done", "left", "rejected"))
    for kind, count in sorted(unclean.items()):
        yield f"{count} x {kind} later than {expect.clean_after_s:g} s after the fault"


def growth(observed: Observed) -> dict[str, tuple[Usage, Usage]]:
    """Return what each part used after warm-up and at the end, as means over `USAGE_SPAN_S`."""
    last_s = max((at_s for at_s, _ in observed.usage), default=0.0)
    spans = ((SETTLED_S, SETTLED_S + USAGE_SPAN_S), (last_s - USAGE_SPAN_S, last_s))
    parts = {part for _, usage in observed.usage for part in usage}
    return {part: (_mean(observed, part, *spans[0]), _mean(observed, part, *spans[1])) for part in sorted(parts)}


def _mean(observed: Observed, part: str, begin_s: float, end_s: float) -> Usage:
    seen = [usage.get(part, Usage()) for at_s, usage in observed.usage if begin_s <= at_s <= end_s]
    total = sum(seen, Usage())
    return Usage(total.memory_mb / max(1, len(seen)), round(total.num_fds / max(1, len(seen))))


def _missed_growth(observed: Observed, limit: float) -> Iterator[str]:
    if observed.until_s < SETTLED_S + 2 * USAGE_SPAN_S:
        yield f"memory was watched for {observed.until_s:.0f} s only"
        return
    for part, (settled, last) in growth(observed).items():
        if last.memory_mb > settled.memory_mb * (1 + limit) + NOISE_MB:
            yield f"{part}'s memory grew from {settled.memory_mb:.0f} to {last.memory_mb:.0f} MB"
        if last.num_fds > settled.num_fds * (1 + limit) + NOISE_FDS:
            yield f"{part}'s descriptors grew from {settled.num_fds} to {last.num_fds}"


def _missed_end(ended: Ended | None, limit_s: float) -> Iterator[str]:
    if ended is None:
        yield f"aerie serve did not end (limit {limit_s:g} s)"
        return
    if ended.after_s > limit_s:
        yield f"aerie serve ended after {ended.after_s:.1f} s (limit {limit_s:g})"
    if ended.left_behind:
        yield f"{len(ended.left_behind)} processes left behind"
