"""The scheduler's policy, case by case; random histories are in test_scheduler_simulation.py."""

import itertools

import pytest

from aerie.workers.scheduling.plan import SamplingParams, StepResult, unpack_i32
from aerie.workers.scheduling.request import FinishReason, QueueFullError, Request, RequestState, RequestTooLargeError
from tests.support.simulation.scheduler import TREE, Simulation


def rounds(plan):
    return unpack_i32(plan.slots).tolist()


def chunk_sizes(plan):
    return [len(chunk.tokens) // 4 for chunk in plan.chunks]


def test_running_requests_run_every_step_beside_a_long_prompt():
    sim = Simulation(max_step_tokens=8)
    short = sim.submit([1, 2, 3], max_tokens=40)
    sim.step()
    long = sim.submit(list(range(60)), max_tokens=5)
    before = len(sim.plans)
    while long.state is not RequestState.RUNNING:
        sim.step()
    plans = sim.plans[before:]
    assert all(rounds(plan)[:1] == [0] for plan in plans), "the long prompt stalled the running request"
    assert [chunk_sizes(plan) for plan in plans if plan.chunks] == [[8]] * 7 + [[4]], "the long prompt was starved"
    sim.run()
    sim.check_output(short)
    sim.check_output(long)


def test_a_step_carries_chunks_of_several_prompts_first_come_first_served():
    sim = Simulation(max_step_tokens=16, prefix_cache=False)
    for length in (5, 20, 4):
        sim.submit(list(range(length)))
    first, second = sim.schedule(), sim.schedule()
    chunks = [[(c.slot, c.start, len(c.tokens) // 4, c.next_token) for c in plan.chunks] for plan in (first, second)]
    assert chunks == [[(0, 0, 5, -1), (1, 0, 11, 11)], [(1, 11, 9, -1), (2, 0, 4, -1)]]
    assert rounds(first) == [] and rounds(second) == [0]


def test_a_plan_in_flight_is_reserved_for_at_its_worst():
    sim = Simulation(page_size=1, num_pages=100, max_in_flight=3)
    sim.submit([1, 2, 3], max_tokens=50)
    held = []
    for _ in range(4):
        sim.schedule()
        held.append(sim.scheduler.allocator.num_held)
    prompt, round_ = 3 + TREE.draft_tokens, 3 + TREE.max_kv_tokens
    assert held == [prompt, round_, round_ + TREE.max_new_tokens, round_ + 2 * TREE.max_new_tokens]
    sim.read()
    for _ in range(3):
        sim.read()
    sim.schedule()
    committed = 3 + len(sim.outputs["r0"]) - 1
    assert sim.scheduler.allocator.num_held == committed + TREE.max_kv_tokens, "surplus pages are given back"


def test_no_round_is_run_for_a_request_that_must_have_ended():
    sim = Simulation(speculative=False)
    sim.submit([1, 2], max_tokens=2)
    assert rounds(sim.schedule()) == []
    assert rounds(sim.schedule()) == [0]
    assert sim.schedule() is None
    sim.run()


@pytest.mark.parametrize("wishes, shape", [((False, False), 0), ((True, False), 1), ((True, True), 1)])
def test_a_round_is_plain_only_if_nobody_wants_drafts(wishes, shape):
    sim = Simulation()
    for wish in wishes:
        sim.submit([1, 2, 3], speculative=wish)
    sim.schedule()
    assert sim.schedule().shape == shape


def test_max_kv_len_covers_rounds_and_the_draft_of_a_last_chunk():
    sim = Simulation(max_step_tokens=50)
    sim.submit(list(range(30)))
    first, second = sim.schedule(), sim.schedule()
    assert first.max_kv_len == 30 + TREE.draft_tokens
    assert second.max_kv_len == 30 + TREE.max_kv_tokens


def test_plans_carry_only_page_table_changes():
    sim = Simulation(page_size=4, speculative=False)
    sim.submit([1] * 7, max_tokens=20)
    updates = [unpack_i32(sim.schedule().page_updates).reshape(-1, 3)[:, :2].tolist() for _ in range(1)]
    assert updates == [[[0, 0], [0, 1]]]
    changes = []
    while sim.step():
        changes += unpack_i32(sim.plans[-1].page_updates).reshape(-1, 3)[:, 1].tolist()
    assert changes == [2, 3, 4, 5, 6], "each further page is named once"


def test_slot_init_says_where_to_start_and_brings_counts_only_when_needed():
    sim = Simulation(page_size=4)
    prompt = list(range(9))
    sim.submit(prompt, max_tokens=3)
    sim.finish()
    sim.submit(prompt, max_tokens=3, presence_penalty=0.5)
    sim.submit(prompt, max_tokens=3)
    counted, plain = sim.schedule().inits
    assert (counted.num_cached, counted.prompt_len, counted.max_len) == (8, 9, 12)
    assert unpack_i32(counted.prompt).tolist() == prompt
    assert (plain.prompt, plain.output) == (b"", b"")
    sim.run()


def test_a_resumed_stream_goes_on_where_it_stopped():
    sim = Simulation()
    whole = sim.submit([5, 6, 7], max_tokens=12)
    sim.run()
    resumed = sim.submit([5, 6, 7], max_tokens=12, seed_of=whole, output=whole.output[:5])
    init = None
    while sim.step():
        init = init or sim.plans[0].inits[0]
    assert resumed.output == whole.output
    assert sim.plans[-1].epoch == 0 and init.max_len == 15


def test_the_prefix_cache_serves_the_next_prompt_and_counts_it():
    sim = Simulation(page_size=4, lookahead=1)
    sim.submit(list(range(20)), max_tokens=2)
    sim.finish()
    again = sim.submit(list(range(20)), max_tokens=2)
    sim.run()
    assert again.cached_tokens == 16
    cache = sim.scheduler.prefix_cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (40, 16)


@pytest.mark.parametrize("lookahead, num_shared", [(0, 4), (1, 3)])  # the token behind the fourth page differs
def test_two_equal_prompts_computed_at_once_share_their_pages_afterwards(lookahead, num_shared):
    sim = Simulation(page_size=4, max_step_tokens=100, speculative=False, lookahead=lookahead)
    for _ in range(2):
        sim.submit(list(range(16)), max_tokens=20)
    for _ in range(3):
        sim.step()
    first, second = sim.scheduler.slot_pages.pages[:2]
    assert first[:num_shared] == second[:num_shared]
    assert not set(first[num_shared:]) & set(second[num_shared:])
    sim.run()
    assert sim.outputs["r0"] != sim.outputs["r1"]


def test_the_youngest_is_preempted_and_keeps_its_output():
    sim = Simulation(page_size=1, num_pages=60, max_running=3)
    old, young = sim.submit([1] * 10, max_tokens=40), sim.submit([2] * 10, max_tokens=40)
    while not young.num_preemptions:
        sim.step()
    assert young.state is RequestState.WAITING and old.state is RequestState.RUNNING
    kept = list(young.output)
    assert kept
    sim.run()
    assert young.output[: len(kept)] == kept and old.num_preemptions == 0
    sim.check_output(old)
    sim.check_output(young)


def test_results_of_rounds_before_a_preemption_count_and_may_even_end_the_request():
    sim = Simulation(page_size=1, num_pages=60, max_running=3)
    old, young = sim.submit([1] * 10, max_tokens=40), sim.submit([2] * 10, max_tokens=40)
    while not young.num_preemptions:
        before = list(young.output)
        sim.step()
    while sim.scheduler.num_in_flight:
        sim.read()
    assert len(young.output) > len(before)
    sim.run()
    sim.check_output(young)
    sim.check_output(old)


def test_a_preempted_request_is_not_replayed_before_its_results_are_in():
    sim = Simulation(page_size=1, num_pages=60, max_running=3)
    old, young = sim.submit([1] * 10, max_tokens=40), sim.submit([2] * 10, max_tokens=40)
    while not young.num_preemptions:
        if sim.scheduler.num_in_flight == 3:
            sim.read()
        sim.schedule()
    first_without = sim.plans[-1].step
    sim.scheduler.abort(old.request_id)
    assert sim.backlog[0].step < first_without
    while sim.backlog[0].step < first_without:
        assert sim.schedule() is None, "replayed without tokens that are on their way"
        sim.read()
    assert sim.schedule() is not None
    sim.run()
    sim.check_output(young)


def test_a_slots_next_user_does_not_inherit_page_table_changes():
    sim = Simulation(page_size=4, max_step_tokens=100, speculative=False, lookahead=0, max_running=2)
    for _ in range(2):
        sim.submit(list(range(16)), max_tokens=20)
    sim.schedule()
    sim.read()  # the second request changes to the first one's pages with the next plan
    sim.scheduler.abort("r1")
    sim.submit([9] * 16, max_tokens=5)
    updates = unpack_i32(sim.schedule().page_updates).reshape(-1, 3)
    named = {(slot, index) for slot, index, _ in updates.tolist()}
    assert len(named) == len(updates) and {(1, 0), (1, 3)} <= named
    sim.run()


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer():
    sim = Simulation(page_size=1, lookahead=0, num_pages=200)
    first = sim.submit([1, 2, 3], max_tokens=20)
    sim.finish()
    turn = first.prompt + first.output + [7, 8]
    second = sim.submit(turn, max_tokens=5)
    sim.run()  # the rank's KV model checks what the cached pages hold
    last_round = 4
    assert len(turn) - 2 - 1 - last_round <= second.cached_tokens <= len(turn) - 2 - 1


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_in_any_state_returns_all_pages(num_steps):
    sim = Simulation(max_running=1, max_step_tokens=4)
    victim, bystander = sim.submit([1] * 10, max_tokens=12), sim.submit([2] * 5, max_tokens=4)
    for _ in range(num_steps):
        sim.step()
    for _ in range(2):
        sim.schedule()
    assert sim.scheduler.abort(victim.request_id) is victim
    assert victim.state is RequestState.FINISHED
    assert sim.scheduler.abort(victim.request_id) is None
    count = len(victim.output)
    sim.run()
    assert len(victim.output) == count and "r0" not in sim.finished
    sim.check_output(bystander)


def test_abort_of_a_waiting_request_never_runs_it():
    sim = Simulation(max_running=1)
    sim.submit([1])
    sim.submit([2])
    sim.scheduler.abort("r1")
    sim.run()
    assert sim.outputs["r1"] == []


def test_after_the_gang_died_everything_is_replayed_in_order():
    sim = Simulation(max_running=2, max_step_tokens=8)
    requests = [sim.submit([i] * 12, max_tokens=30) for i in range(4)]
    for _ in range(4):
        sim.step()
    progress = [list(request.output) for request in requests]
    sim.new_worker_group(1)
    assert [sequence.request for sequence in sim.scheduler.queues.waiting] == requests
    assert sim.scheduler.allocator.num_free == sim.num_pages
    plan = sim.schedule()
    assert (plan.epoch, plan.step) == (1, 0)
    sim.run()
    for request, before in zip(requests, progress, strict=True):
        assert request.output[: len(before)] == before
        sim.check_output(request)


def test_results_of_a_dead_gang_are_dropped():
    sim = Simulation()
    sim.submit([1, 2, 3])
    sim.schedule()
    sim.executor.submit(sim.backlog.popleft())
    stale = sim.executor.take()
    sim.new_worker_group(3)
    sim.schedule()
    assert sim.scheduler.apply(stale) == []
    assert sim.scheduler.stats.num_stale_results == 1 and sim.scheduler.num_in_flight == 1
    sim.run()


def test_a_result_out_of_order_is_our_bug():
    sim = Simulation()
    sim.submit([1, 2, 3])
    sim.schedule()
    with pytest.raises(AssertionError, match="result of step 7, awaited 0"):
        sim.scheduler.apply(StepResult(0, 7, b"", b"", b"", b""))


def test_a_stop_token_ends_a_request_and_the_round_in_flight_is_wasted():
    sim = Simulation()
    whole = sim.submit([4] * 6, max_tokens=30)
    sim.run()
    stopped = sim.submit([4] * 6, max_tokens=30, seed_of=whole, stop_token_ids=(whole.output[9],))
    sim.run()
    assert stopped.output == whole.output[:10]
    assert sim.finished["r1"] is FinishReason.STOP


def test_a_full_queue_refuses_with_value_limit_and_remedy():
    sim = Simulation(max_waiting=2)
    sim.submit([1])
    sim.submit([1])
    with pytest.raises(QueueFullError, match="max_waiting=2: 2 wait; retry later"):
        sim.submit([1])


def test_impossible_requests_are_refused_at_submission():
    sim = Simulation(page_size=4, num_pages=10, max_model_len=100)
    with pytest.raises(RequestTooLargeError, match="prompt of 60 tokens and max_tokens=41 make 101, the limit is 100"):
        sim.submit([1] * 60, max_tokens=41)
    with pytest.raises(RequestTooLargeError, match="need 11 KV pages, the pool has 10: shorten"):
        sim.submit([1] * 25, max_tokens=12)
    fits = sim.submit([1] * 24, max_tokens=10)
    with pytest.raises(ValueError, match="a request with this id runs already"):
        sim.scheduler.submit(Request(fits.request_id, [1], SamplingParams(max_tokens=1)))
    with pytest.raises(ValueError, match="prompt: has no tokens"):
        sim.submit([])
    with pytest.raises(ValueError, match="max_tokens=2: must be above the 2 output tokens"):
        sim.submit([1], max_tokens=2, output=[5, 6])
    sim.run()
    sim.check_output(fits)


def test_speculation_is_counted_per_request_and_per_position():
    sim = Simulation()
    drafted = sim.submit([1, 2], max_tokens=40)
    plain = sim.submit([1, 2], max_tokens=40, speculative=False)
    sim.run()
    assert plain.num_rounds == 0 and sum(plain.acceptance_histogram) == 0
    assert drafted.num_rounds == sum(drafted.acceptance_histogram) > 0
    stats = sim.scheduler.stats
    assert stats.num_drafts == drafted.num_rounds
    accepted = sum(k * n for k, n in enumerate(drafted.acceptance_histogram))
    assert stats.num_accepted_tokens == accepted == sum(stats.accepted_per_position)
    assert stats.accepted_per_position[0] == sum(drafted.acceptance_histogram[1:])


def test_logprobs_reach_the_output_they_belong_to():
    sim = Simulation()
    sim.submit([1, 2], max_tokens=9)
    asked = sim.submit([1, 2], max_tokens=9, logprobs=0)
    sim.schedule()
    sim.schedule()
    while sim.backlog:
        for output in sim.read():
            if output.request is asked:
                assert [-entry.logprob for entry in output.logprobs] == output.tokens
            else:
                assert output.logprobs is None


def test_times_are_taken_from_the_clock():
    sim = Simulation(speculative=False)
    sim.submit([1, 2, 3], max_tokens=4)
    sim.clock.now = 1.0
    sim.schedule()
    sim.clock.now = 1.5
    sim.read()
    sim.schedule()
    sim.clock.now = 1.75
    sim.read()
    stats = sim.scheduler.stats
    assert (stats.queue_s.total, stats.time_to_first_token_s.total, stats.inter_token_s.total) == (1.0, 1.5, 0.25)
    assert stats.prompt_tokens == 3 and stats.generation_tokens == 2


def test_drafts_count_whether_or_not_they_are_verified():
    """Plain rounds leave the trees unverified that the steps before them drafted."""
    sim = Simulation()
    shapes = itertools.cycle([1, 1, 0])
    sim.scheduler.rounds.choose_shape = lambda _: next(shapes)
    sim.submit([1, 2], max_tokens=40)
    sim.run()
    drafting = sum(plan.next_shape for plan in sim.plans)
    not_run = sum(plan.next_shape for plan in sim.plans[-1:])  # planned before the end was known
    stats = sim.scheduler.stats
    assert stats.num_draft_tokens in {(TREE.width - 1) * drafting, (TREE.width - 1) * (drafting - not_run)}
    assert stats.num_draft_tokens > (TREE.width - 1) * stats.num_drafts > 0
