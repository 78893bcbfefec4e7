"""Commands that wait until no step is in flight, and what decides when some are sent. Pure; used by
`aerie.workers.scheduling.scheduler`, which plans no step while a command waits or runs.

CommandQueue    the queue, and the command in flight
WeightVersions  updates of weights: their number in the prefix cache's keys, and what restores them on new ranks
DraftCheck      names a draft that no longer fits after an update: it changes no text, but wastes rounds
CapturePacing   when to capture another CUDA graph, which blocks the ranks for 30 to 200 ms: after 0.5 s without
                requests, or once steps have lost as much time to padding as the capture takes
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from aerie.workers.scheduling.commands.command import (
    Captured,
    Command,
    CommandAnswer,
    Folder,
    LoadedWeights,
    LoadWeights,
    WeightSource,
    Work,
    first_error,
)
from aerie.workers.scheduling.plan import GraphCount
from aerie.workers.scheduling.slot_pages import SlotPages

OnAnswered = Callable[[Sequence[CommandAnswer]], None]  # called with the answers of all ranks


class CommandQueue:
    """Commands in the order of `add`; at most one is in flight.

    is_empty: no command waits or is in flight.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self._waiting: deque[tuple[Work, OnAnswered]] = deque()
        self._in_flight: tuple[Command, OnAnswered] | None = None

    def add(self, work: Work, on_answered: OnAnswered) -> None:
        """Queue a command. on_answered: called before the next plan is made, or when the ranks are lost."""
        self._waiting.append((work, on_answered))
        self.is_empty = False

    @property
    def is_due(self) -> bool:
        """Whether `next` may be called once no step is in flight."""
        return self._in_flight is None and bool(self._waiting)

    def next(self, epoch: int, step: int) -> Command:
        """Return the next command, which is in flight from now on."""
        assert self.is_due, "no command is due"
        work, on_answered = self._waiting.popleft()
        command = Command(epoch, step, work)
        self._in_flight = command, on_answered
        return command

    def answered(self, answers: Sequence[CommandAnswer]) -> None:
        """End the command in flight. answers: of all ranks."""
        assert self._in_flight is not None, "no command is in flight"
        command, on_answered = self._in_flight
        assert all((answer.epoch, answer.step) == (command.epoch, command.step) for answer in answers)
        self._in_flight = None
        self.is_empty = not self._waiting
        on_answered(answers)

    def fail_all(self, reason: str) -> None:
        """End all commands with an error, because the ranks are lost."""
        ended = [on_answered for _, on_answered in self._waiting]
        if self._in_flight is not None:
            ended.insert(0, self._in_flight[1])
        self._waiting.clear()
        self._in_flight = None
        self.is_empty = True
        for on_answered in ended:
            on_answered((CommandAnswer(-1, -1, -1, error=reason),))


logger = logging.getLogger(__name__)

# Rounds after an update, and what names the draft. A draft that accepts 0.5 tokens a round, which is little, is named
# wrongly with a probability of exp(-8) = 0.0003 by the first rule and below 1e-7 by the second (Poisson).
NONE_ROUNDS = 16  # none of which accepted a draft token
FEW_ROUNDS = 64
FEW_ACCEPTED = 0.1  # tokens per round: an acceptance length of 1.1
HALF_ROUNDS = 256  # with less than half of the acceptance before the update; also the rounds that it takes to know it


class DraftCheck:
    """Acceptance since the last update.

    histogram: returns, for each k, the rounds so far that accepted k draft tokens.
    fault: why the draft counts as dead, or "".
    is_open: whether more rounds are needed to know it. Always false without an update.
    num_updates: calls of `updated`.
    """

    def __init__(self, histogram: Callable[[], Sequence[int]]) -> None:
        self.fault = ""
        self._histogram = histogram
        self._since = list(histogram())
        self._earlier_rate: float | None = None  # accepted tokens per round before the last update; None: unknown
        self._version = ""
        self.is_open = False
        self.num_updates = 0

    def restart(self, version: str) -> None:
        """Start again after an update of weights. version: its name."""
        rounds, accepted = self._seen()
        self.num_updates += 1
        if rounds >= HALF_ROUNDS and not self.fault:
            self._earlier_rate = accepted / rounds
        self.fault, self._version, self._since, self.is_open = "", version, list(self._histogram()), True

    def observe(self) -> None:
        """Check, after a step's results."""
        if not self.is_open:
            return
        rounds, accepted = self._seen()
        if rounds < NONE_ROUNDS:
            return
        per_round = accepted / rounds
        is_dead = accepted == 0 or (rounds >= FEW_ROUNDS and per_round < FEW_ACCEPTED)
        is_half = self._earlier_rate is not None and rounds >= HALF_ROUNDS and per_round < self._earlier_rate / 2
        if is_dead or is_half:
            before = "" if self._earlier_rate is None else f", {self._earlier_rate:.2f} before"
            self.fault = (
                f"since weights {self._version}, {rounds} rounds accepted {per_round:.2f} draft tokens each{before}: "
                "the draft does not fit the target; send its weights, too"
            )
            logger.warning("%s", self.fault)
        self.is_open = not self.fault and rounds < HALF_ROUNDS

    def _seen(self) -> tuple[int, int]:
        """Return rounds since the last update, and the draft tokens that they accepted."""
        counts = [now - then for now, then in zip(self._histogram(), self._since, strict=False)]
        return sum(counts), sum(k * count for k, count in enumerate(counts))


class WeightVersions:
    """Loads weights again while requests run, and keeps what new ranks need to get the same ones.

    epoch: number of successful updates since the engine's start; 0: the weights of its checkpoints. Also counts
        restorations, because new ranks have no cached pages of the earlier ones.
    version: name of the last update, "" at the start: given by its sender, or `epoch`.
    num_updates: successful ones, without drafts that have learned.
    draft: names a draft that an update has broken.
    fault: why the ranks' weights are not those of the last update, or "". Requests should not run then.
    """

    def __init__(self, commands: CommandQueue, slot_pages: SlotPages, draft: DraftCheck) -> None:
        self.fault = ""
        self.version = ""
        self.num_updates = 0
        self.draft = draft
        self._commands = commands
        self._slot_pages = slot_pages
        self._sources: dict[str, list[WeightSource]] = {}  # by model, from the last one that had all names on

    @property
    def epoch(self) -> int:
        return self._slot_pages.weight_epoch

    def load(self, work: LoadWeights, on_answered: OnAnswered) -> None:
        """Queue an update. Running requests continue with the new weights. If it succeeds, prompts that are computed
        from then on find only cached pages of the new weights."""

        def answered(answers: Sequence[CommandAnswer]) -> None:
            if not first_error(answers):
                self._succeeded(work, answers)
            on_answered(answers)

        self._commands.add(work, answered)

    def _succeeded(self, work: LoadWeights, answers: Sequence[CommandAnswer]) -> None:
        """Record an update of weights, and from where new ranks can restore them."""
        if not work.is_learned:
            self._slot_pages.weight_epoch += 1
            self.version = work.version or str(self.epoch)
            self.num_updates += 1
        self.draft.restart(work.version or self.version)
        result = answers[0].result
        assert isinstance(result, LoadedWeights)
        for model, source in work.sources.items():
            is_whole = work.is_learned or not result.missing[model]
            self._sources[model] = [source] if is_whole else [*self._sources.get(model, []), source]
        if self._lacks_nothing(work, result):
            self.fault = ""

    def _lacks_nothing(self, work: LoadWeights, result: LoadedWeights) -> bool:
        return all(model in work.sources and not result.missing[model] for model in self._sources)

    def restore(self) -> None:
        """Queue the updates so far for new ranks, which have the weights of the engine's start. Sets `fault` if that is
        impossible, or once it fails."""
        self.fault = ""
        if not self._sources:
            return
        self._slot_pages.weight_epoch += 1
        for model, sources in self._sources.items():
            if not all(isinstance(source, Folder) for source in sources):
                self.fault = (
                    f"the {model}'s weights came in messages or from a trainer, and are lost with the ranks that had "
                    "them; load all of them again"
                )
                return
        for model, sources in self._sources.items():
            for source in sources:
                work = LoadWeights(source) if model == "target" else LoadWeights(draft=source)
                self._commands.add(work, self._restored)

    def _restored(self, answers: Sequence[CommandAnswer]) -> None:
        if answers[0].rank >= 0 and (error := first_error(answers)):  # else further ranks follow
            self.fault = f"the weights of the last update cannot be restored: {error}"


IDLE_S = 0.5  # after the last request


class CapturePacing:
    """Paces captures.

    busy_interval_s: minimum seconds between captures while requests run; 0: capture everything before the next step.
    clock: returns seconds.
    graphs: the ranks' last report.
    is_pending: a capture is queued, and has no answer yet.
    row_ms: milliseconds that a row adds to a step; None if unknown: then any padding justifies a capture.
    """

    def __init__(self, busy_interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = busy_interval_s
        self._clock = clock
        self._last_request_s = -math.inf
        self.row_ms: float | None = None
        self.reset()

    def reset(self) -> None:
        """Start again with new ranks."""
        self.graphs = GraphCount()
        self.is_pending = False
        self._has_failed = False
        self._since_s = self._clock()

    def is_due(self, is_idle: bool) -> bool:
        """Return whether to queue a capture now. is_idle: whether there are no requests."""
        now_s = self._clock()
        if not is_idle:
            self._last_request_s = now_s
        if self.graphs.num_waiting == 0 or self.is_pending or self._has_failed:
            return False
        if now_s >= self._last_request_s + IDLE_S:
            return True
        return now_s >= self._since_s + self._interval_s and (self._interval_s == 0.0 or self._is_missed)

    @property
    def _is_missed(self) -> bool:
        """Return whether padding has cost as much time as capturing the next graph."""
        graphs, row_ms = self.graphs, self.row_ms
        return graphs.missed_rows > 0 and (row_ms is None or graphs.missed_rows * row_ms >= graphs.capture_ms)

    def answered(self, answers: Sequence[CommandAnswer]) -> None:
        """Store the graph counts after a capture. After an error there are no further captures with these ranks."""
        self.is_pending = False
        self._since_s = self._clock()
        if error := first_error(answers):
            self._has_failed = True
            if answers[0].rank >= 0:
                logger.warning("no further CUDA graphs are captured, because a capture failed: %s", error)
            return
        result = answers[0].result
        assert isinstance(result, Captured)
        self.graphs = result.graphs
