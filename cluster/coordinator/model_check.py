"""Checks that the model still computes finite numbers. After a request with NaN or infinite logits, the engine requests
one token from the ranks until it gets one. So `/health` distinguishes broken weights from one unusual request."""

import logging
import math
from collections.abc import Sequence

from aerie.workers.scheduling.plan import NOT_FINITE, SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # between two checks of a model that has failed one
PROMPT_TOKENS = 8
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

    def saw(self, outputs: Sequence[RequestOutput], now: float) -> None:
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

    def turn(self, now: float) -> None:
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
