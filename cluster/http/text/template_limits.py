"""A sandbox for chat templates with limits of time and size, because a template is code of a checkpoint that runs on
data of requests.

Limits are checked at every iteration of a loop, every call, and every joined or repeated text.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2.nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 2**25  # characters of a rendered chat and of any intermediate text: four times the largest body


class TemplateLimitError(Exception):
    """A template exceeded a limit. The message may be shown to the client."""


class TemplateTimeError(TemplateLimitError):
    """The template exceeded its time limit."""


@dataclass(frozen=True)
class _Limit:
    seconds: float
    deadline_s: float


_limit: ContextVar[_Limit] = ContextVar("limit of the chat template that is rendered in this context")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the time of templates rendered within the context, which raise TemplateTimeError."""
    token = _limit.set(_Limit(seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Templates must be rendered within `time_limit`."""

    intercepted_binops = frozenset(("+", "*"))
    concat = staticmethod(lambda pieces: _joined(pieces))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {"_watched": _Watched, "_sized": _sized}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = self._filtered(loop.iter, "_watched")
        for concat in list(tree.find_all(jinja2.nodes.Concat)):
            inner = jinja2.nodes.Concat(concat.nodes, lineno=concat.lineno, environment=self)
            concat.nodes = [self._filtered(inner, "_sized")]
        return tree

    def _filtered(self, node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
        return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also allow what Kimi-K2's template does with its own lists: to append and to take out entries."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` as the sandbox does, within the time limit."""
        _check_time()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute as Python does, up to `MAX_CHARS`."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    _check_size(len(sequence) * times)
        return _sized(super().call_binop(context, operator, left, right))


def _joined(pieces: Iterable[str]) -> str:
    """Join the output of a template, a macro or a block."""
    found, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        _check_size(num_chars)
        found.append(piece)
    return "".join(found)


class _Watched:
    """The iterable of a template's loop, which counts its steps."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _check_time()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a loop asks, and counts by itself after a TypeError


def _sized(value: Any) -> Any:
    if isinstance(value, str):
        _check_size(len(value))
    return value


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateLimitError(
            f"the model's chat template makes more than {MAX_CHARS} characters of these messages; send fewer or "
            "shorter ones"
        )


def _check_time() -> None:
    limit = _limit.get()
    if time.monotonic() > limit.deadline_s:
        raise TemplateTimeError(
            f"the model's chat template takes more than {limit.seconds:g} s for these messages; send fewer or shorter "
            "ones"
        )
