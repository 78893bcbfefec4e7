"""The weights that an engine's ranks have: updates, their number in the keys of the prefix cache, and what restores
them on new ranks. Used by `aerie.workers.scheduling.scheduler`. Pure."""

from collections.abc import Sequence

from aerie.workers.scheduling.commands.command import (
    CommandAnswer,
    Folder,
    LoadedWeights,
    LoadWeights,
    WeightSource,
    first_error,
)
from aerie.workers.scheduling.commands.command_queue import CommandQueue, OnAnswered
from aerie.workers.scheduling.commands.draft_check import DraftCheck
from aerie.workers.scheduling.slot_pages import SlotPages


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
        if not work.is_learned:
            self._slot_pages.weight_epoch += 1
            self.version = work.version or str(self.epoch)
            self.num_updates += 1
        self.draft.updated(work.version or self.version)
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
