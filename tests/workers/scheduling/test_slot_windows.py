"""Windows in random histories. The rank's KV model fails if a position in a window has no window page, or one with
another request's content; the integrity checks of every step fail if a window page is lost."""

import random
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.attention.kv_cache.window_pages import WindowSizes
from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.request import Request
from tests.support.simulation.scheduler import Simulation, random_history, random_prompt

POOLS = {1: 110, 4: 30, 16: 12}  # pages: the largest request fits, few of them do at once


def simulation(rng: random.Random, page_size: int, window: int, spare: int) -> Simulation:
    """spare: window pages beyond those that one request needs."""
    speculative = rng.random() < 0.7
    ahead = (
        Simulation(speculative=speculative).shapes.max_ahead_tokens if speculative else RoundShapes().max_ahead_tokens
    )
    least = min(POOLS[page_size], -(-(window - 1 + ahead) // page_size) + 2)
    return Simulation(
        page_size=page_size,
        num_pages=POOLS[page_size],
        max_running=rng.choice([1, 3, 8]),
        max_step_tokens=rng.choice([1, 7, 32, 200]),
        max_waiting=10,
        lookahead=rng.randrange(2),
        speculative=speculative,
        prefix_cache=rng.random() < 0.8,
        max_in_flight=rng.choice([1, 2, 2, 3]),
        window=WindowSizes(window, min(POOLS[page_size], least + spare)),
    )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from(sorted(POOLS)),
    window=st.integers(1, 40),
    spare=st.sampled_from([0, 0, 1, 3, 10, 100]),
)
def test_no_window_page_is_freed_too_early_or_lost(seed: int, page_size: int, window: int, spare: int) -> None:
    rng = random.Random(seed)
    sim = simulation(rng, page_size, window, spare)

    def submit(former: Sequence[Request]) -> Request:
        return sim.submit(
            random_prompt(rng, 60),
            max_tokens=rng.randint(1, 45),
            speculative=rng.random() < 0.7,
            stop_token_ids=(3, 500, 501, 502) if rng.random() < 0.5 else (),
        )

    random_history(sim, rng, 15, submit, abort_chance=0.05)
