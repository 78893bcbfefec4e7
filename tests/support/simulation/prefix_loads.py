"""Loads whose prompts begin alike, for simulations of the prefix cache, and what any cache could save of them. Uses no
model and no clock."""

import random
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack

from aerie.attention.kv_cache.radix_node import prompt_digests
from aerie.deploy.bench.arrivals import MIXES, Traffic
from tests.support.simulation.load import Arrival, lognormal_length

PAGE, LOOKAHEAD = 16, 1
_IDS = 300, 16_000


def prompt_heavy(rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Those of `aerie bench --mix prompt-heavy`: 40 % of the prompts begin with one of eight texts of 2,048 tokens."""
    traffic = Traffic(MIXES["prompt-heavy"], seconds, 10**6, *_IDS, seed=seed)
    return [Arrival(a.due_s, len(a.prompt), a.num_tokens, a.prompt) for a in traffic.arrivals(rate)]


def chats(rate: float, seconds: float, seed: int = 0, max_len: int = 8192) -> list[Arrival]:
    """Conversations of two to seven turns, 20 to 45 s apart, `rate` new ones a second. Each begins with one of eight
    system prompts of 700 tokens. Messages have about 150 tokens, answers about 250. One in six turns is asked again,
    for another answer."""
    rng = random.Random(seed)
    systems = [_text(rng, 700) for _ in range(8)]
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        prompt, at_s = list(rng.choice(systems)), now
        for _ in range(rng.randint(2, 7)):
            prompt = prompt + _text(rng, lognormal_length(rng, 150, 1000))
            answer = lognormal_length(rng, 250, 1024)
            if len(prompt) + answer > max_len - 16:
                break
            arrivals.append(Arrival(at_s, len(prompt), answer, tuple(prompt)))
            if rng.random() < 1 / 6:
                arrivals.append(Arrival(at_s + 20, len(prompt), answer, tuple(prompt)))
            prompt, at_s = [*prompt, *[1] * answer], at_s + rng.uniform(20, 45)  # the simulated answer
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def agents(rate: float, seconds: float, seed: int = 0, max_len: int = 8192) -> list[Arrival]:
    """Tasks of four to sixteen calls, each 1 to 8 s after the one before, `rate` new ones a second. Each begins with
    one of four texts (instructions and tools) of about 2,500 tokens, and a task of about 200. A call answers with about
    80 tokens, and the tool's result has about 250. One in four tasks is done by three agents from its third call on."""
    rng = random.Random(seed)
    tools = [_text(rng, rng.randint(2000, 3000)) for _ in range(4)]
    arrivals: list[Arrival] = []

    def go_on(prompt: list[int], at_s: float, num_calls: int) -> None:
        for call in range(num_calls):
            answer = lognormal_length(rng, 80, 512)
            if len(prompt) + answer > max_len - 16:
                return
            arrivals.append(Arrival(at_s, len(prompt), answer, tuple(prompt)))
            prompt = [*prompt, *[1] * answer, *_text(rng, lognormal_length(rng, 250, 2000))]
            at_s += rng.uniform(1, 8) + 0.02 * answer
            if call == 2 and rng.random() < 1 / 4:
                for _ in range(3):
                    go_on(prompt + _text(rng, 30), at_s, num_calls - 3)
                return

    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        go_on(rng.choice(tools) + _text(rng, lognormal_length(rng, 200, 1000)), now, rng.randint(4, 16))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def possible_tokens(arrivals: Sequence[Arrival], num_states: int | None = None) -> float:
    """Prompt tokens that no cache can exceed, where every earlier prompt and answer is there at once.

    num_states: of recurrent layers, that the cache holds at a time; None: any number. The bound is the optimum, with
        all arrivals known before, of a relaxed problem: a state is held from the last request that had its text to the
        one that resumes at it, and any request makes the states of all its text for nothing.
    """
    starts, ends, saved = [], [], []  # a choice: resume so deep, at a state held from one request to another
    last: dict[bytes, int] = {}  # the last request that had a page
    for index, arrival in enumerate(arrivals):
        text = np.array([*arrival.prompt, *[1] * arrival.max_tokens], np.int32)
        digests = prompt_digests(text, PAGE, LOOKAHEAD)
        had = [last.get(digest, -1) for digest in digests[: (arrival.prompt_len - 1) // PAGE]]
        for page, (this, following) in enumerate(zip(had, [*had[1:], -1], strict=True), 1):
            if this > following:
                starts.append(this)
                ends.append(index)
                saved.append(page * PAGE)
        last.update(dict.fromkeys(digests, index))
    if num_states is None:
        return float(sum(max_of(ends, saved).values()))
    return _most_saved(np.array(starts), np.array(ends), np.array(saved), num_states, len(arrivals))


def max_of(keys: Sequence[int], values: Sequence[int]) -> dict[int, int]:
    """The largest value of each key."""
    found: dict[int, int] = {}
    for key, value in zip(keys, values, strict=True):
        found[key] = max(value, found.get(key, 0))
    return found


def _most_saved(starts: np.ndarray, ends: np.ndarray, saved: np.ndarray, num_states: int, count: int) -> float:  # type: ignore[type-arg]
    """The most tokens by at most one choice of each end, so that at most `num_states` overlap: states flow along time,
    each idle or held by a choice."""
    choices, idle = len(starts), np.arange(count - 1)
    columns, each = np.arange(choices), np.ones(choices)
    flow = coo_array(
        (
            np.concatenate([each, -each, np.ones(count - 1), -np.ones(count - 1)]),
            (
                np.concatenate([starts, ends, idle, idle + 1]),
                np.concatenate([columns, columns, choices + idle, choices + idle]),
            ),
        ),
        shape=(count, choices + count - 1),
    )
    supply = np.zeros(count)
    supply[0], supply[-1] = num_states, -num_states
    once = coo_array((each, (ends, columns)), shape=(count, choices + count - 1))
    gain = np.concatenate([-saved, np.zeros(count - 1)])
    found = linprog(gain, once, np.ones(count), vstack([flow]), supply, bounds=(0, None), method="highs")
    assert found.status == 0, found.message
    return -float(found.fun)


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_IDS) for _ in range(count)]
