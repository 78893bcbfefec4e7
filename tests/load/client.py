"""Clients of a scenario: requests of an open loop, each answer compared with the text it must have, and /health polled.

Fair to the server: one connection a request, a limit for connecting and one for the whole answer, no retries.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.deploy.bench.arrivals import Mix, Traffic
from aerie.deploy.bench.stream_client import Answered, Connection, request_bytes
from tests.load.scenario import Load

CONNECT_LIMIT_S = 3.0
ANSWER_LIMIT_S = 100.0
HEALTH_PERIOD_S = 0.25
HEALTH_LIMIT_S = 2.0
MODEL = "target"
FIRST_ID, VOCAB = 300, 1500  # of the embedded tokenizer's words
# How a request may end. The first four are in good order.
KINDS = (
    "done",
    "left",  # the client left, as planned
    "rejected",  # 400 for one that is malformed, as planned
    "refused politely",  # 429 or 503 with Retry-After
    "503 bare",
    "500",
    "404",
    "other status",
    "no connection",
    "error event",
    "cut",
    "silent",  # no end within ANSWER_LIMIT_S
    "wrong text",
)
GOOD = frozenset(KINDS[:4])
# What makes a request malformed.
_MALFORMED: tuple[Mapping[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": "warm"},
    {"prompt": {"text": "Hello"}},
    {"top_p": 7},
)


@dataclass(frozen=True)
class Ask:
    """One of the distinct requests. leaves: its client goes after a third of the text. malformed: it has no answer."""

    number: int
    body: Mapping[str, Any]
    leaves: bool
    malformed: bool


@dataclass
class Sent:
    """One request as it went. Seconds are since the load's beginning; first_s, end_s: None if it never came.

    token_s: when each token came. tokens, text: as far as they came. kind: of KINDS, "" while it runs. said: what an
        error said, or what was wrong.
    """

    ask: int
    front: str
    sent_s: float
    first_s: float | None = None
    end_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    kind: str = ""
    said: str = ""


@dataclass(frozen=True)
class Reference:
    """What an undisturbed request brought."""

    tokens: tuple[int, ...]
    text: str

    def fault(self, sent: Sent) -> str:
        """Return what is wrong with an answer, however far it came; "" if nothing is."""
        whole = sent.kind == "done"
        if tuple(sent.tokens) != self.tokens[: None if whole else len(sent.tokens)]:
            return f"tokens {sent.tokens}, not {list(self.tokens)}"
        if sent.text != self.text if whole else not self.text.startswith(sent.text):
            return f"text {sent.text!r}, not {self.text!r}"
        return ""


@dataclass(frozen=True)
class HealthSample:
    """One answer of /health. status: 0 for no answer within HEALTH_LIMIT_S; took_s: seconds until it was there."""

    at_s: float
    front: str
    status: int
    took_s: float


def asks(load: Load, seed: int = 0) -> list[Ask]:
    """The distinct requests of a load."""
    traffic = Traffic(Mix(load.prompts, load.answers), 1e9, load.num_distinct, FIRST_ID, VOCAB, seed)
    rng = random.Random(seed)
    found = []
    for number, arrival in enumerate(traffic.arrivals(1000.0)):
        sampling = {"temperature": 1.0, "seed": number} if rng.random() < load.sampled else {"temperature": 0}
        body = {
            "model": MODEL,
            "prompt": arrival.prompt,
            "max_tokens": arrival.num_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **sampling,
        }
        leaves, malformed = rng.random() < load.aborted, rng.random() < load.malformed
        found.append(Ask(number, body | _MALFORMED[number % 4] if malformed else body, leaves, malformed))
    return found


class _Reader(Connection):
    """Keeps the text too, and when events came."""

    def __init__(self, sent: Sent, begin_s: float) -> None:
        super().__init__()
        self._sent = sent
        self._begin_s = begin_s

    def _event(self, payload: bytes, now_s: float) -> None:
        super()._event(payload, now_s)
        if payload == b"[DONE]":
            return
        for choice in json.loads(payload).get("choices", ()):
            self._sent.text += choice.get("text", "")
            tokens = choice.get("token_ids") or ()
            self._sent.tokens.extend(tokens)
            self._sent.token_s.extend([now_s - self._begin_s] * len(tokens))
        if self._sent.first_s is None and self._sent.token_s:
            self._sent.first_s = self._sent.token_s[0]


class Clients:
    """Everything that is sent in one run, and what came of it. port: of HTTP on every front."""

    def __init__(self, fronts: Sequence[str], port: int) -> None:
        self.sent: list[Sent] = []
        self.health: list[HealthSample] = []
        self.begin_s = time.perf_counter()
        self._fronts = list(fronts)
        self._port = port
        self._statuses = dict.fromkeys(fronts, 0)
        self._turn = 0

    def now_s(self) -> float:
        """Since the load's beginning."""
        return time.perf_counter() - self.begin_s

    def all_healthy(self) -> bool:
        """Whether every front said 200 when last asked."""
        return all(status == 200 for status in self._statuses.values())

    async def reference(self, distinct: Sequence[Ask]) -> dict[int, Reference]:
        """Each request's answer, two at a time, nothing else running. Raises RuntimeError if one is not answered."""
        found = {ask.number: Reference((), "") for ask in distinct if ask.malformed}
        sound = [ask for ask in distinct if not ask.malformed]
        for first in range(0, len(sound), 2):
            pair = sound[first : first + 2]
            done = await asyncio.gather(*(self._one(ask, self._next_front(), None, leaves=False) for ask in pair))
            for ask, sent in zip(pair, done, strict=True):
                if sent.kind != "done":
                    raise RuntimeError(f"undisturbed, request {ask.number} ended with {sent.kind!r}: {sent.said}")
                found[ask.number] = Reference(tuple(sent.tokens), sent.text)
        return found

    async def load(
        self, load: Load, distinct: Sequence[Ask], references: Mapping[int, Reference], drain_s: float
    ) -> None:
        """Sends what is due for load.seconds, then waits up to drain_s for the rest."""
        traffic = Traffic(Mix(load.prompts, load.answers), load.seconds, 100_000, FIRST_ID, VOCAB)
        self.begin_s = time.perf_counter()
        tasks = []
        for number, arrival in enumerate(traffic.arrivals(load.rate)):
            if arrival.due_s < load.idle_s:
                continue
            await asyncio.sleep(max(0.0, arrival.due_s - self.now_s()))
            ask = distinct[number % len(distinct)]
            one = self._one(ask, self._next_front(), references[ask.number], ask.leaves, self.sent)
            tasks.append(asyncio.create_task(one))
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sent in self.sent:
            sent.kind = sent.kind or "silent"

    async def watch_health(self) -> None:
        """Polls every front until it is cancelled."""
        await asyncio.gather(*(self._watch(front) for front in self._fronts))

    async def _watch(self, front: str) -> None:
        while True:
            at_s = time.perf_counter()
            status = 0
            try:
                async with asyncio.timeout(HEALTH_LIMIT_S):
                    status = await self._health(front)
            except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
                pass
            self._statuses[front] = status
            took_s = time.perf_counter() - at_s
            self.health.append(HealthSample(at_s - self.begin_s, front, status, took_s))
            await asyncio.sleep(max(0.0, HEALTH_PERIOD_S - took_s))

    async def _health(self, front: str) -> int:
        reader, writer = await asyncio.open_connection(front, self._port)
        try:
            writer.write(f"GET /health HTTP/1.1\r\nHost: {front}\r\nConnection: close\r\n\r\n".encode())
            return int((await reader.readline())[9:12])
        finally:
            writer.close()

    def _next_front(self) -> str:
        """In turn, of those whose /health was 200 when last asked; of all if none was."""
        healthy = [front for front in self._fronts if self._statuses[front] == 200] or self._fronts
        self._turn += 1
        return healthy[self._turn % len(healthy)]

    async def _one(
        self, ask: Ask, front: str, reference: Reference | None, leaves: bool, record: list[Sent] | None = None
    ) -> Sent:
        """One request, to its end. reference: what the answer must be; None: not known yet."""
        sent = Sent(ask.number, front, self.now_s())
        if record is not None:
            record.append(sent)
        answered = Answered()
        reader = _Reader(sent, self.begin_s)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await asyncio.get_running_loop().create_connection(lambda: reader, front, self._port)
            request = request_bytes(self._port, dict(ask.body), "completions", front)
            ended = reader.ask(request, answered)
            async with asyncio.timeout(ANSWER_LIMIT_S):
                if leaves and reference is not None:
                    while not ended.done() and len(sent.tokens) < len(reference.tokens) / 3:
                        await asyncio.sleep(0.02)
                    if not ended.done():
                        sent.kind = "left"
                        return sent
                await ended
            sent.kind = _kind(reader, answered, ask)
        except TimeoutError:
            sent.kind = "silent" if reader.status or answered.sent_s else "no connection"
        except OSError as error:
            sent.kind, sent.said = "no connection", str(error)
        finally:
            reader.close()
            sent.end_s = self.now_s()
            sent.said = sent.said or ("" if sent.kind in ("done", "left", "rejected") else answered.fault)
            if reference is not None and (fault := reference.fault(sent)):
                sent.kind, sent.said = "wrong text", fault
        return sent


def _kind(reader: _Reader, answered: Answered, ask: Ask) -> str:
    status = reader.status
    if ask.malformed and status == 400:
        return "rejected"
    if status == 0:
        return "no connection"
    if status != 200:
        if status in (429, 503):
            return "refused politely" if reader.retry_after else f"{status} bare" if status == 503 else "other status"
        return str(status) if status in (500, 404) else "other status"
    if not answered.fault:
        return "done"
    return "cut" if answered.fault == "unfinished" else "error event"
