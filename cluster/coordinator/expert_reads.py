"""Last outputs of requests that want their routed experts wait here until the ranks have read them. Used by
`aerie.cluster.coordinator.loop`, in its thread."""

from collections.abc import Callable, Sequence

import msgspec

from aerie.workers.scheduling.commands.command import CommandAnswer, ReadRoutedExperts, RoutedExperts, first_error
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # others, such as an abort, have no experts
_LOST = "its routed experts were lost"


class ExpertReads:
    """Reads the routed experts of requests that ended, for `routed_experts`.

    The ranks keep the experts beside the KV, by page. A request that has lost its pages before its end is computed
    again as a prompt (`_recompute`), whose pages then have the experts of the same tokens.

    ready: called with outputs, once they have their experts, or an error in their place.
    _recomputed: the output that waits, by the id of the request that computes its tokens again.
    """

    def __init__(self, scheduler: Scheduler, ready: Callable[[list[RequestOutput]], None]) -> None:
        self._scheduler, self._ready = scheduler, ready
        self._recomputed: dict[str, RequestOutput] = {}

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Take the last outputs of requests with `routed_experts` from a step's outputs. Return the others; the taken
        ones go to `ready` later.

        Call it before another plan is made, which may overwrite the pages of requests that have ended.
        """
        ended = [
            output for output in outputs if output.request.sampling.routed_experts and output.finish_reason is not None
        ]
        if not ended:
            return outputs
        reads = []
        for output in ended:
            original = self._recomputed.pop(output.request.request_id, None)  # if `output` is of a second computation
            waiting = original or msgspec.structs.replace(output, version=self._scheduler.weights.version)
            if output.finish_reason not in _COMPLETE:
                self._ready([waiting if original is None else _failed(original, f"{_LOST}: {output.error}")])
            elif output.pages:
                reads.append(msgspec.structs.replace(waiting, pages=output.pages))
            else:
                self._recompute(waiting)
        if reads:
            self._read(reads)
        names = {output.request.request_id for output in ended}
        return [output for output in outputs if output.request.request_id not in names]

    def reset(self) -> None:
        """End the outputs whose tokens are computed again, with an error, because the ranks are lost."""
        for name, output in self._recomputed.items():
            self._scheduler.abort(name)
            self._ready([_failed(output, f"{_LOST}: the ranks were lost")])
        self._recomputed.clear()

    def _recompute(self, output: RequestOutput) -> None:
        """Submit the output's tokens as the prompt of another request: the original one was preempted before its last
        step, so others have its pages."""
        request = output.request
        text, name = [*request.prompt, *request.output][:-1], f"experts of {request.request_id}"
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1, prompt_logprobs=-1, grammar=None)
        again = Request(name, text, sampling, owner=request.owner, inputs=request.inputs)
        try:
            self._scheduler.submit(again, resumed=True)
        except ValueError as error:
            self._ready([_failed(output, f"{_LOST}: {error}")])
        else:
            self._recomputed[name] = output

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
