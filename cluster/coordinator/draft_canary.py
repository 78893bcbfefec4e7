"""Runs prompts again after an update of weights while the engine is idle, so that a draft that no longer fits is named
(`aerie.workers.scheduling.commands.command_queue`) before the next client waits for it."""

from collections import deque
from collections.abc import Sequence

from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Owner, Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

NUM_PROMPTS, MAX_PROMPT, NUM_TOKENS = 8, 512, 32  # a dead draft takes 31 rounds for each, which is more than enough
_LAST = Owner(priority=100, learns=False)  # any client's request comes first


class DraftCanary:
    """Sends the engine's own requests, with prompts of the newest answers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._prompts: deque[Sequence[int]] = deque(maxlen=NUM_PROMPTS)
        self._running: set[str] = set()
        self._num_updates = self._count = 0

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep the prompts of a step's finished requests."""
        for output in outputs:
            request = output.request
            if output.finish_reason is None:
                continue
            if request.request_id in self._running:
                self._running.discard(request.request_id)
            elif len(request.prompt) <= MAX_PROMPT and request.inputs is None and not request.sampling.adapter:
                self._prompts.append(request.prompt)

    def send_if_due(self) -> None:
        """Send requests if the draft's acceptance after the last update is not known. Call it regularly while requests
        may run."""
        check = self._scheduler.weights.draft
        is_idle = not self._scheduler.num_running and not self._scheduler.num_waiting
        if not check.is_open or check.num_updates == self._num_updates or not is_idle:
            return
        self._num_updates = check.num_updates
        for prompt in self._prompts:
            self._count += 1
            sampling = SamplingParams(NUM_TOKENS, 0.0, cache_salt=b"draft canary")
            request = Request(f"draft-canary-{self._count}", prompt, sampling, owner=_LAST)
            self._scheduler.submit(request, resumed=True)
            self._running.add(request.request_id)

    def give_way(self) -> None:
        """End its requests, for work that needs an engine without any. They are sent again later."""
        if self._running:
            self._num_updates = -1
        self.reset()

    def reset(self) -> None:
        """End its requests, because the ranks are lost."""
        for request_id in self._running:
            self._scheduler.abort(request_id)
        self._running.clear()
