"""Properties of how steps are filled by what they cost: the budget is kept, no prompt starves, each is computed once.

Random histories run on the rank of `tests.support.scripted`, whose KV model fails if a token is computed twice, left
out or written to another's page.
"""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aerie.workers.config import SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.latency_budget import LatencyBudget, StepBudget, StepRounds
from aerie.workers.scheduling.plan import StepPlan, unpack_i32
from aerie.workers.scheduling.request import Request, RequestState
from aerie.workers.scheduling.sequence import Sequence
from aerie.workers.scheduling.step_time import Step, StepTime
from tests.support.simulation.integrity import check_queues
from tests.support.simulation.scheduler import Simulation

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may slow this machine
ROUND = RoundCosts(num_requests=(1, 8), ms=(5.0, 6.0), ms_per_kv_token=(0.0, 0.0))
TABLE = CostTable(  # a chunk adds a millisecond and one more for every ten tokens
    rounds=(ROUND, ROUND),
    chunk_requests=(0, 1, 8),
    chunk_tokens=(10, 110),
    chunk_ms=((2.0, 12.0), (7.0, 17.0), (8.0, 18.0)),
    mixed_shapes=(1,) * 3,
)
ROUNDING_MS = 1e-6
steps_up = st.floats(0.0, 10.0)


def exact(costs: CostTable) -> StepTime:
    """Predicts what the table says."""
    return StepTime(costs, 50, noise=0.0)


@st.composite
def cost_tables(draw: st.DrawFn) -> CostTable:
    """More work never costs less in it; as far as 50 requests."""

    def rising(count: int, least: float = 0.1) -> tuple[float, ...]:
        values = [least + draw(steps_up)]
        for _ in range(count - 1):
            values.append(values[-1] + draw(steps_up))
        return tuple(values)

    rounds = RoundCosts((1, 4, 50), rising(3), (draw(st.floats(0.0, 0.02)),) * 3)
    alone = rising(3)
    beside = tuple(ms + rounds.ms[-1] for ms in rising(3))
    return CostTable((rounds, rounds), (0, 50), (1, 16, 17), (alone, beside), (1, 1), draw(st.floats(0.0, 0.01)))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Return what happens, one after the other: (what, two numbers)."""
    kinds = ("submit", "submit", "step", "step", "step", "abort", "plan", "lose workers")
    event = st.tuples(st.sampled_from(kinds), st.integers(1, 60), st.integers(1, 30))
    return draw(st.lists(event, min_size=5, max_size=50))


class Watched(Simulation):
    """Looks at every plan: `is_roomy` if slots and pages suffice for all requests."""

    is_roomy = True

    def pending(self) -> dict[int, tuple[Sequence, int]]:
        """Tokens of each prompt, by number, that are not computed yet."""
        queues = self.scheduler.queues
        sequences = [*queues.prefilling.values(), *queues.waiting]
        return {s.number: (s, len(s.tokens) - (s.computed if s.slot >= 0 else 0)) for s in sequences}

    def schedule(self) -> StepPlan | None:
        before = self.pending()
        plan = super().schedule()
        if plan is not None:
            self.check_budget(plan, before)
            if self.is_roomy and not any(sequence.probation for sequence, _ in before.values()):
                self.check_order(plan, before)  # suspects of a crash are admitted one after the other
        return plan

    def check_budget(self, plan: StepPlan, before: dict[int, tuple[Sequence, int]]) -> None:
        """The step keeps to its limit, or carries its one token of progress. before: what was pending."""
        budget, rounds = self.scheduler._prefill.budget, self.rounds(plan)
        assert budget is not None
        counts = [(len(chunk.tokens) // 4, chunk.start) for chunk in plan.chunks]
        tokens = sum(count for count, _ in counts)
        if tokens <= 1:
            return
        context = sum(count * start for count, start in counts) / tokens
        ms = budget.step_time.ms(Step(*rounds, tokens, context))
        if rounds.num_requests:
            backlog_tokens = max(tokens, sum(count for _, count in before.values()))
            assert ms <= max(budget.limit_ms, budget.step_limit_ms(rounds, backlog_tokens)) + ROUNDING_MS
        elif ms > budget.limit_ms + ROUNDING_MS:
            smallest_ms = budget.step_time.ms(Step(chunk_tokens=1))
            assert budget.may_stretch and ms <= budget.limit_ms + smallest_ms + 2 * ROUNDING_MS
            cut = [chunk.next_token for chunk in plan.chunks if chunk.next_token >= 0]
            assert not (cut and self.is_roomy), "a step exceeds the limit and leaves a rest all the same"

    def rounds(self, plan: StepPlan) -> StepRounds:
        slots = unpack_i32(plan.slots)
        return StepRounds(plan.shape, len(slots), int(self.scheduler.slot_pages.committed[slots].sum()))

    def is_full(self, plan: StepPlan) -> bool:
        """Whether another round would exceed a target that is a number, so that no waiting request is admitted."""
        budget, rounds, queues = self.scheduler._prefill.budget, self.rounds(plan), self.scheduler.queues
        assert budget is not None
        kv_tokens = rounds.kv_tokens + max((len(sequence.tokens) for sequence in queues.waiting), default=0)
        grown = Step(rounds.shape, len(queues.active) + 1, kv_tokens)
        ms = budget.step_time.ms(grown) * max(1.0, budget.step_time.slowdown)
        return bool(queues.active) and ms > budget.target_ms and not budget.may_stretch

    def check_order(self, plan: StepPlan, before: dict[int, tuple[Sequence, int]]) -> None:
        """Beside a prompt that got tokens, all with earlier deadlines got all they needed, or begin like a prompt that
        got some, or wait because the batch may not grow; and some got tokens if any waited."""
        after = self.pending()
        given = {number: count - after.get(number, (None, 0))[1] for number, (_, count) in before.items()}
        served = [sequence.order for number, (sequence, _) in before.items() if given[number] > 0]
        if not served:
            is_full = self.is_full(plan) and not self.scheduler.queues.prefilling and self.rounds(plan).num_requests
            assert not before or is_full, "prompts wait, and a step carries none of them"
            return
        page = self.page_size + self.lookahead
        begins = {sequence.tokens[:page].tobytes() for number, (sequence, _) in before.items() if given[number] > 0}
        for number, (sequence, count) in before.items():
            is_next = given[number] == count or sequence.order >= max(served)
            is_next = is_next or (sequence.slot < 0 and self.is_full(plan))
            assert is_next or sequence.tokens[:page].tobytes() in begins, "a later deadline was served first"

    def play(self, history: list[tuple[str, int, int]]) -> list[Request]:
        """Run it, and then all requests to their end. Returns those that were not aborted."""
        requests: list[Request] = []
        for what, first, second in history:
            if what == "submit":
                requests.append(self.submit([first % 5] * first, max_tokens=second, speculative=second % 3 > 0))
            elif what == "step":
                self.step()
            elif what == "plan" and len(self.backlog) < self.max_in_flight:
                self.schedule()
            elif what == "lose workers" and first > 50:
                self.new_worker_group(self.scheduler.epoch + 1)
            elif what == "abort" and requests:
                self.scheduler.abort(requests.pop(first % len(requests)).request_id)
            check_queues(self.scheduler.queues)
        self.run()
        return requests


FLAT = RoundCosts((1, 4, 50), (0.1, 0.1, 0.1), (0.0, 0.0, 0.0))
CACHED_PREFIX = [("submit", 1, 1), ("submit", 1, 1), ("submit", 10, 1), ("step", 1, 1), ("submit", 60, 1)]


# 52 tokens after 8 cached ones would just fit without the attention to these 8
@example(
    CostTable((FLAT, FLAT), (0, 50), (1, 16, 17), ((0.1, 1.1, 1.1), (0.2,) * 3), (1, 1), 1 / 128), "auto", CACHED_PREFIX
)
# a step of 52 tokens takes longer than three of 17 and one of one
@example(CostTable((FLAT, FLAT), (0, 50), (1, 16, 17), ((1.1, 2.1, 3.1), (0.2,) * 3), (1, 1)), "auto", CACHED_PREFIX)
# after a loss of the workers, a request's output is computed again with its prompt
@example(
    CostTable((FLAT, FLAT), (0, 50), (1, 16, 17), ((3.1, 3.1, 5.1), (10.2, 20.2, 30.2)), (1, 1)),
    "auto",
    [("submit", 1, 1), ("submit", 41, 2), ("step", 1, 1), ("submit", 1, 1), ("lose workers", 51, 1)],
)
@given(costs=cost_tables(), target=st.one_of(st.just("auto"), st.floats(0.5, 60.0)), history=histories())
@settings(QUIET, max_examples=20)
def test_with_room_for_all_budgets_are_kept_and_deadlines_decide(costs, target, history):
    sim = Watched(num_pages=1600, max_running=50, max_step_tokens=64, costs=costs, itl_target_ms=target)
    for request in sim.play(history):
        sim.check_output(request)


@given(costs=cost_tables(), history=histories(), max_running=st.integers(1, 8), page_size=st.sampled_from((1, 4)))
@settings(QUIET, max_examples=20)
def test_where_pages_and_slots_are_short_every_request_still_ends(costs, history, max_running, page_size):
    sim = Watched(page_size, num_pages=110 // page_size, max_running=max_running, max_step_tokens=32, costs=costs)
    sim.is_roomy = False
    for request in sim.play(history):
        sim.check_output(request)


@given(
    costs=cost_tables(),
    target_ms=st.floats(0.1, 50.0),
    stretch=st.floats(1.0, 4.0),
    rounds=st.builds(StepRounds, st.just(1), st.integers(0, 50), st.integers(0, 500)),
    backlog=st.integers(0, 10_000),
    wanted=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 400)), min_size=1, max_size=6),
)
@settings(QUIET, max_examples=100)
def test_a_step_is_as_full_as_its_limit_allows(costs, target_ms, stretch, rounds, backlog, wanted):
    budget = LatencyBudget(exact(costs), target_ms, stretch * target_ms, 256)
    limit_ms = budget.step_limit_ms(rounds, backlog)
    assert target_ms <= limit_ms
    rest_ms = 0.0 if rounds.num_requests else costs.step_ms(1, 0, 0, 1)
    most_ms = max(budget.limit_ms, costs.round_ms(1, rounds.num_requests, rounds.kv_tokens) + target_ms / 4)
    assert limit_ms <= most_ms + rest_ms + ROUNDING_MS
    step, pairs = budget.step(rounds, backlog), 0

    def ms(count: int, more_pairs: int) -> float:
        return costs.step_ms(1, rounds.num_requests, rounds.kv_tokens, count, (pairs + more_pairs) / count)

    for count, context in wanted:
        room = step.room(count, context)
        assert (room > 0 or step.tokens > 0) and room <= count and step.tokens + room <= 256
        if room:
            step.take(room, context)
            pairs += room * context
            assert step.tokens <= costs.chunk_tokens[0] or ms(step.tokens, 0) <= limit_ms + ROUNDING_MS
        if room < count:
            assert step.tokens == 256 or ms(step.tokens + 1, context) > limit_ms - ROUNDING_MS
            assert step.room(count, context) == 0, "what is left was offered again"
            break


@given(
    costs=cost_tables(),
    target_ms=st.floats(0.1, 50.0),
    wanted=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 400)), min_size=1, max_size=6),
)
@settings(QUIET, max_examples=100)
def test_a_step_longer_than_the_limit_completes_all_prompts(costs, target_ms, wanted):
    """And one that would complete them all with less than the smallest step beyond the limit does."""
    budget = LatencyBudget(exact(costs), target_ms, 3 * target_ms, 256)
    tokens, pairs = sum(count for count, _ in wanted), sum(count * context for count, context in wanted)
    limit_ms = budget.step_limit_ms(StepRounds(), tokens, pairs / tokens)
    excess_ms = costs.step_ms(1, 0, 0, tokens, pairs / tokens) - budget.limit_ms
    if limit_ms == budget.limit_ms:
        assert tokens > 256 or excess_ms > costs.step_ms(1, 0, 0, 1) - ROUNDING_MS
        return
    step = budget.step(StepRounds(), tokens, pairs / tokens)
    for count, context in wanted:
        assert step.room(count, context) == count
        step.take(count, context)


def test_a_number_is_kept_and_auto_gives_way_to_a_backlog():
    kept = LatencyBudget.of(SchedulerConfig(32, 512, itl_target_ms=9.0), exact(TABLE))
    may_stretch = LatencyBudget.of(SchedulerConfig(32, 512), exact(TABLE))
    rounds = StepRounds(1, 1)
    assert [kept.step_limit_ms(rounds, backlog) for backlog in (0, 10**6)] == [9.0, 9.0]
    target_ms = may_stretch.target_ms
    prompts_of_ms = [0.0, 1.9 * target_ms, 4 * target_ms, 100 * target_ms]
    limits = [may_stretch.step_limit_ms(rounds, int(ms * 110 / 12)) for ms in prompts_of_ms]  # in steps of 110
    assert limits == pytest.approx([target_ms, target_ms, 2 * target_ms, 3 * target_ms], abs=1.0)


def test_prompts_alone_are_not_cut_for_a_rest_that_costs_more_than_it_spares() -> None:
    """Ten tokens or one take 2 ms, so that what would take up to 2 ms more than the limit takes less in one step."""
    budget = LatencyBudget(exact(TABLE), target_ms=4.0, limit_ms=10.0, max_step_tokens=512)
    alone = StepRounds()
    assert [budget.step(alone, n).room(n, 0) for n in (90, 91, 100, 110, 111, 200)] == [90, 91, 100, 110, 90, 90]
    assert budget.step(StepRounds(1, 1), 100).room(100, 0) < 90, "others wait for their next token"
    number = LatencyBudget(exact(TABLE), target_ms=10.0, limit_ms=10.0, max_step_tokens=512)
    assert number.step(alone, 100).room(100, 0) == 90
    assert LatencyBudget(exact(TABLE), 4.0, 10.0, max_step_tokens=95).step(alone, 100).room(100, 0) == 90


def test_more_than_a_step_holds_takes_several() -> None:
    """Where steps are padded to captured sizes, costs are level up to the longest: no slope says what comes after."""
    padded = CostTable((ROUND, ROUND), (0,), (10, 11, 110), ((2.0, 12.0, 12.0),), (1,))
    budget = LatencyBudget(exact(padded), 15.0, 45.0, 110)
    assert [budget.prompt_ms(n) for n in (10, 11, 110, 120, 220, 250)] == [2.0, 12.0, 12.0, 14.0, 24.0, 36.0]
    assert budget.step_limit_ms(StepRounds(1, 8, 0), 5 * 110) == 30.0
    short = LatencyBudget(exact(padded), 15.0, 45.0, 10)
    assert short.prompt_ms(110) == 22.0


def test_rounds_over_the_target_leave_prompts_their_share():
    budget = LatencyBudget(exact(TABLE), target_ms=8.0, limit_ms=8.0, max_step_tokens=512)
    assert budget.step_limit_ms(StepRounds(1, 8), 100) == 8.0
    slow = StepRounds(1, 64)
    rounds_ms = TABLE.round_ms(1, 64)
    assert rounds_ms > 8.0 and budget.step_limit_ms(slow, 100) == rounds_ms + 2.0
    assert budget.step(slow, 100).room(100, 0) >= 1


def test_rounds_rest_for_one_step_while_the_target_leaves_prompts_waiting() -> None:
    """Target 17.4 ms: beside eight rounds it holds 104 prompt tokens, without them 164."""
    sim = Simulation(max_running=50, max_step_tokens=300, page_size=4, prefix_cache=False, costs=TABLE, num_pages=999)
    for _ in range(8):
        sim.submit([1] * 4, max_tokens=90)
    while sim.scheduler.queues.prefilling or sim.scheduler.num_waiting:
        sim.step()
    for _ in range(4):
        sim.submit([1] * 75, max_tokens=20)
    plans = [plan for plan in (sim.schedule() for _ in range(3)) if plan is not None]
    rounds = [len(unpack_i32(plan.slots)) for plan in plans]
    tokens = [sum(len(chunk.tokens) // 4 for chunk in plan.chunks) for plan in plans]
    assert rounds[0] == 0 and rounds[1] >= 8 and rounds[2] >= 8, rounds
    assert tokens[0] == 164 and sum(tokens) == 300, tokens


@pytest.mark.parametrize(
    ("backlog", "rests"),
    [
        (0, False),
        (104, False),  # all of it fits beside the rounds
        (105, True),
        (300, True),
        (340, False),  # half of its time is above the target: steps are longer, and rounds a small part of them
    ],
)
def test_rounds_rest_for_some_backlogs(backlog: int, rests: bool) -> None:
    budget = LatencyBudget.of(SchedulerConfig(max_step_tokens=1000), exact(TABLE))
    assert budget.may_rest(StepRounds(1, 8), backlog, 0.0) is rests
    assert not budget.may_rest(StepRounds(1, 0), backlog, 0.0), "none to leave out"
    numeric = LatencyBudget.of(SchedulerConfig(max_step_tokens=1000, itl_target_ms=17.4), exact(TABLE))
    assert not numeric.may_rest(StepRounds(1, 8), backlog, 0.0), "a number is kept"


def test_rounds_that_prompts_hide_do_not_rest() -> None:
    """As in a large mixture of experts: beside a chunk they add a tenth of what they take alone."""
    hidden = CostTable((ROUND, ROUND), (0, 8), (10, 110), ((8.0, 18.0), (8.6, 18.6)), (1, 1))
    budget = LatencyBudget.of(SchedulerConfig(max_step_tokens=1000), exact(hidden))
    assert budget.step_limit_ms(StepRounds(1, 8), 200) == budget.target_ms
    assert not budget.may_rest(StepRounds(1, 8), 200, 0.0)


def test_no_step_takes_a_scrap_of_a_prompt() -> None:
    """Ten tokens cost as much as one."""
    budget = LatencyBudget(exact(TABLE), target_ms=5.0, limit_ms=5.0, max_step_tokens=512)
    rounds = StepRounds(1, 8)
    assert budget.step_limit_ms(rounds, 100) < TABLE.step_ms(1, 8, 0, 1) == TABLE.step_ms(1, 8, 0, 10)
    step = budget.step(rounds, 100)
    assert step.room(100, 0) == 10
    step.take(10, 0)
    assert step.room(100, 0) == 0
    assert budget.step(rounds, 100).room(3, 0) == 3


def test_what_steps_turn_out_to_take_decides_how_many_prompt_tokens_they_carry() -> None:
    """The start measured steps with prompts twice as fast as they are."""
    step_time, rounds = exact(TABLE), StepRounds(1, 8)
    budget = LatencyBudget.of(SchedulerConfig(50, 512), step_time)
    number = LatencyBudget.of(SchedulerConfig(50, 512, itl_target_ms=18.0), step_time)
    assert number.step(rounds, 1000).room(512, 0) == 110
    alone_ms, target_ms = number.prompt_ms(100), budget.target_ms
    for _ in range(40):
        for tokens in (1, 10, 50, 100, 110):
            step_time.observe(Step(1, 8, 0, tokens), 2.0 * TABLE.step_ms(1, 8, 0, tokens))
    room = number.step(rounds, 1000).room(512, 0)
    assert room == pytest.approx(20, abs=3), "a step of 20 tokens takes 9 ms by the table"
    assert number.prompt_ms(100) > 1.3 * alone_ms, "deadlines follow"
    assert budget.updated().target_ms > 1.3 * target_ms and number.updated() is number


def test_without_costs_a_step_holds_max_step_tokens():
    step = StepBudget(16)
    assert step.room(10, 0) == 10
    step.take(10, 0)
    assert step.room(10, 0) == 6
    step.take(6, 0)
    assert step.room(10, 0) == 0 and step.planned(StepRounds()).chunk_tokens == step.tokens


def chunks_by_step(sim: Simulation) -> list[list[tuple[int, int]]]:
    return [[(chunk.slot, len(chunk.tokens) // 4) for chunk in plan.chunks] for plan in sim.plans]


def test_a_short_prompt_passes_a_long_one():
    sim = Simulation(max_step_tokens=64, costs=TABLE, itl_target_ms=5.0, prefix_cache=False)
    long, short = sim.submit([1] * 90, max_tokens=5), sim.submit([2] * 6, max_tokens=5)
    sim.step()
    assert short.state is RequestState.RUNNING and long.state is RequestState.PREFILL
    assert sum(count for slot, count in chunks_by_step(sim)[0]) == pytest.approx(40, abs=1), "the step is not filled"
    sim.run()


def test_a_long_prompt_is_passed_by_what_came_before_its_deadline_only():
    sim = Watched(num_pages=2000, max_running=60, max_step_tokens=512, costs=TABLE, itl_target_ms=8.0)
    sim.submit([9] * 5, max_tokens=90)
    sim.step()
    long = sim.submit([1] * 90, max_tokens=3)
    deadline_s = next(iter(sim.scheduler.queues.waiting)).deadline_s
    assert deadline_s - sim.clock.now == pytest.approx(0.040, rel=0.01)  # four times its own 10 ms
    num_before = 0
    while long.state in (RequestState.WAITING, RequestState.PREFILL):  # twice as many tokens come as a step takes
        num_before += sim.clock.now < deadline_s
        sim.submit([len(sim.plans) + 10] * 30, max_tokens=1)
        sim.step()
    sizes = [sum(count for _, count in chunks) for chunks in chunks_by_step(sim)]
    assert max(sizes) < 30, "more fits into a step than comes, so that nothing has to be passed"
    assert sum(sizes) <= 5 + 90 + 30 * num_before + max(sizes)
    sim.run()


def test_what_the_prefix_cache_has_makes_a_prompt_short():
    sim = Simulation(num_pages=200, costs=TABLE, itl_target_ms=1000.0, max_step_tokens=512)
    sim.submit([1] * 90, max_tokens=2)
    sim.finish()
    sim.submit([1] * 90, max_tokens=2)
    sim.submit([2] * 90, max_tokens=2)
    known, new = sim.scheduler.queues.waiting
    assert known.number < new.number
    assert known.deadline_s - sim.clock.now < 0.009 < new.deadline_s - sim.clock.now
    sim.run()


def test_a_step_that_prompts_fill_waits_less_for_masks():
    """So that a stream beside hostile grammars has no gap of the target and half of it."""
    target_ms, waits = 120.0, list[tuple[float, float]]()
    rounds = RoundCosts((1, 8), (50.0, 60.0), (0.0, 0.0))
    slow = CostTable((rounds, rounds), (0, 1, 8), (10, 110), ((20.0, 120.0), (70.0, 170.0), (80.0, 180.0)), (1,) * 3)

    class Asked(Simulation):
        def schedule(self) -> StepPlan | None:
            plan = super().schedule()
            if plan is not None:
                assert self.scheduler.expected is not None
                waits.append((self.scheduler.expected.ms, plan.mask_wait_ms))
            return plan

    sim = Asked(max_step_tokens=200, num_pages=200, max_model_len=200, costs=slow, itl_target_ms=target_ms)
    sim.submit([1] * 6, max_tokens=30)
    for _ in range(4):
        sim.step()
    sim.submit([2] * 180, max_tokens=2)
    sim.run()
    assert {wait for expected, wait in waits if expected < target_ms / 2} == {target_ms / 2}
    filled = [wait for expected, wait in waits if expected > 0.75 * target_ms]
    assert filled and max(filled) < 0.3 * target_ms
    assert all(wait <= max(target_ms / 4, target_ms - expected) for expected, wait in waits)


def test_costs_that_come_later_order_what_waits():
    sim = Simulation(max_step_tokens=64, prefix_cache=False)
    sim.submit([1] * 60, max_tokens=5)
    sim.submit([2] * 6, max_tokens=5)
    assert [sequence.number for sequence in sim.scheduler.queues.waiting] == [0, 1]
    sim.scheduler.use_costs(TABLE)
    assert [sequence.number for sequence in sim.scheduler.queues.waiting] == [1, 0]
    sim.run()
