"""OpenAI's chat completions and completions: the routes, and their replies as documents and chunks."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.endpoint import Endpoint, ignore, post
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.logprobs import joined_logprobs
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer
from aerie.cluster.http.replies.streaming import DONE, TextEvents, chunk_event
from aerie.cluster.http.requests.edge_request import batch_request, chat_request, text_request
from aerie.cluster.http.schema.completions import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChunk,
    TextChoice,
    TextChunkChoice,
    TextLogprobs,
)
from aerie.cluster.http.schema.request import BatchRequest, ChatCompletionRequest, CompletionRequest, Invocation
from aerie.cluster.http.serving import Edge

ChunkChoice = ChatChunkChoice | TextChunkChoice
Chunk = ChatCompletionChunk | CompletionChunk


class OpenAIReply(Reply):
    """The parts that do not depend on the format of a choice. chunk_type: type of a stream's chunks."""

    chunk_type: ClassVar[type[ChatCompletionChunk] | type[CompletionChunk]]

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
        num_plain = len(context.answers) if context.only_text else 0
        self._text_events = [TextEvents(partial(self._text_chunk, index)) for index in range(num_plain)]

    @abstractmethod
    def _chunk_choice(self, index: int, text: str = "") -> ChunkChoice:
        """Return a choice of a chunk that has only this text."""

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        return self.piece_event(index, piece, delta) + self._finish_event(self._without_tokens(index), piece, delta)

    def _without_tokens(self, index: int) -> ChunkChoice:
        """Return a choice of a chunk beside that of its piece. Clients add up the ids of all events."""
        choice = self._chunk_choice(index)
        if self._context.request.return_token_ids:
            choice.token_ids = ()
        return choice

    def _finish_event(self, choice: ChunkChoice, piece: Piece, delta: ReplyDelta) -> bytes:
        """Return the last event of a choice, with its finish reason."""
        choice.finish_reason, choice.stop_reason = delta.finish, piece.stop_reason
        choice.matched_stop = self._context.answers[choice.index].matched_stop
        choice.weight_versions = self._context.weight_versions(choice.index)
        chunk = self._chunk(choice)
        chunk.metrics = self._context.finish_metrics()
        return chunk_event(chunk)

    def end_events(self) -> bytes:
        if not self._context.request.include_usage:
            return DONE
        chunk = self._chunk()
        chunk.usage, chunk.metrics = self._context.usage(), self._context.metrics()
        return chunk_event(chunk) + DONE

    def _plain_event(self, index: int, text: str) -> bytes:
        """Return the event of a piece that has only text."""
        return self._text_events[index].event(text) if text else b""

    def _first_event(self, choice: ChunkChoice) -> bytes:
        """Return the first event of a choice, with the prompt's tokens if the request asks for them."""
        if self._context.request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = self._context.prompt(choice.index), ()
        return chunk_event(self._chunk(choice))

    def _add_tokens(self, choice: ChunkChoice, piece: Piece) -> None:
        """Add the tokens of a piece, if the request asks for them."""
        if self._context.request.return_token_ids:
            choice.token_ids = piece.tokens
        choice.token_origins = self._context.origins(piece)

    def _echo(self, index: int) -> str:
        """Return the echoed prompt of a choice, or ""."""
        request = self._context.request
        return request.echo[request.choices[index].prompt] if request.echo else ""

    def _document_fields(self) -> dict[str, Any]:
        """Return the fields that both documents have."""
        context = self._context
        names = {"id": context.reply_id, "created": context.created, "model": context.model}
        return names | {"usage": context.usage(), "metrics": context.metrics()}

    def _choice_fields(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the fields that choices of both documents have."""
        return {
            "index": index,
            "stop_reason": piece.stop_reason,
            "matched_stop": self._context.answers[index].matched_stop,
            "token_ids": piece.tokens if self._context.request.return_token_ids else None,
            "token_origins": self._context.origins(piece),
            "weight_versions": self._context.weight_versions(index),
        }

    def _chunk(self, *choices: Any) -> Chunk:
        """Return a chunk of a stream with these choices."""
        context = self._context
        return self.chunk_type(
            id=context.reply_id,
            created=context.created,
            model=context.model,
            choices=list(choices),
            usage=context.event_usage(),
        )

    def _text_chunk(self, index: int, text: str) -> Chunk:
        return self._chunk(self._chunk_choice(index, text))


class ChatReply(OpenAIReply):
    """The reply of /v1/chat/completions."""

    chunk_type = ChatCompletionChunk
    opens_together = True  # openai (Python) numbers choices in the order of their first chunks

    def first_event(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content=self._echo(index), reasoning_content=_reasoning_content())
        return self._first_event(ChatChunkChoice(index=index, delta=delta))

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        reasoning = self._reasoning(delta)
        has_more = bool(reasoning or delta.tool_calls)
        if self._text_events and not has_more:
            return self._plain_event(index, delta.content)
        if not (delta.content or has_more or piece.tokens):
            return b""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(
                content=delta.content if delta.content or not has_more else UNSET,
                reasoning_content=_reasoning_content(reasoning, delta.content),
                reasoning=reasoning or UNSET,
                tool_calls=delta.tool_calls[:1] or UNSET,
            ),
            logprobs=self._logprobs(index, piece),
        )
        self._add_tokens(choice, piece)
        return chunk_event(self._chunk(choice)) + self._further_calls(index, delta)

    def _further_calls(self, index: int, delta: ReplyDelta) -> bytes:
        """Return the chunks of the calls after the first. Each has its own, because clients may read only a chunk's
        first call."""
        events = b""
        for call in delta.tool_calls[1:]:
            choice = self._without_tokens(index)
            assert isinstance(choice, ChatChunkChoice)
            choice.delta.tool_calls = (call,)
            events += chunk_event(self._chunk(choice))
        return events

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        context = self._context
        prompts = context.request.prompts  # a reply to several prompts has no place for them
        with_prompt = context.request.return_token_ids and len(prompts) == 1
        return msgspec.json.encode(
            ChatCompletion(
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                prompt_token_ids=prompts[0] if with_prompt else None,
                prompt_logprobs=context.prompt_logprobs(0),
                **self._document_fields(),
            )
        )

    def _choice(self, index: int, answer: WholeAnswer) -> ChatChoice:
        piece, delta, tool_calls, _ = answer
        assert delta.finish is not None
        reasoning, content = self._reasoning(delta) or None, self._echo(index) + delta.content
        return ChatChoice(
            message=AssistantMessage(
                content=content if content or not tool_calls else None,
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=tool_calls or UNSET,
            ),
            logprobs=self._logprobs(index, piece),
            finish_reason=delta.finish,
            **self._choice_fields(index, piece),
        )

    def _chunk_choice(self, index: int, text: str = "") -> ChatChunkChoice:
        delta = ChatDelta(content=text or UNSET, reasoning_content=_reasoning_content(content=text))
        return ChatChunkChoice(index=index, delta=delta)

    def _reasoning(self, delta: ReplyDelta) -> str:
        """Return the reasoning to show, or ""."""
        return delta.reasoning if self._context.request.include_reasoning else ""

    def _logprobs(self, index: int, piece: Piece) -> ChatLogprobs | None:
        request = self._context.request
        if request.logprobs < 0:
            return None
        return self._context.logprobs.chat(piece, request.choices[index].sampling.logprobs)


def _reasoning_content(reasoning: str = "", content: str = "") -> str | None | UnsetType:
    """Return `ChatDelta.reasoning_content`. Without reasoning: null, or left out if there is content."""
    return reasoning or (UNSET if content else None)


class TextReply(OpenAIReply):
    """The reply of /v1/completions."""

    chunk_type = CompletionChunk

    def first_event(self, index: int) -> bytes:
        """Return the echo of the prompt, if requested."""
        request = self._context.request
        if not request.echo and not request.return_token_ids:
            return b""
        choice = self._chunk_choice(index, self._echo(index))
        choice.logprobs = self._echo_logprobs(index)
        return self._first_event(choice)

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        if self._text_events:
            return self._plain_event(index, delta.content)
        if not delta.content and not piece.tokens:
            return b""
        return chunk_event(self._chunk(self._piece_choice(index, piece, delta)))

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        """Return the last piece and the finish reason in one event, as vLLM and SGLang do: their clients expect
        log-probabilities in every event."""
        return self._finish_event(self._piece_choice(index, piece, delta), piece, delta)

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return msgspec.json.encode(Completion(choices=choices, **self._document_fields()))

    def _choice(self, index: int, answer: WholeAnswer) -> TextChoice:
        piece, delta, *_ = answer
        assert delta.finish is not None
        logprobs, echo = self._logprobs(index, piece), self._echo_logprobs(index)
        return TextChoice(
            text=self._echo(index) + delta.content,
            logprobs=logprobs if logprobs is None or echo is None else joined_logprobs(echo, logprobs),
            finish_reason=delta.finish,
            prompt_token_ids=self._context.prompt(index) if self._context.request.return_token_ids else None,
            prompt_logprobs=self._context.prompt_logprobs(index),
            **self._choice_fields(index, piece),
        )

    def _piece_choice(self, index: int, piece: Piece, delta: ReplyDelta) -> TextChunkChoice:
        choice = self._chunk_choice(index, delta.content)
        choice.logprobs = self._logprobs(index, piece) if piece.tokens else None
        self._add_tokens(choice, piece)
        return choice

    def _chunk_choice(self, index: int, text: str = "") -> TextChunkChoice:
        return TextChunkChoice(index=index, text=text)

    def _logprobs(self, index: int, piece: Piece) -> TextLogprobs | None:
        request = self._context.request
        if request.logprobs < 0:
            return None
        return self._context.logprobs.text(piece, request.logprobs, begin=len(self._echo(index)))

    def _echo_logprobs(self, index: int) -> TextLogprobs | None:
        context, request = self._context, self._context.request
        if not request.echo_logprobs:
            return None
        scores = context.answers[index].prompt_scores
        return context.logprobs.echo(context.prompt(index), scores, self._echo(index), request.logprobs)


CHATS = "/v1/chat/completions"
CHAT_ID = "chatcmpl-{}"


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    def ignore_effort(http: Request, body: ChatCompletionRequest) -> None:
        if body.reasoning_effort not in (None, *tokenizer.efforts):
            ignore(http, config, "reasoning_effort")

    async def chat_completions(http: Request, body: ChatCompletionRequest) -> Response:
        """Continues a conversation."""
        ignore_effort(http, body)
        await edge.images.read(body.messages)
        request = await chat_request(body, config, tokenizer)
        return await edge.response(http, request, body.request_id or body.rid, ChatReply, CHAT_ID)

    async def batch(http: Request, body: BatchRequest) -> Response:
        """Continues several independent conversations, with a choice for each."""
        ignore_effort(http, body)
        for i, messages in enumerate(body.messages):
            await edge.images.read(messages, f"messages[{i}]")
        request = await batch_request(body, config, tokenizer)
        return await edge.response(http, request, body.request_id or body.rid, ChatReply, CHAT_ID)

    async def completions(http: Request, body: CompletionRequest) -> Response:
        """Continues a text."""
        request = await text_request(body, config, tokenizer)
        return await edge.response(http, request, body.request_id or body.rid, TextReply, "cmpl-{}")

    async def invocations(http: Request, body: ChatCompletionRequest | CompletionRequest) -> Response:
        """Continues a conversation or a text, whichever the body has. Hosting services (SageMaker) call this route."""
        if isinstance(body, ChatCompletionRequest):
            return await chat_completions(http, body)
        return await completions(http, body)

    chunks = (ChatCompletionChunk, CompletionChunk)
    return [
        post(CHATS, chat_completions, ChatCompletionRequest, ChatCompletion, event=ChatCompletionChunk, generates=True),
        post(f"{CHATS}/batch", batch, BatchRequest, ChatCompletion, generates=True),
        post("/v1/completions", completions, CompletionRequest, Completion, event=CompletionChunk, generates=True),
        post("/invocations", invocations, Invocation, (ChatCompletion, Completion), event=chunks, generates=True),
    ]
