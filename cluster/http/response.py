"""What clients receive: OpenAI's documents and stream events, from the pieces of `cluster.http.answer`.

A stream's events are cheap: what is the same for all events of a choice is encoded once per request, and an event is a
join of bytes around the encoded text.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.http.answer import Answer, Piece
from cluster.http.logprobs import chat_logprobs, text_logprobs
from cluster.http.request import EdgeRequest
from cluster.http.tokenizer import ChatTokenizer
from cluster.transport.messages import SpeculationStats

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


class Replies:
    """Builds the replies to one request. answers: one per choice, in order; whoever drives the request advances them.

    created: Unix seconds.
    """

    def __init__(
        self,
        request: EdgeRequest,
        answers: Sequence[Answer],
        reply_id: str,
        created: int,
        model: str,
        tokenizer: ChatTokenizer,
    ) -> None:
        self._request = request
        self._answers = answers
        self._tokenizer = tokenizer
        self._kind = "chat.completion" if request.chat else "text_completion"
        self._head = {"id": reply_id, "created": created, "model": model}
        head = encode({"object": "chat.completion.chunk" if request.chat else self._kind} | self._head)
        self._event_head = b"data: " + head.removesuffix(b"}")
        self._usage_null = b',"usage":null' if request.include_usage else b""
        # An event that carries nothing but text is these two around it.
        self._plain = not (request.return_token_ids or request.continuous_usage or request.logprobs >= 0)
        text_field = b'"delta":{"content":' if request.chat else b'"text":'
        self._before_text = [
            b'%s,"choices":[{"index":%d,%s' % (self._event_head, i, text_field) for i in range(len(answers))
        ]
        self._after_text = b'%s,"logprobs":null,"finish_reason":null}]%s}\n\n' % (
            b"}" if request.chat else b"",
            self._usage_null,
        )

    def first_event(self, index: int) -> bytes:
        """What a choice's stream begins with: the role of a chat's answer, the echo of a completion's prompt."""
        request = self._request
        prompt = request.choices[index].prompt
        extra = {"prompt_token_ids": request.prompts[prompt]} if request.return_token_ids else {}
        if request.chat:
            content: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        elif request.echo or extra:
            content = {"text": request.echo[prompt] if request.echo else ""}
        else:
            return b""
        return self._event(index, content | {"logprobs": None, "finish_reason": None} | extra)

    def piece_event(self, index: int, piece: Piece) -> bytes:
        """The event of a piece, b"" if it has nothing to show yet."""
        if self._plain:
            return b"".join((self._before_text[index], encode(piece.text), self._after_text)) if piece.text else b""
        if not piece.text and not piece.tokens:
            return b""
        choice: dict[str, Any] = {"delta": {"content": piece.text}} if self._request.chat else {"text": piece.text}
        choice |= {"logprobs": self._logprobs(piece, index), "finish_reason": None}
        if self._request.return_token_ids:
            choice["token_ids"] = piece.tokens
        return self._event(index, choice)

    def finish_event(self, index: int) -> bytes:
        """The last event of a choice; it carries the request's speculation statistics unless a usage event follows."""
        answer = self._answers[index]
        choice: dict[str, Any] = {"delta": {}} if self._request.chat else {"text": ""}
        choice |= {"logprobs": None, "finish_reason": answer.finish, "stop_reason": answer.stop_reason}
        return self._event(index, choice, {} if self._request.include_usage else self._metrics())

    def usage_event(self) -> bytes:
        """The event in front of [DONE] for `stream_options.include_usage`."""
        return self._raw_event(encode([]), {"usage": self.usage()} | self._metrics())

    def document(self, pieces: Sequence[Piece]) -> bytes:
        """The whole reply to a request that does not stream. pieces: one per choice, each a whole answer."""
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        body = {"object": self._kind} | self._head | {"choices": choices, "usage": self.usage()} | self._metrics()
        if self._request.chat and self._request.return_token_ids:
            body["prompt_token_ids"] = self._request.prompts[0]
        return encode(body)

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many choices it has; cached_tokens is left out while it is not
        known."""
        request = self._request
        num_prompt = sum(map(len, request.prompts))
        num_output = sum(answer.num_tokens for answer in self._answers)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        n = len(request.choices) // len(request.prompts)
        cached = [answer.cached_tokens for answer in self._answers[::n]]
        known = [tokens for tokens in cached if tokens is not None]
        if len(known) == len(cached):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(known)}
        return usage

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        request = self._request
        prompt = request.choices[index].prompt
        choice: dict[str, Any] = {"index": index}
        if request.chat:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            choice["text"] = request.echo[prompt] + piece.text if request.echo else piece.text
        choice |= {
            "logprobs": self._logprobs(piece, index),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = piece.tokens
            if not request.chat:
                choice["prompt_token_ids"] = request.prompts[prompt]
        return choice

    def _logprobs(self, piece: Piece, index: int) -> dict[str, Any] | None:
        if self._request.logprobs < 0:
            return None
        form = chat_logprobs if self._request.chat else text_logprobs
        return form(piece, self._request.choices[index].sampling.logprobs, self._tokenizer)

    def _metrics(self) -> dict[str, Any]:
        """Statistics of speculation, where they are one request's: for a single choice."""
        stats = self._answers[0].speculation
        if len(self._answers) != 1 or stats is None or stats.num_rounds == 0:
            return {}
        return {"metrics": {"speculative_decoding": speculation_metrics(stats)}}

    def _event(self, index: int, choice: dict[str, Any], root: dict[str, Any] | None = None) -> bytes:
        root = dict(root or {})
        if self._request.continuous_usage:
            root["usage"] = self.usage()
        elif self._request.include_usage:
            root["usage"] = None
        return self._raw_event(encode([{"index": index} | choice]), root)

    def _raw_event(self, choices: bytes, root: dict[str, Any]) -> bytes:
        tail = b"," + encode(root).removeprefix(b"{") if root else b"}"
        return b"".join((self._event_head, b',"choices":', choices, tail, b"\n\n"))


def speculation_metrics(stats: SpeculationStats) -> dict[str, Any]:
    """The fields that vLLM's clients and AIPerf read. Mean length = 1 + accepted / rounds: every round emits one token
    of the target's own."""
    num_accepted = sum(count * accepted for accepted, count in enumerate(stats.histogram))
    num_drafted = stats.num_rounds * stats.num_draft_tokens
    return {
        "mean_acceptance_length": 1.0 + num_accepted / stats.num_rounds,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": stats.histogram,
        "num_spec_steps": stats.num_rounds,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": stats.num_draft_tokens,
    }
