"""Which loads and unloads of LoRA adapters an ingress repeats, and how an engine takes repeated ones."""

import asyncio
import contextlib

import pytest

from aerie.cluster.ingress import adapter_changes
from aerie.cluster.ingress.adapter_changes import AdapterChanges, repeat_changes
from aerie.cluster.ingress.routing import EngineView
from aerie.cluster.transport.admin import AdminCall, AdminOutcome, LoadLora, UnloadLora
from aerie.cluster.transport.messages import AdapterState, EngineState
from aerie.workers.config import LoraConfig
from aerie.workers.scheduling.adapters import AdapterChange, Adapters
from aerie.workers.scheduling.commands.command import AdapterReads, CommandAnswer
from aerie.workers.scheduling.commands.command_queue import CommandQueue


def view(adapters: dict[str, str], changes: dict[str, AdapterChange], status: str = "ready") -> EngineView:
    found = EngineView()
    states = {name: AdapterState(path, 0) for name, path in adapters.items()}
    found.update(EngineState("e", status, adapters=states, adapter_changes=changes), 0.0)
    return found


def test_the_newest_change_of_any_engine_is_repeated_for_those_that_lack_it() -> None:
    changes = AdapterChanges()
    old = view({"a": "/a", "b": "/b"}, {"b": AdapterChange(5, "/b"), "c": AdapterChange(7, "")})
    late = view({"a": "/a", "c": "/c"}, {"c": AdapterChange(3, "/c")})
    starting = view({}, {}, "starting")
    for each in (late, old, starting):
        changes.update(each)
    assert changes.loaded([old, late]) == {"a": "/a", "b": "/b"}
    assert changes.lacking([old, starting]) == []
    assert changes.lacking([old, late]) == [LoadLora("b", "/b", True, 5), UnloadLora("c", 7)]
    assert changes.loaded([]) == {"b": "/b"}, "also once all engines that had it are lost"
    ahead = view({}, {"b": AdapterChange(2**62, "")})
    changes.update(ahead)
    assert changes.stamped(LoadLora("b", "/x")) == LoadLora("b", "/x", stamp=2**62 + 1), "its clock was ahead"


async def test_a_change_that_an_engine_refuses_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_changes, "PERIOD_S", 0.01)
    call, asked, outcome = LoadLora("b", "/b", True, 5), list[AdminCall](), [AdminOutcome("a", error="gone")]

    class Engines:
        async def administer(self, call: AdminCall) -> list[AdminOutcome]:
            asked.append(call)
            if len(asked) == 1:
                raise RuntimeError("a search that failed")
            return outcome

    for retry_s, most in ((30.0, 1), (0.0, 100)):
        monkeypatch.setattr(adapter_changes, "RETRY_S", retry_s)
        asked.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await repeat_changes(lambda: [call], Engines())
        assert 1 <= len(asked) <= most and (retry_s or len(asked) > 1)


def answer(commands: CommandQueue, ended: dict[int, str]) -> None:
    """Carry out the next command."""
    command = commands.next(0, 0)
    commands.answered([CommandAnswer(0, 0, 0, AdapterReads(ended))])
    assert command.work


def test_repeated_and_overtaken_calls_change_nothing() -> None:
    commands, errors = CommandQueue(), list[str]()
    now = 0.0
    adapters = Adapters(LoraConfig({"a": "/a"}), commands, lambda: now)
    for stamp in (5, 5, 4):
        adapters.load("b", "/b", errors.append, replace=True, stamp=stamp)
    assert errors == ["", ""], "only the first is read"
    answer(commands, {})
    now = 1.0
    adapters.poll()
    answer(commands, {1: ""})
    assert errors == [""] * 3 and [each.name for each in adapters.loaded] == ["a", "b"] and commands.is_empty
    adapters.unload("b", 4)
    assert adapters.changes == {"b": AdapterChange(5, "/b")}
    for stamp in (6, 6):
        adapters.unload("b", stamp)
    adapters.unload("a", 7)
    assert adapters.changes == {"b": AdapterChange(6, ""), "a": AdapterChange(7, "")} and not adapters.loaded
    adapters.load("b", "/b", errors.append, stamp=6)
    assert not adapters.is_loading
    for i in range(1000):
        with pytest.raises(ValueError, match="is not loaded"):
            adapters.unload(f"{i}", 8)
    assert len(adapters.changes) < 300 and "a" in adapters.changes, "an adapter of the configuration stays unloaded"
