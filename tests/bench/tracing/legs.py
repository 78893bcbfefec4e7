"""The path of a first token as legs between the stamps of `stamps`: without gaps, so that they add up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aerie.deploy.bench.figures import percentile
from tests.bench.tracing.stamps import NOTHING, Stamp

About = Literal["traced", "name", "plan", "step", "step before", "client"]


@dataclass(frozen=True)
class Leg:
    """What happens until `end`, from the end of the leg before.

    about: whose stamp it is: of the traced request, of its name, of the plan for its prompt, of the step that ends its
        prompt, of the step before that one, or of the client.
    who: the process that the time is spent in, or that is waited for.
    optional: not every request comes by here; a rank without a model does not.
    """

    end: str
    about: About
    who: str
    title: str
    optional: bool = False


START = "client_sent"
LEGS = (
    Leg(
        "ingress_entered",
        "traced",
        "Serve",
        "client's send, HAProxy, uvicorn and Serve's layers around the application",
    ),
    Leg("body_read", "traced", "ingress", "routing, body read"),
    Leg("body_parsed", "traced", "ingress", "JSON parsed and checked"),
    Leg("prompt_rendered", "traced", "ingress", "chat template", optional=True),
    Leg("tokenized", "traced", "ingress", "tokenized", optional=True),
    Leg("request_made", "traced", "ingress", "sampling parameters, state of the answer"),
    Leg("choice_begun", "traced", "ingress", "admission, tasks started"),
    Leg("chosen", "traced", "ingress", "engine chosen"),
    Leg("request_sent", "traced", "ingress", "request packed"),
    Leg("coordinator_entered", "name", "coordinator", "request sent, on its way, unpacked"),
    Leg("submitted", "name", "coordinator", "checked and queued"),
    Leg("admission_begun", "plan", "coordinator", "waits for its turn: steps in flight, requests before it"),
    Leg("admitted", "plan", "coordinator", "plan with its first chunk made"),
    Leg("planned", "plan", "coordinator", "further chunks of the prompt, until the last is planned"),
    Leg("plan_sent", "step", "coordinator", "until it is sent"),
    Leg(
        "rank_free", "step before", "rank", "waits until the rank has launched the step before (on a CPU: computed it)"
    ),
    Leg("plan_received", "step", "rank", "plan packed, on its way, unpacked"),
    Leg("plan_uploaded", "step", "rank", "plan as arrays, copied to the device", optional=True),
    Leg("slots_set", "step", "rank", "rows of slots and page tables set", optional=True),
    Leg("batch_made", "step", "rank", "tensors of the batch made", optional=True),
    Leg("launched", "step", "rank", "step launched (on a CPU: computed)", optional=True),
    Leg("device_free", "step before", "device", "waits for the step before"),
    Leg("step_done", "step", "device", "its own step, until the rank sees its end", optional=True),
    Leg("result_made", "step", "rank", "result made", optional=True),
    Leg("result_sent", "step", "rank", "until it is sent"),
    Leg("result_received", "step", "coordinator", "result packed, on its way, unpacked"),
    Leg("result_applied", "step", "coordinator", "result applied"),
    Leg("published", "name", "coordinator", "next plan made and sent, before the tokens"),
    Leg("tokens_received", "name", "ingress", "tokens packed, on their way, unpacked"),
    Leg("tokens_taken", "traced", "ingress", "waiting task woken"),
    Leg("text_made", "traced", "ingress", "tokens to text"),
    Leg("event_made", "traced", "ingress", "event made"),
    Leg("client_read", "client", "Serve", "uvicorn, HAProxy, client's read"),
)


@dataclass(frozen=True)
class Exchange:
    """What the client saw of a traced request: nanoseconds of its send and of its first event."""

    number: int
    sent_ns: int
    read_ns: int


class _Index:
    """First stamps by what they are about."""

    def __init__(self, stamps: Iterable[Stamp]) -> None:
        self._first: dict[tuple[str, str, int], int] = {}
        self.names: dict[int, str] = {}  # of traced requests
        self.steps: dict[str, int] = {}  # in which a request's (or, with "+" before it, its first) chunk is planned
        stamps = list(stamps)
        leader = next((stamp.pid for stamp in stamps if stamp.point == "result_sent"), NOTHING)
        ranks = {stamp.pid for stamp in stamps if stamp.point == "plan_received"} - {leader}
        for stamp in stamps:
            if stamp.pid in ranks:
                continue
            if stamp.point == "request_made":
                self.names[stamp.number] = f"{stamp.name}-0"
            elif stamp.point == "planned":
                self.steps[stamp.name] = stamp.number
            name = "" if stamp.point == "request_made" else stamp.name
            key = (stamp.point, name, NOTHING if stamp.point in ("plan_begun", "planned") else stamp.number)
            self._first[key] = min(stamp.at_ns, self._first.get(key, stamp.at_ns))

    def at(self, point: str, name: str = "", number: int = NOTHING) -> int | None:
        return self._first.get((point, name, number))


# The points of legs whose end is another one's stamp.
_POINTS = {
    "admission_begun": "plan_begun",
    "admitted": "planned",
    "rank_free": "launched",
    "device_free": "step_done",
}


def path(index: _Index, exchange: Exchange) -> dict[str, int]:
    """Nanoseconds at the ends of all legs that a request came by. Raises KeyError for a stamp that is missing."""
    name = index.names[exchange.number]
    step = index.steps[name]

    def at(leg: Leg) -> int | None:
        point = _POINTS.get(leg.end, leg.end)
        if leg.about == "traced":
            return index.at(point, number=exchange.number)
        if leg.about == "name":
            return index.at(point, name)
        if leg.about == "plan":  # the first of its chunks, or the last
            return index.at(point, name if leg.end == point else f"+{name}")
        if leg.about == "client":
            return exchange.read_ns
        return index.at(point, number=step - (leg.about == "step before"))

    found = [at(leg) for leg in LEGS]
    whole = {START: exchange.sent_ns}
    latest = exchange.sent_ns
    for place, (leg, at_ns) in enumerate(zip(LEGS, found, strict=True)):
        if leg.about == "step before":  # it may have ended long ago, or end after the next border
            following = next((ns for ns in found[place + 1 :] if ns is not None), latest)
            at_ns = latest if at_ns is None else min(at_ns, following)
        if at_ns is not None:
            whole[leg.end] = latest = max(at_ns, latest)
        elif not leg.optional:
            raise KeyError(f"request {exchange.number}: no stamp {leg.end}")
    return whole


def durations(stamps: Iterable[Stamp], exchanges: Sequence[Exchange]) -> list[dict[str, float]]:
    """Microseconds of each leg, a request each; they add up to what its client waited."""
    index = _Index(stamps)
    out = []
    for exchange in exchanges:
        ends = path(index, exchange)
        times = list(ends.values())
        legs = list(ends)[1:]
        out.append({leg: (end - begin) / 1e3 for leg, begin, end in zip(legs, times, times[1:], strict=False)})
    return out


def summary(requests: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Median and 99th percentile of each leg, in microseconds, and of the whole under "total"."""

    def both(values: Sequence[float]) -> dict[str, float]:
        return {"median_us": round(percentile(values, 0.5), 1), "p99_us": round(percentile(values, 0.99), 1)}

    legs = [leg.end for leg in LEGS if any(leg.end in request for request in requests)]
    each = {leg: both([request.get(leg, 0.0) for request in requests]) for leg in legs}
    return {**each, "total": both([sum(request.values()) for request in requests])}
