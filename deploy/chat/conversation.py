"""A conversation, and the requests for its answers."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)

HELP = """/spec on|off   speculation
/temp NUMBER   temperature, 0 is greedy
/max N         most tokens of an answer, 0: as many as fit
/seed N        of sampling
/system TEXT   what the model is told first; without TEXT: nothing
/clear         forget what was said
/help, /quit   Ctrl-C stops an answer, Ctrl-D leaves"""


class CommandError(ValueError):
    """A line that cannot be carried out; the message says why."""


@dataclass
class Conversation:
    """speculative, temperature, max_tokens (0: as many as fit), seed: of the answers to come."""

    model: str
    speculative: bool = True
    temperature: float = 0.0
    max_tokens: int = 0
    seed: int = 1
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self, prompt: str) -> dict[str, Any]:
        """The chat request that asks for an answer to `prompt`."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*first, *self.messages, {"role": "user", "content": prompt}],
            "temperature": self.temperature,
            "seed": self.seed,
            "speculative": self.speculative,
            "return_token_origins": True,
        }
        return body | ({"max_tokens": self.max_tokens} if self.max_tokens else {})

    def keep(self, prompt: str, answer: str) -> None:
        """Add a prompt and its answer to the conversation."""
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; returns what to show. Raises CommandError."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/help":
            return HELP
        if name == "/clear":
            self.messages.clear()
            return "forgotten"
        if name == "/system":
            self.system = value
            return "the model is told this first" if value else "the model is told nothing first"
        if name == "/spec":
            if value not in ("on", "off"):
                raise CommandError("/spec: on or off")
            self.speculative = value == "on"
            return f"speculation is {value}"
        if name == "/temp":
            self.temperature = _number(line, float, 0, 2)
            return f"temperature is {self.temperature:g}"
        if name == "/max":
            self.max_tokens = _number(line, int, 0, 2**31 - 1)
            return f"at most {self.max_tokens} tokens" if self.max_tokens else "as many tokens as fit"
        if name == "/seed":
            self.seed = _number(line, int, -(2**63), 2**63 - 1)
            return f"seed is {self.seed}"
        raise CommandError(f"{name}: no such command; /help lists them")


def _number(line: str, kind: type[Number], least: float, most: float) -> Number:
    name, _, value = line.partition(" ")
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise CommandError(f"{name}: a number from {least:g} to {most:g}")
    return number
