"""Which weights wrote a token: from the coordinator, whose weights change at random moments, to the ingress."""

import random
import time

import msgspec

from aerie.cluster.ingress.attempts import RequestStream
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.scheduling.commands.command import Folder, LoadedWeights, LoadWeights, first_error
from aerie.workers.scheduling.plan import pack_i32, unpack_i32
from tests.support.cluster import until
from tests.support.scripted import VOCABULARY, scripted_output


class Updated:
    """A scripted rank whose tokens say how often its weights were loaded: VOCABULARY times that is added."""

    def __init__(self, executor, rank):
        self.num_loads = 0
        self._handlers = CommandHandlers(rank)
        self._handlers.add(LoadWeights, self._load)
        self._take = executor.take
        executor.take = self.take
        executor.carry_out = lambda command: (self._handlers.carry_out(command),)

    def _load(self, work):
        self.num_loads += 1
        return LoadedWeights({"target": ()})

    def take(self):
        result = self._take()
        return msgspec.structs.replace(result, tokens=pack_i32(unpack_i32(result.tokens) + VOCABULARY * self.num_loads))


def test_each_token_has_the_version_of_the_weights_that_wrote_it(make_bed):
    """The oracle: what each token says itself."""
    draw = random.Random(3)
    bed = make_bed(delay_s=0.002)
    ranks = bed.new_ranks()
    for rank, executor in enumerate(ranks.executors):
        Updated(executor, rank)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    wanted = {f"q{i}": scripted_output(5, bed.generate(f"q{i}", seed=i, max_tokens=250)) for i in range(4)}
    until(lambda: bed.coordinator.stats().num_running == 4)
    for number in range(1, 13):
        answers = bed.coordinator.carry_out(LoadWeights(Folder("/x"), version=f"step-{number}")).result(10)
        assert first_error(answers) == ""
        time.sleep(draw.random() * 0.02)
    num_mixed = 0
    for name, script in wanted.items():
        bed.ingress.read_end(name)
        stream = RequestStream()
        for delta in bed.ingress.deltas[name]:
            stream.put(delta)
        joined = stream.take(name)
        assert joined is not None
        assert [token % VOCABULARY for token in joined.tokens] == script
        written = [f"step-{token // VOCABULARY}" if token >= VOCABULARY else "" for token in joined.tokens]
        runs = joined.weight_versions
        assert [version for version, count in runs for _ in range(count)] == written
        assert len({version for version, _ in runs}) == len(runs), "neighbours of one version are one pair"
        num_mixed += len(runs) > 2
    assert num_mixed >= 2


def test_tokens_of_the_weights_of_the_start_cost_nothing_on_the_wire():
    stream = RequestStream()
    stream.put(TokenDelta("a", (1, 2)))
    taken = stream.take("a")
    assert taken is not None and taken.weight_versions == ()
    stream.put(TokenDelta("a", (1, 2)))
    stream.put(TokenDelta("a", (3,), weight_versions=(("1", 1),)))
    taken = stream.take("a")
    assert taken is not None and taken.weight_versions == (("", 2), ("1", 1))


def test_the_prefix_cache_is_emptied_while_the_engine_tries_its_draft_after_an_update(make_bed):
    bed = make_bed(delay_s=0.05)
    ranks = bed.new_ranks()
    for rank, executor in enumerate(ranks.executors):
        Updated(executor, rank)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    bed.generate("a", max_tokens=4)
    bed.ingress.read_end("a")
    assert first_error(bed.coordinator.carry_out(LoadWeights(Folder("/x"))).result(10)) == ""
    until(lambda: bed.coordinator.stats().num_running == 1)
    assert bed.coordinator.flush_cache().unfinished == ""
    until(lambda: bed.coordinator.stats().num_running == 1)  # tried again later
