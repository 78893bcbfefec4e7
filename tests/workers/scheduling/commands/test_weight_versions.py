"""Updates of weights as the scheduler knows them: their number in the keys of cached pages, and what new ranks get."""

from collections.abc import Sequence

from aerie.workers.scheduling.commands.command import (
    CommandAnswer,
    Folder,
    LoadedWeights,
    LoadWeights,
    NamedTensor,
    Tensors,
    first_error,
)
from tests.support.simulation.scheduler import Simulation

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
SENT = Tensors((NamedTensor("model.norm.weight", "float32", (1,), bytes(4)),))


def answer_next(sim: Simulation, missing: dict[str, tuple[str, ...]] | None = None, error: str = "") -> LoadWeights:
    """Answer the next command, and return its work. missing: names by model; none without."""
    while (command := sim.scheduler.next_command()) is None:
        assert sim.backlog, "there is no command"
        sim.read()
    assert isinstance(command.work, LoadWeights)
    result = LoadedWeights(dict.fromkeys(command.work.sources, ()) | (missing or {}))
    answer = CommandAnswer(command.epoch, command.step, 0, None if error else result, error)
    sim.scheduler.command_answered([answer])
    return command.work


def update(sim: Simulation, work: LoadWeights, missing: dict[str, tuple[str, ...]] | None = None) -> None:
    sim.scheduler.weights.load(work, lambda answers: None)
    assert answer_next(sim, missing) == work


def new_ranks(sim: Simulation, epoch: int) -> None:
    sim.new_worker_group(epoch)
    sim.scheduler.weights.restore()


def test_pages_of_other_weights_are_neither_found_nor_shared_with_running_requests() -> None:
    sim = Simulation()
    first = sim.submit(PROMPT, max_tokens=30)
    sim.step()
    update(sim, LoadWeights(Folder("b")))
    beside = sim.submit(PROMPT, max_tokens=3, seed_of=first)
    sim.finish()
    after = [sim.submit(PROMPT, max_tokens=3, seed_of=first)]
    sim.finish()
    update(sim, LoadWeights(draft=Folder("c")))
    after += [sim.submit(PROMPT, max_tokens=3, seed_of=first) for _ in range(2)]
    sim.run()
    assert first.cached_tokens == beside.cached_tokens == 0, "the first one's pages are of the weights before"
    assert [request.cached_tokens > 0 for request in after] == [True, False, True]


def test_a_failed_update_counts_for_nothing() -> None:
    sim, answered = Simulation(), list[Sequence[CommandAnswer]]()
    sim.scheduler.weights.load(LoadWeights(Folder("b")), answered.append)
    answer_next(sim, error="no such file")
    assert first_error(answered[0]) == "no such file" and sim.scheduler.weights.epoch == 0
    new_ranks(sim, 1)
    assert sim.scheduler.next_command() is None and not sim.scheduler.weights.fault


def test_new_ranks_get_the_updates_since_the_last_whole_one_before_any_step() -> None:
    sim = Simulation()
    update(sim, LoadWeights(Folder("a")), {"target": ("x",)})
    update(sim, LoadWeights(Folder("b"), Folder("d")))
    update(sim, LoadWeights(Folder("c")), {"target": ("y",)})
    epoch = sim.scheduler.weights.epoch
    request = sim.submit(PROMPT, max_tokens=5)
    sim.step()
    new_ranks(sim, 1)
    assert sim.schedule() is None, "no step runs with the weights of the start"
    works = [answer_next(sim) for _ in range(3)]
    assert works == [LoadWeights(Folder("b")), LoadWeights(Folder("c")), LoadWeights(draft=Folder("d"))]
    assert sim.scheduler.next_command() is None and sim.scheduler.weights.epoch > epoch
    assert not sim.scheduler.weights.fault
    sim.run()
    sim.check_output(request)


def test_weights_that_cannot_be_restored_are_a_fault_until_whole_ones_come() -> None:
    sim = Simulation()
    update(sim, LoadWeights(SENT), {"target": ("x",)})
    new_ranks(sim, 1)
    assert "came in messages" in sim.scheduler.weights.fault and sim.scheduler.next_command() is None
    update(sim, LoadWeights(Folder("part")), {"target": ("x",)})
    assert sim.scheduler.weights.fault, "the rest is still that of the start"
    update(sim, LoadWeights(Folder("b")))
    assert not sim.scheduler.weights.fault
    new_ranks(sim, 2)
    assert answer_next(sim, error="no such folder") == LoadWeights(Folder("b"))
    assert sim.scheduler.weights.fault == "the weights of the last update cannot be restored: no such folder"
    new_ranks(sim, 3)
    assert answer_next(sim) == LoadWeights(Folder("b")) and not sim.scheduler.weights.fault
