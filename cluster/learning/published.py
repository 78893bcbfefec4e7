"""The coordinator's side of a draft that learns: collects finished texts, loads published drafts between two steps, and
takes one back that accepts less than the one before. Used by `aerie.cluster.coordinator.loop`, in its thread."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aerie.cluster.learning.engine_busy import EngineBusy
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.learning.reservoir import Text
from aerie.cluster.learning.watch import MIN_ROUNDS, AcceptanceWatch, noise
from aerie.cluster.transport.admin import DraftVersion
from aerie.workers.scheduling.commands.command import CommandAnswer, Folder, LoadWeights, first_error
from aerie.workers.scheduling.commands.command_queue import OnAnswered
from aerie.workers.scheduling.request import FinishReason, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_MAX_WAITING_TOKENS = 1_000_000  # texts that the learner has not taken
_MAX_SNAPSHOTS = 240  # of `accepted_histogram`, two per second: the usual acceptance is that of two minutes
ORIGINAL = "0"


@dataclass
class Trial:
    """A draft whose acceptance has fallen was taken back, and the one before runs instead. Texts that have changed make
    both accept less; then the first comes back.

    version: the draft that was taken back.
    length: draft tokens that its last rounds accepted, mean.
    num_rounds, num_accepted: counts of the draft before, since then.
    """

    version: DraftVersion
    length: float
    num_rounds: int = 0
    num_accepted: int = 0


class News(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator tells the learner.

    served: folder of the draft that the ranks have; during a `Trial`, of the one that was taken back.
    num_rollbacks: so far, without one on trial.
    num_rounds: number of rounds with this draft.
    """

    texts: tuple[Text, ...]
    served: str
    num_rollbacks: int
    num_rounds: int = 0


class PublishedDrafts:
    """The drafts of one engine.

    draft: folder of the configured one.
    load: carries out `LoadWeights`.
    busy_file: where to write whether there are requests, see `EngineBusy`; "": nowhere.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        draft: str,
        load: Callable[[LoadWeights, OnAnswered], None],
        busy_file: str = "",
    ) -> None:
        self.versions = [DraftVersion(ORIGINAL, draft)]
        self.num_candidates = self.num_rollbacks = self.num_texts = self._num_rounds = 0
        self.gain = 0.0  # gain of the newest candidate
        self._scheduler, self._load = scheduler, load
        self._busy = EngineBusy(Path(busy_file)) if busy_file else None
        self._texts: deque[Text] = deque()
        self._num_waiting_tokens = 0
        self._snapshots: deque[list[int]] = deque(maxlen=_MAX_SNAPSHOTS)  # `accepted_histogram`, twice a second
        self._watch: AcceptanceWatch | None = None
        self._trial: Trial | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=_MAX_SNAPSHOTS)  # rounds of the served draft, accepted
        self._is_loading = False

    @property
    def served(self) -> DraftVersion:
        """The draft that the ranks have."""
        return next(version for version in self.versions if version.state == "served")

    def counts(self) -> dict[str, Any]:
        """Return fields of `EngineStats`."""
        return {
            "draft_version": int(self.served.name.partition(".")[0]),
            "draft_gain": self.gain,
            "num_draft_candidates": self.num_candidates,
            "num_draft_rollbacks": self.num_rollbacks,
            "num_learned_texts": self.num_texts,
        }

    def show_load(self, is_busy: bool) -> None:
        """Tell a training with `priority: engine_idle` whether there are requests."""
        if self._busy is not None:
            self._busy.write(is_busy)

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep the texts of requests that have ended. Those with adapters, images or an objection are left out."""
        for output in outputs:
            request = output.request
            if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or not request.owner.learns:
                continue
            if request.sampling.adapter or request.inputs is not None:
                continue
            text = Text(tuple(request.prompt), tuple(request.output), request.owner.tenant)
            self._texts.append(text)
            self.num_texts += 1
            self._num_waiting_tokens += text.num_tokens
            while self._num_waiting_tokens > _MAX_WAITING_TOKENS:
                self._num_waiting_tokens -= self._texts.popleft().num_tokens

    def news(self) -> News:
        """Return the texts since the last call, and the draft."""
        taken = tuple(self._texts)
        self._texts.clear()
        self._num_waiting_tokens = 0
        served = self.served if self._trial is None else self._trial.version
        return News(taken, served.folder, self.num_rollbacks, self._num_rounds)

    def offer(self, candidate: Candidate, on_answered: OnAnswered) -> None:
        """Count a candidate, and publish it if it has files. Raises ValueError if it cannot be published."""
        self.num_candidates += 1
        self.gain = candidate.gain
        if not candidate.folder:
            on_answered(())
            return
        name = Path(candidate.folder).name.removeprefix("draft-")
        version = DraftVersion(name, candidate.folder, "served", candidate.gain, candidate.low)
        if any(known.name == name for known in self.versions):
            version = msgspec.structs.replace(version, name=f"{name}.{self.num_candidates}")

        def answered(answers: Sequence[CommandAnswer]) -> None:
            if not first_error(answers):
                self._trial = None
                logger.info("draft %s is served: %.1f %% better on held-out texts", version.name, 100 * version.gain)
                self._replace("former")
                self.versions.append(version)
            on_answered(answers)

        self._switch(version, answered)

    def roll_back(self, name: str, on_answered: OnAnswered, why: str = "asked for") -> None:
        """Load an earlier version. Raises ValueError for one that is unknown, or whose files are gone."""
        version = next((known for known in self.versions if known.name == name), None)
        if version is None:
            raise ValueError(f"version={name}: must be one of {', '.join(known.name for known in self.versions)}")

        self._trial = None

        def answered(answers: Sequence[CommandAnswer]) -> None:
            if not first_error(answers):
                self.num_rollbacks += 1
                logger.warning("draft %s is taken back for %s: %s", self.served.name, name, why)
                self._replace("rolled back", why)
                index = next(i for i, known in enumerate(self.versions) if known.name == name)
                self.versions[index] = msgspec.structs.replace(self.versions[index], state="served")
            on_answered(answers)

        self._switch(version, answered)

    def check_acceptance(self) -> None:
        """Compare the acceptance with the usual one; roll back if it has fallen. Call it twice a second while there are
        ranks."""
        now = list(self._scheduler.stats.accepted_histogram)
        before = self._snapshots[-1] if self._snapshots else now
        self._snapshots.append(now)
        new = [count - then for count, then in zip(now, before, strict=False)]
        rounds, accepted = sum(new), sum(k * count for k, count in enumerate(new))
        self._num_rounds += rounds
        self._recent.append((rounds, accepted))
        if self._trial is not None and not self._is_loading:
            self._judge(self._trial, rounds, accepted)
            return
        is_original = self.served.name == ORIGINAL
        if self._watch is None or self._is_loading or is_original or self._scheduler.weights.num_updates:
            return
        why = "its acceptance has fallen" if self._watch.has_fallen(rounds, accepted) else ""
        if not self._watch.is_known:
            why = self._scheduler.weights.draft.fault
        if why:
            former = [version.name for version in self.versions if version.state == "former"] or [ORIGINAL]
            trial = Trial(self.served, self._recent_length()) if self._watch.is_known else None

            def taken_back(answers: Sequence[CommandAnswer]) -> None:
                if trial is not None and not first_error(answers):
                    self._trial = trial
                    self.num_rollbacks -= 1  # counted once it is decided

            try:
                self.roll_back(former[-1], taken_back, why)
            except ValueError as error:  # its files are gone
                logger.error("draft %s cannot be taken back: %s", self.served.name, error)
                self._watch = None

    def _recent_length(self) -> float:
        """Return the draft tokens that the served draft's last rounds accepted, mean."""
        rounds = accepted = 0
        for count, sum_accepted in reversed(self._recent):
            rounds, accepted = rounds + count, accepted + sum_accepted
            if rounds >= MIN_ROUNDS:
                break
        return accepted / max(1, rounds)

    def _judge(self, trial: Trial, rounds: int, accepted: int) -> None:
        """Add rounds of the draft before; once there are enough, load the other one again unless it was worse by more
        than noise."""
        trial.num_rounds += rounds
        trial.num_accepted += accepted
        if trial.num_rounds < MIN_ROUNDS:
            return
        self._trial = None
        if trial.num_accepted / trial.num_rounds > trial.length + noise(trial.length):
            self.num_rollbacks += 1
            return

        def answered(answers: Sequence[CommandAnswer]) -> None:
            if not first_error(answers):
                logger.info("draft %s is served again: the one before accepts no more of these texts", name)
                self._replace("former")
                restored = msgspec.structs.replace(trial.version, state="served", why="")
                self.versions = [restored if version.name == name else version for version in self.versions]

        name = trial.version.name
        try:
            self._switch(trial.version, answered)
        except ValueError as error:
            logger.error("draft %s cannot be served again: %s", name, error)

    def _switch(self, version: DraftVersion, on_answered: OnAnswered) -> None:
        """Load another version between two steps, and measure its acceptance from there on. on_answered: called with
        the ranks' answers. Raises ValueError if it cannot be loaded now."""
        if self._scheduler.weights.num_updates:
            raise ValueError("weights were updated since the start: this draft has learned from another target")
        if not Path(version.folder).is_dir():
            raise ValueError(f"version={version.name}: {version.folder} is gone")
        if self._is_loading:
            raise ValueError("another draft is being loaded")
        self._is_loading = True

        def answered(answers: Sequence[CommandAnswer]) -> None:
            """Begin to measure the loaded draft, and pass the answers on."""
            self._is_loading = False
            now = self._scheduler.stats.accepted_histogram
            oldest = self._snapshots[0] if self._snapshots else now
            if not first_error(answers):
                self._num_rounds = 0
                self._recent.clear()
                # the rounds since the oldest snapshot, with the draft before, are the usual acceptance
                self._watch = AcceptanceWatch([count - then for count, then in zip(now, oldest, strict=False)])
                self._snapshots.clear()
                self._snapshots.append(list(now))
            on_answered(answers)

        self._load(
            LoadWeights(draft=Folder(version.folder), version=f"draft {version.name}", is_learned=True), answered
        )

    def _replace(self, state: str, why: str = "") -> None:
        """Set the state of the served version, which is none from now on."""
        self.versions = [
            msgspec.structs.replace(version, state=state, why=why) if version.state == "served" else version
            for version in self.versions
        ]
