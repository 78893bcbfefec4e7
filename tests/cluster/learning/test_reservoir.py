"""Which texts a draft learns from."""

import random

from aerie.cluster.learning.reservoir import Reservoir, Text, is_held_out


def text(number: int, size: int = 10, key: str = "") -> Text:
    return Text((number,) * 3, (number,) * (size - 3), key)


def test_newer_texts_stay_for_longer_and_the_limit_holds() -> None:
    reservoir = Reservoir(1000, 1.0, 0.1)
    for number in range(1000):
        reservoir.add(text(number))
        assert reservoir.num_tokens <= 1000
    numbers = [each.prompt[0] for parts in reservoir.split(0) for part in parts for each in part]
    assert len(numbers) == 100 and max(numbers) == 999 and reservoir.num_added == 1000
    assert sum(number >= 900 for number in numbers) > 50 and min(numbers) < 900
    reservoir.add(text(1, size=1001))
    assert reservoir.num_added == 1000


def test_a_key_that_floods_gets_its_share_once_there_are_others() -> None:
    reservoir = Reservoir(1000, 0.5, 0.1)
    for number in range(100):
        reservoir.add(text(number, key="flood"))
    for number in range(100, 110):
        reservoir.add(text(number, key="other"))
    for number in range(200, 400):
        reservoir.add(text(number, key="flood"))
    texts = [each for parts in reservoir.split(0) for part in parts for each in part]
    of_key = {key: sum(each.num_tokens for each in texts if each.key == key) for key in ("flood", "other")}
    assert of_key == {"flood": 500, "other": 100}


def test_all_answers_to_a_prompt_are_on_one_side() -> None:
    """500 prompts, share 0.2: outside 60 to 140 with a probability of 1e-5 for a free hash."""
    draw = random.Random(0)
    reservoir = Reservoir(10**6, 1.0, 0.2)
    prompts = [tuple(draw.randrange(100) for _ in range(5)) for _ in range(500)]
    for prompt in prompts * 2:
        reservoir.add(Text(prompt, (draw.randrange(9),) * 4))
    _, (trained, held_out) = reservoir.split(0)
    train, held = ({each.prompt for each in part} for part in (trained, held_out))
    assert not train & held and 60 < len(held) < 140
    assert all(is_held_out(prompt, 0.2) for prompt in held)


def test_the_newest_texts_are_apart_from_the_older_ones() -> None:
    reservoir = Reservoir(10**6, 1.0, 0.3)
    for number in range(100):
        reservoir.add(text(number))
    recent, older = ([each.prompt[0] for part in parts for each in part] for parts in reservoir.split(30))
    assert sorted(recent) == list(range(70, 100)) and sorted(older) == list(range(70))
    recent, older = ([each for part in parts for each in part] for parts in reservoir.split(200))
    assert len(recent) == 100 and not older
