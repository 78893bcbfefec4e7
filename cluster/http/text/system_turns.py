"""Where a chat template shows system messages, found by rendering trial conversations, and turns of that form.

Coding agents send several system messages at the beginning (Codex) and more between later turns (Claude Code). Some
templates refuse these; others leave them out, or put them first, which changes the prompt's beginning at every turn.
Used by `aerie.cluster.http.text.chat_template`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.cluster.http.text.template_facts import Message, Rendering, call_turn

_FIRST, _SECOND = "Aerie's first text.", "Aerie's second text."  # nothing else in a trial's prompt contains them
_RESULT: Message = {"role": "tool", "tool_call_id": "aerie0001", "name": "aerie_look_up", "content": _FIRST}


@dataclass(frozen=True)
class SystemTurns:
    """What the template shows.

    developer: messages of the role "developer" at the beginning, which else become system messages.
    first: a system message at the beginning. several: two of them. late: one after other turns, in its place.
    users: two user turns in a row. after_result: a user turn after a tool's result.
    """

    developer: bool = False
    first: bool = True
    several: bool = True
    late: bool = True
    users: bool = True
    after_result: bool = True

    def of(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the turns in a form that the template shows: a system message that it would not show becomes a user
        turn in its place, or a part of the turn before."""
        found: list[dict[str, Any]] = []
        for turn in turns:
            if turn["role"] == "developer" and not self.developer:
                turn = {**turn, "role": "system"}
            last = found[-1] if found else {"role": ""}
            is_leading = last["role"] in ("", "system") and (len(found) < 2 or found[-2]["role"] == "system")
            if turn["role"] == "system" and not (self.first if is_leading else self.late):
                turn = {**turn, "role": "user"}
            joins = {
                "system": is_leading and last["role"] == "system" and not self.several,
                "user": (last["role"] == "user" and not self.users)
                or (last["role"] == "tool" and not self.after_result),
            }
            if joins.get(turn["role"], False):
                found[-1] = {**last, "content": f"{last['content']}\n\n{turn['content']}"}
            else:
                found.append(turn)
        return found


def system_turns(rendered: Rendering, names_developer: bool) -> SystemTurns:
    """Return where the template shows system messages; all, if it refuses a lone user turn. names_developer: whether
    the template names this role, because many write any role into the prompt."""

    def shows(*turns: Message) -> bool:
        prompt = rendered(turns, (), {}, False) or ""
        return _FIRST in prompt and prompt.find(_SECOND) > prompt.find(_FIRST)

    def turn(role: str, content: str) -> Message:
        return {"role": role, "content": content}

    user, later = turn("user", _FIRST), turn("user", _SECOND)
    if not shows(user, turn("assistant", _SECOND)):
        return SystemTurns()
    first = shows(turn("system", _FIRST), later)
    begin = (turn("system", "Help."),) if first else ()
    late = turn("system", _SECOND)
    called = (*begin, turn("user", "Hello"), call_turn(""))
    answered = _any_shows(rendered, (*called, _RESULT))
    return SystemTurns(
        developer=names_developer
        and shows(turn("developer", _FIRST), turn("developer", _SECOND), turn("user", "Hello")),
        first=first,
        several=shows(turn("system", _FIRST), late, turn("user", "Hello")),
        late=shows(*begin, user, late) and (not answered or shows(*called, _RESULT, late)),
        users=shows(*begin, user, later),
        after_result=not answered or shows(*called, _RESULT, later),
    )


def _any_shows(rendered: Rendering, turns: Iterable[Message]) -> bool:
    """Return whether the template shows a tool's result."""
    return _FIRST in (rendered(tuple(turns), (), {}, False) or "")
