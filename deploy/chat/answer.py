"""One answer as it comes: how its tokens came, and its figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StreamedAnswer:
    """started_s: when the request was sent, by the clock of `push`.

    content: what the history keeps. num_first: tokens of the first event, which no rate counts.
    """

    started_s: float
    content: str = ""
    num_tokens: int = 0
    num_drafted: int = 0
    num_first: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    histogram: Sequence[int] = field(default_factory=list)

    def push(self, chunk: Mapping[str, Any], now_s: float) -> Iterator[tuple[str, bool | None]]:
        """The texts that a chunk brings, each with whether it was drafted; None where the server does not say."""
        metrics = chunk.get("metrics") or {}
        self.histogram = metrics.get("speculative_decoding", {}).get("acceptance_histogram", self.histogram)
        for choice in chunk["choices"]:
            content = choice["delta"].get("content") or ""
            self.content += content
            origins = choice.get("token_origins")
            if origins is None:
                if content:
                    yield content, None
                continue
            if origins:
                self._count(len(origins), now_s)
            for origin in origins:
                self.num_drafted += origin["drafted"]
                yield origin["text"], origin["drafted"]

    def _count(self, num_tokens: int, now_s: float) -> None:
        if self.num_tokens == 0:
            self.first_s, self.num_first = now_s, num_tokens
        self.num_tokens += num_tokens
        self.last_s = now_s

    def figures(self) -> str:
        """One line."""
        if self.num_tokens == 0:
            return "no tokens"
        parts = [f"{self.num_tokens} tokens, {self.num_drafted} drafted"]
        if self.last_s > self.first_s:
            parts.append(f"{(self.num_tokens - self.num_first) / (self.last_s - self.first_s):.1f} tokens/s")
        parts.append(f"first after {1000 * (self.first_s - self.started_s):.0f} ms")
        num_rounds = sum(self.histogram)
        if num_rounds:
            accepted = sum(k * count for k, count in enumerate(self.histogram))
            shares = [sum(self.histogram[k:]) / num_rounds for k in range(1, len(self.histogram))]
            parts.append(f"{1 + accepted / num_rounds:.2f} tokens a round")
            parts.append("accepted by position " + " ".join(f"{share:.0%}" for share in shares))
        return " · ".join(parts)
