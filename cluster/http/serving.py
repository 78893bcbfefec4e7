"""Runs one generation request: runs its choices on the engine, sends the reply, and stops when the client disconnects.

The first delta fixes the reply's status. An error before it has a status of its own; after it, a stream ends with an
error event.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aerie.cluster.http.admission import Admission
from aerie.cluster.http.answer import Answer, EngineFailedError, Piece, RequestInvalidError, joined, without_tokens
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import ignore
from aerie.cluster.http.engine_client import EngineClient, EngineRefused
from aerie.cluster.http.errors import (
    JSON_HEADERS,
    ApiError,
    engine_failed,
    internal,
    invalid,
    model_not_found,
    refused,
    timed_out,
)
from aerie.cluster.http.metrics import CLIENT_LEFT, RequestCounts, RequestTokens, reason_of, set_reason, set_tokens
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.parsers.output_parser import HeldReasoning, ReplyDelta, joined_deltas
from aerie.cluster.http.parsers.reasoning import ReasoningTokens, within_budget
from aerie.cluster.http.parsers.table import MarkedParser, parser_of_prompt
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer
from aerie.cluster.http.replies.streaming import STREAM_HEADERS
from aerie.cluster.http.requests.edge_request import EdgeRequest
from aerie.cluster.http.requests.grammar_checker import GrammarChecker
from aerie.cluster.http.requests.image_reader import ImageReader
from aerie.cluster.http.tenants import Tenant, tenant_of
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.tracing import RequestTrace, Tracing
from aerie.cluster.start_log import request_id
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.request import Owner

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_LEARN_HEADER = "x-aerie-no-learn"  # sent with requests whose texts no draft may learn from

Emit = Callable[[int, Piece, ReplyDelta], Awaitable[None]]  # arguments: choice, piece, and its parsed delta


@dataclass(frozen=True)
class Edge:
    """Objects shared by all requests of one ingress."""

    config: EdgeConfig
    tokenizer: ChatTokenizer
    engine: EngineClient
    admission: Admission
    grammars: GrammarChecker = GrammarChecker()  # noqa: RUF009 - has no state
    counts: RequestCounts = field(default_factory=RequestCounts)
    tracing: Tracing = Tracing()  # noqa: RUF009 - has no state
    images: ImageReader = ImageReader()  # noqa: RUF009 - has no state

    async def response(
        self,
        http: Request,
        request: EdgeRequest,
        own_id: str | None,
        reply_form: Callable[[ReplyContext], Reply],
        reply_id: str,
        restate: Callable[[ApiError], ApiError] = lambda error: error,
    ) -> "GenerationResponse":
        """Return the response to `request`, after a check of its adapter and grammars. Raises ApiError.

        own_id: id of the request in the client's body; replaces that of the header.
        reply_id: "{}" in it stands for the request's id.
        The other arguments are those of `GenerationResponse`."""
        adapters = {choice.sampling.adapter for choice in request.choices} - {""}
        if unknown := adapters - (self.engine.adapters().keys() if adapters else set()):
            raise model_not_found(unknown.pop(), self.config.served_model_name)
        for grammar, param in request.grammars.items():
            await self.grammars.check(grammar, param)
        if own_id is not None:
            http.state.request_id = own_id
            request_id.set(own_id)
        name: str = http.state.request_id
        tenant = tenant_of(http.scope)
        if request.priority and tenant.owner(request.priority).priority != request.priority:
            ignore(http, self.config, "priority")
        owner = tenant.owner(request.priority, name, NO_LEARN_HEADER not in http.headers)
        return GenerationResponse(self, request, reply_form, reply_id.format(name), owner, tenant, restate)


class GenerationResponse(Response):
    """The reply to `request`.

    reply_form: builds replies in the endpoint's format.
    reply_id: id in the reply, which the client may have chosen.
    owner: its tenant for the engine, with the client's id of the request.
    tenant: whose request it is.
    restate: converts errors to the endpoint's format.
    """

    def __init__(
        self,
        edge: Edge,
        request: EdgeRequest,
        reply_form: Callable[[ReplyContext], Reply],
        reply_id: str,
        owner: Owner,
        tenant: Tenant,
        restate: Callable[[ApiError], ApiError] = lambda error: error,
    ) -> None:
        self._restate = restate
        self.background = None
        self._edge = edge
        self._request = request
        self._engine_id = f"{reply_id.partition('-')[0]}-{uuid.uuid4().hex}"  # unique
        self._request_id, self._owner = owner.request_id, owner
        self._tenant = tenant
        self._answers = [_answer(edge.tokenizer, request, i) for i in range(len(request.choices))]
        self._parsers = [parser_of_prompt(request, choice.prompt, edge.tokenizer) for choice in request.choices]
        self._reasoning_tokens = [ReasoningTokens() for _ in request.choices]
        self._held = [HeldReasoning() for _ in request.choices]
        self._reply = reply_form(
            ReplyContext(request, self._answers, reply_id, int(time.time()), self._model_name, edge.tokenizer)
        )
        self._started = False
        self._trace: RequestTrace | None = None

    @property
    def _model_name(self) -> str:
        return self._request.choices[0].sampling.adapter or self._edge.config.served_model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._edge.counts.choices.observe(len(self._request.choices) / max(1, len(self._request.prompts)))
        self._trace = self._edge.tracing.begin(scope, self._request, self._request_id)
        work = asyncio.ensure_future(self._respond(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left_early = not work.done()
            await _cancel((work, gone))
        set_tokens(scope, self._tokens())
        if left_early:
            set_reason(scope, CLIENT_LEFT)
            logger.info("request %s: the client left", self._request_id)
        if self._trace is not None:
            self._trace.end(self._answers, self._model_name, reason_of(scope))
        if not left_early:
            work.result()

    def _tokens(self) -> RequestTokens:
        """Return the numbers of tokens of all choices; prompts count once."""
        answers, request = self._answers, self._request
        by_prompt = {choice.prompt: own_answer for choice, own_answer in zip(request.choices, answers, strict=True)}
        cached = sum(answer.cached_tokens or 0 for answer in by_prompt.values())
        finish = ",".join(answer.finish or "" for answer in answers)
        return RequestTokens(
            sum(map(len, request.prompts)), cached, sum(own_answer.num_tokens for own_answer in answers), finish
        )

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request within the limits of admission and tenant, and send the reply or the error."""
        try:
            size = len(self._request.choices), sum(map(len, self._request.prompts))
            with self._edge.admission.enter(*size, self._request.num_input_bytes), self._tenant.limits.enter(*size):
                await (self._stream(send) if self._request.stream else self._whole(scope, receive, send))
        except Exception as raised:
            error = raised if isinstance(raised, ApiError) else internal(self._request_id)
            if error is not raised:  # after the answer, during the creation of a document or the usage
                logger.exception("request %s: unexpected", self._request_id)
            set_reason(scope, error.code)
            if self._started:
                await send(_body(self._reply.error_event(error), more=False))
            else:
                await self._restate(error).response()(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send the events of a stream. Raises ApiError."""
        reply = self._reply
        lock = asyncio.Lock()  # several choices send concurrently; headers must go first
        unopened = list(range(len(self._answers)))

        async def emit(index: int, piece: Piece, delta: ReplyDelta) -> None:
            """Send the events of a piece, after the first event of its choice and, for the first piece, the reply's
            start."""
            async with lock:
                events = b""
                for choice_index in [i for i in unopened if i == index or reply.opens_together]:
                    unopened.remove(choice_index)
                    events += await self._built(reply.first_event, choice_index)
                events += (reply.piece_event if piece.finish is None else reply.finish_event)(index, piece, delta)
                if not self._started:
                    await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
                    self._started = True
                if events:
                    await send(_body(events, more=True))

        await self._generate(emit)
        await send(_body(reply.end_events(), more=False))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the document. Raises ApiError."""
        pieces: list[list[Piece]] = [[] for _ in self._answers]
        deltas: list[list[ReplyDelta]] = [[] for _ in self._answers]

        async def keep(index: int, piece: Piece, delta: ReplyDelta) -> None:
            pieces[index].append(piece)
            deltas[index].append(delta)

        await self._generate(keep)
        whole = [
            WholeAnswer(joined(piece), *joined_deltas(delta), list(zip(piece, delta, strict=True)))
            for piece, delta in zip(pieces, deltas, strict=True)
        ]
        document = await self._built(self._reply.document, whole)
        await Response(document, 200, JSON_HEADERS)(scope, receive, send)

    async def _built(self, build: Callable[[T], bytes], argument: T) -> bytes:
        """Return build(argument). Runs in a thread if the reply has log-probabilities of a prompt: building these takes
        up to a second, and would stop all other streams."""
        return await asyncio.to_thread(build, argument) if self._request.scores_prompt else build(argument)

    async def _generate(self, emit: Emit) -> None:
        """Run all choices to their ends. A failure becomes an ApiError after all choices are aborted."""
        limit_s = self._edge.config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                await _all([self._run_choice(i, emit) for i in range(len(self._answers))])
        except EngineRefused as refusal:
            raise refused(refusal.refusal, "messages" if self._request.chat else "prompt") from None
        except RequestInvalidError as fault:
            logger.info("request %s ended: %s", self._request_id, fault)
            raise invalid(None, f"The request cannot be answered: {fault}", "unanswerable_request") from None
        except EngineFailedError as failure:
            logger.error("request %s: the engine failed: %s", self._request_id, failure)
            raise engine_failed(self._request_id, failure.shown) from None
        except Exception:
            if deadline.expired():
                assert limit_s is not None
                raise timed_out(limit_s) from None
            logger.exception("request %s: unexpected", self._request_id)
            raise internal(self._request_id) from None

    async def _run_choice(self, index: int, emit: Emit) -> None:
        """Run one choice to its end. If a stop string ends it before the engine does, the engine's request is
        aborted."""
        answer, choice = self._answers[index], self._request.choices[index]
        deltas = self._deltas(index)
        trace = self._trace
        if trace is not None:
            trace.begin(index)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if trace is not None:
                    trace.push(index, delta)
                self._tenant.limits.spend(len(delta.tokens))
                piece = answer.push(without_tokens(delta) if choice.form.echo_only else delta)
                if delta.prompt_logprobs and piece.finish is None and not piece.tokens:
                    continue
                if piece.finish is not None:
                    break
                await emit(index, piece, self._parsed(index, piece))
            else:
                raise EngineFailedError("the engine's stream ended without a finish reason")
        await emit(index, piece, self._parsed(index, piece))

    def _deltas(self, index: int) -> AsyncGenerator[TokenDelta, None]:
        """Return the engine's deltas of one choice."""
        request, choice = self._request, self._request.choices[index]
        prompt, budget = request.prompts[choice.prompt], request.thinking_budget
        # A stop string or the budget may end an answer at any delta.
        running_stats = bool(choice.form.stops) or budget is not None
        inputs = request.inputs[choice.prompt] if request.inputs else None
        salt = self._tenant.cache_salt(choice.sampling.cache_salt)
        sampling = msgspec.structs.replace(choice.sampling, cache_salt=salt)

        def generate(output: Sequence[int] = ()) -> AsyncGenerator[TokenDelta, None]:
            name = f"{self._engine_id}-{index}" + ("-2" if output else "")
            origins = request.return_token_origins
            return self._edge.engine.generate(
                prompt, sampling, name, running_stats, origins, output, self._owner, inputs
            )

        parser = self._parsers[index]
        if budget is None or not isinstance(parser, MarkedParser) or parser.reasoning is None:
            return generate()
        return within_budget(generate, budget, parser.reasoning, request.logprobs >= 0)

    def _parsed(self, index: int, piece: Piece) -> ReplyDelta:
        """Return the parsed delta of a piece."""
        delta = self._parsers[index].push(piece)
        if self._request.chat:
            counted = self._reasoning_tokens[index]
            counted.push(delta, map(self._edge.tokenizer.token_bytes, piece.tokens))
            self._answers[index].num_reasoning_tokens = counted.num
        return delta if self._request.stream_reasoning else self._held[index].push(delta)


def _answer(tokenizer: ChatTokenizer, request: EdgeRequest, index: int) -> Answer:
    """Return the state of choice `index`'s answer, which turns tokens into text."""
    choice = request.choices[index]
    before: Sequence[int] = () if request.chat else request.prompts[choice.prompt]
    return Answer(
        tokenizer.detokenizer(choice.form.skip_special_tokens, before, FAMILIES[request.output_parser].marks),
        choice.form.stops,
        choice.form.include_stop,
        choice.sampling.min_tokens,
        choice.form.eos_token_ids,
    )


def _body(content: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _all(choices: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; if one fails, cancel the others, wait until they have ended, and raise its exception."""
    if len(choices) == 1:
        return await choices[0]
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence["asyncio.Future[None]"]) -> None:
    """Cancel all, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
