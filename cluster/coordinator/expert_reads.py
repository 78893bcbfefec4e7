"""Last outputs of requests that want their routed experts wait here until the ranks have read them. Used by
`aerie.cluster.coordinator.loop`, in its thread."""

from collections.abc import Callable, Sequence

import msgspec

from aerie.workers.scheduling.commands.command import CommandAnswer, ReadRoutedExperts, RoutedExperts, first_error
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
_LOST = "its routed experts were lost"


class ExpertReads:
    """Reads the routed experts of requests that ended, for `routed_experts`.

    ready: called with outputs, once they have their experts, or an error in their place.
    """

    def __init__(self, scheduler: Scheduler, ready: Callable[[list[RequestOutput]], None]) -> None:
        self._scheduler, self._ready = scheduler, ready
        self._computed_again: dict[str, RequestOutput] = {}

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return a step's outputs without those that wait. Call it before another plan is made, which may overwrite the
        pages of requests that have ended."""
        ended = [
            output for output in outputs if output.request.sampling.routed_experts and output.finish_reason is not None
        ]
        if not ended:
            return outputs
        reads = []
        for output in ended:
            former = self._computed_again.pop(output.request.request_id, None)
            waiting = former or msgspec.structs.replace(output, version=self._scheduler.weights.version)
            if output.finish_reason not in _ENDS:
                self._ready([waiting if former is None else _failed(former, f"{_LOST}: {output.error}")])
            elif output.pages:
                reads.append(msgspec.structs.replace(waiting, pages=output.pages))
            else:
                self._compute_again(waiting)
        if reads:
            self._read(reads)
        names = {output.request.request_id for output in ended}
        return [output for output in outputs if output.request.request_id not in names]

    def reset(self) -> None:
        """End what is computed again, because the ranks are lost."""
        for name, output in self._computed_again.items():
            self._scheduler.abort(name)
            self._ready([_failed(output, f"{_LOST}: the ranks were lost")])
        self._computed_again.clear()

    def _compute_again(self, output: RequestOutput) -> None:
        """Compute the text again as a prompt: the request was preempted before its last step, so others have its
        pages."""
        request = output.request
        text, name = [*request.prompt, *request.output][:-1], f"experts of {request.request_id}"
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1, prompt_logprobs=-1, grammar=None)
        again = Request(name, text, sampling, owner=request.owner, inputs=request.inputs)
        try:
            self._scheduler.submit(again, resumed=True)
        except ValueError as error:
            self._ready([_failed(output, f"{_LOST}: {error}")])
        else:
            self._computed_again[name] = output

    def _read(self, waiting: Sequence[RequestOutput]) -> None:
        """Ask the ranks for the routed experts of ended requests, whose pages they still have."""

        def answered(answers: Sequence[CommandAnswer]) -> None:
            """Complete the outputs with rank 0's answer."""
            if error := first_error(answers):
                self._ready([_failed(output, f"{_LOST}: {error}") for output in waiting])
                return
            (read,) = [answer.result for answer in answers if answer.rank == 0]
            assert isinstance(read, RoutedExperts)
            pairs = zip(waiting, read.files, strict=True)
            self._ready([msgspec.structs.replace(output, routed_experts=file, pages=()) for output, file in pairs])

        # the newest token has no KV
        counts = tuple(len(output.request.prompt) + len(output.request.output) - 1 for output in waiting)
        self._scheduler.add_command(ReadRoutedExperts(tuple(output.pages for output in waiting), counts), answered)


def _failed(output: RequestOutput, error: str) -> RequestOutput:
    return msgspec.structs.replace(output, finish_reason=FinishReason.ERROR, error=error, pages=())
