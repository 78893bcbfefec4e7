"""Tokens of all requests of one ingress, as they come from coordinators, sorted into a stream for each."""

import asyncio
import logging
from array import array

import msgspec

from cluster.transport.messages import TokenBatch, TokenDelta
from workers.scheduling.plan import PromptLogprobs, TokenLogprobs

logger = logging.getLogger(__name__)


class TokenStream:
    """Tokens of one request that its reader has not taken yet: everything that arrives meanwhile is one delta, so a
    slow reader costs its own tokens' memory and no queue can overflow.

    source: the coordinator that has taken it.
    num_crashes: steps with the request that hung or crashed there.
    """

    def __init__(self) -> None:
        self.source: str | None = None
        self.num_crashes = 0
        self.changed = asyncio.Event()
        self.broken: str | None = None
        self._tokens = array("i")  # four bytes each, where a list of numbers takes 36
        self._logprobs: list[TokenLogprobs] = []
        self._of_prompt: list[PromptLogprobs] = []
        self._drafted: list[bool] = []
        self._last: TokenDelta | None = None

    def put(self, delta: TokenDelta) -> None:
        self.num_crashes = max(self.num_crashes, delta.num_crashes)
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs or ())
        self._of_prompt.extend(delta.prompt_logprobs)
        self._drafted.extend(delta.drafted)
        self._last = delta
        self.changed.set()

    def fail(self, reason: str) -> None:
        self.broken = reason
        self.changed.set()

    def take(self, request_id: str) -> TokenDelta | None:
        """Everything since the last call as one delta, or None."""
        last, self._last = self._last, None
        self.changed.clear()
        if last is None or (last.finish is None and not self._tokens and not self._of_prompt):
            return None  # nothing, or the news that it is queued
        tokens, self._tokens = tuple(self._tokens), array("i")
        logprobs, self._logprobs = tuple(self._logprobs), []
        of_prompt, self._of_prompt = tuple(self._of_prompt), []
        drafted, self._drafted = tuple(self._drafted), []
        return msgspec.structs.replace(
            last,
            request_id=request_id,
            tokens=tokens,
            logprobs=logprobs or None,
            prompt_logprobs=of_prompt,
            drafted=drafted,
        )


class TokenInbox:
    """Sorts token batches into streams and notices lost ones by their sequence numbers."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._expected: dict[str, int] = {}

    def open(self, request_id: str) -> TokenStream:
        assert request_id not in self._streams, f"request id {request_id} is in use"
        stream = self._streams[request_id] = TokenStream()
        return stream

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def deliver(self, batch: TokenBatch) -> None:
        """Hand a batch's deltas to their streams, first those that get their first one: readers run in this order, and
        an event takes each of them a tenth of a millisecond. After a gap in the sequence every stream that this source
        feeds, or might feed, is failed: its text would silently miss tokens."""
        expected = self._expected.get(batch.source, 0)
        if batch.sequence != expected:
            reason = f"token message {expected} of {batch.source} was lost (got {batch.sequence})"
            logger.error(reason)
            for waiting in self._streams.values():
                if waiting.source in (None, batch.source):
                    waiting.fail(reason)
        self._expected[batch.source] = batch.sequence + 1
        fed: list[tuple[TokenStream, TokenDelta]] = []
        for delta in batch.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None or stream.broken is not None:
                continue
            if stream.source is None:
                stream.source = batch.source
                stream.put(delta)
            else:
                fed.append((stream, delta))
        for stream, delta in fed:
            stream.source = batch.source
            stream.put(delta)
