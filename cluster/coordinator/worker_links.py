"""The coordinator's links to its ranks: plans and commands out, results and answers in, detection of hangs and deaths.
After a request with NaN or infinite logits, it asks the ranks for one token until it gets a finite one, so that
`/health` distinguishes broken weights from one unusual request."""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from aerie.cluster.transport.channel import Context, RankLink
from aerie.cluster.transport.encoding import encode
from aerie.cluster.transport.messages import Heartbeat, RankFailure, Stop
from aerie.cluster.transport.reactor import Reactor
from aerie.cluster.transport.sockets import Transport
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.plan import NOT_FINITE, SamplingParams, StepPlan, StepResult
from aerie.workers.scheduling.request import Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

IDLE_HEARTBEAT_LIMIT_S = 10.0  # maximum time between heartbeats of an idle rank, which sends one every half second
HUNG_S = 4.0  # minimum time of a step that counts as hung, if it is also HUNG_RATIO times the longest one
HUNG_RATIO = 3.0
SILENT_S = 3.0  # silence after which requests are assumed not to reach the rank
PUNCTUAL_S = 2.0  # between two checks: after a longer pause of this process, messages may still be unread


class WorkerLinks:
    """Links to one epoch of ranks. The reactor's thread calls the callbacks.

    on_result: called with rank 0's results.
    on_answers: called with the answers of all ranks to a command, by rank.
    on_lost: called at most once, with the reason, if a rank dies, is stopped, fails, hangs or stops reading; then the
        owner calls `close`.
    locations: where each rank runs, for the reasons.
    """

    def __init__(
        self,
        context: Context,
        transport: Transport,
        reactor: Reactor,
        endpoints: Sequence[str],
        epoch: int,
        clock: Callable[[], float],
        on_result: Callable[[StepResult], None],
        on_answers: Callable[[Sequence[CommandAnswer]], None],
        on_lost: Callable[[str], None],
        locations: Sequence[str] = (),
    ) -> None:
        self.epoch = epoch
        self._names = [
            f"rank {rank}" + (f" ({locations[rank]})" if locations else "") for rank in range(len(endpoints))
        ]
        self._reactor = reactor
        self._clock = clock
        self._on_result = on_result
        self._on_answers = on_answers
        self._answers: dict[int, CommandAnswer] = {}  # by rank, to the command in flight
        self._extra_s = 0.0  # time allowed for the command in flight beyond a step's limit
        self._on_lost = on_lost
        self._is_lost = False
        self._unanswered: deque[tuple[int, float]] = deque()
        self._longest_s = 0.0
        self._links: list[RankLink] = []
        self.last_heartbeat_s = [clock()] * len(endpoints)
        self.last_heartbeat = [Heartbeat(rank, epoch, 0) for rank in range(len(endpoints))]
        self._last_check_s = clock()
        try:
            for rank, endpoint in enumerate(endpoints):
                link = RankLink(context, transport, endpoint, rank)
                self._links.append(link)
                reactor.watch(link.socket, lambda link=link: self._receive(link))  # type: ignore[misc]
                reactor.watch(link.monitor.socket, lambda link=link: self._check(link))  # type: ignore[misc]
        except ValueError:
            self.close()
            raise

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all ranks."""
        self._send(plan)

    def send_command(self, command: Command) -> None:
        """Send a command to all ranks, while no plan is unanswered. Send nothing else before `on_answers`."""
        assert not self._unanswered, "commands are sent while nothing is in flight"
        self._answers.clear()
        self._extra_s = command.work.extra_s
        self._send(command)

    def _send(self, message: StepPlan | Command) -> None:
        """Send a plan or command to every rank, in rank order."""
        raw = encode(message)
        self._unanswered.append((message.step, self._clock()))
        for link in self._links:
            if not link.send(raw):
                self._lose(f"{self._names[link.rank]} does not read its plans")
                return

    def oldest_plan(self, now: float) -> tuple[int, float] | None:
        """Return step and age in seconds of the oldest plan without a result. Safe in any thread."""
        try:
            step, sent_s = self._unanswered[0]
        except IndexError:
            return None
        return step, now - sent_s

    def silent_rank(self, now: float) -> str:
        """Return a sentence about an idle rank without heartbeats, or ""."""
        if self._unanswered:
            return ""
        for name, stamp in zip(self._names, self.last_heartbeat_s, strict=True):
            if now - stamp > SILENT_S:
                return f"{name} has not been heard of for {now - stamp:.1f} s"
        return ""

    def hung_step(self, now: float) -> str:
        """Return a sentence about a step that takes so long that new requests would hang, or ""."""
        oldest = self.oldest_plan(now)
        if oldest is None or oldest[1] < max(HUNG_S, HUNG_RATIO * self._longest_s) + self._extra_s:
            return ""
        return f"step {oldest[0]} has had no result for {oldest[1]:.1f} s"

    def check_heartbeats(self, now: float, step_timeout_s: float) -> None:
        """Report the ranks as lost if one hangs. Call it regularly. A stopped process or a cut cable ends its
        connection instead (`aerie.cluster.transport.sockets`)."""
        punctual = now - self._last_check_s < PUNCTUAL_S
        self._last_check_s = now
        oldest = self.oldest_plan(now)
        if oldest is None and punctual:
            for name, stamp in zip(self._names, self.last_heartbeat_s, strict=True):
                if now - stamp > IDLE_HEARTBEAT_LIMIT_S:
                    self._lose(f"{name} hangs: idle, and no heartbeat for {now - stamp:.1f} s")
                    return
        if oldest is not None and oldest[1] > step_timeout_s + self._extra_s:
            heard = ", ".join(
                f"{name} {now - stamp:.1f} s ago"
                for name, stamp in zip(self._names, self.last_heartbeat_s, strict=True)
            )
            self._lose(
                f"no result of step {oldest[0]} for {oldest[1]:.1f} s (step_timeout_s={step_timeout_s:g}): a rank "
                f"hangs; last heard of: {heard}"
            )

    def stop(self) -> None:
        """Ask every rank to end its loop."""
        for link in self._links:
            link.send(encode(Stop()))

    def close(self, linger_ms: int = 0) -> None:
        """Close all links, which ends the ranks."""
        self._is_lost = True
        for link in self._links:
            for socket in (link.socket, link.monitor.socket):
                self._reactor.forget(socket)
            link.close(linger_ms)
        self._links = []

    def _receive(self, link: RankLink) -> None:
        """Process a rank's messages, up to and including its first result."""
        while not self._is_lost and (message := link.receive()) is not None:
            self.last_heartbeat_s[link.rank] = self._clock()
            if isinstance(message, StepResult):
                # All ranks took part in the step, and could not send heartbeats during it.
                self.last_heartbeat_s = [self._clock()] * len(self._names)
                if message.epoch == self.epoch:
                    _, sent_s = self._unanswered.popleft()
                    self._longest_s = max(self._longest_s, self._clock() - sent_s)
                self._on_result(message)
                return  # send the next plan before reading another result
            elif isinstance(message, CommandAnswer):
                self._answered(link.rank, message)
            elif isinstance(message, RankFailure):
                self._lose(f"{self._names[link.rank]} failed: {message.message}")
            else:
                assert isinstance(message, Heartbeat), f"rank {link.rank} sent a {type(message).__name__}"
                self.last_heartbeat[link.rank] = message

    def _answered(self, rank: int, answer: CommandAnswer) -> None:
        """Keep a rank's answer to the command in flight; the last rank's answer completes the command."""
        self._answers[rank] = answer
        if len(self._answers) == len(self._names):
            self._unanswered.popleft()
            self._extra_s = 0.0  # steps have the usual limit again
            # a rank sends no heartbeats while it executes a command
            self.last_heartbeat_s = [self._clock()] * len(self._names)
            self._on_answers([self._answers[rank] for rank in range(len(self._names))])

    def _check(self, link: RankLink) -> None:
        reason = link.monitor.check()
        if reason is not None:
            while not self._is_lost and link.is_readable():
                self._receive(link)  # what it sent before
            age_s = self._clock() - self.last_heartbeat_s[link.rank]
            silent = f", {age_s:.1f} s after its last heartbeat" if age_s > PUNCTUAL_S else ""
            self._lose(f"{self._names[link.rank]} is gone: {reason}{silent}")

    def _lose(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(reason)


logger = logging.getLogger(__name__)

RETRY_S = 2.0  # between two checks of a model that has failed one
PROMPT_TOKENS = 8  # maximum tokens of the prompt that checks the model
SAMPLING = SamplingParams(1, 0.0, speculative=False, cache_salt=b"model check")  # computed anew each time
FAULT = "the model's logits are NaN or infinite for every request: its weights are broken; restart the engine"


class ModelCheck:
    """Sends the engine's own requests of one token. fault: why all requests would fail, or ""."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.fault = ""
        self._scheduler = scheduler
        self._due_s = math.inf
        self._asked = ""  # id of the running request
        self._count = 0
        self._good_prompt: Sequence[int] = range(PROMPT_TOKENS)  # a prompt that the model answered before

    def observe(self, outputs: Sequence[RequestOutput], now: float) -> None:
        """Look for results of a check, and for NaN or infinite logits, in a step's outputs."""
        if self._asked:
            for output in outputs:
                if output.request.request_id == self._asked:
                    self._answered(output, now)
        errors = [output.error for output in outputs]
        if NOT_FINITE.message in errors and not self._asked and self._due_s == math.inf:
            self._due_s = now
        if outputs and outputs[-1].tokens:
            self._good_prompt = outputs[-1].request.prompt

    def send_if_due(self, now: float) -> None:
        """Send a request if it is due. Call it regularly while there are ranks."""
        if now < self._due_s:
            return
        self._count += 1
        self._due_s = math.inf
        request = Request(f"model-check-{self._count}", list(self._good_prompt[:PROMPT_TOKENS]), SAMPLING)
        try:
            self._scheduler.submit(request, resumed=True)
        except ValueError as error:  # the engine's maximum length is below the prompt's
            logger.warning("the model cannot be checked: %s", error)
        else:
            self._asked = request.request_id

    def reset(self) -> None:
        """Forget all results after the loss of the ranks; new ranks load the weights again."""
        if self._asked:
            self._scheduler.abort(self._asked)
        self.fault, self._asked, self._due_s = "", "", math.inf

    def _answered(self, output: RequestOutput, now: float) -> None:
        fault = FAULT if output.error == NOT_FINITE.message else ""
        if fault != self.fault:
            logger.error("%s", fault) if fault else logger.warning("the model computes numbers again")
        self.fault, self._asked = fault, ""
        self._due_s = now + RETRY_S if fault else math.inf
