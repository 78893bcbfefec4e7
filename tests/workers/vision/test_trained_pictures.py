"""A trained model that reads digits in pictures (`tests.support.targets.trained_pictures`)."""

import random
from pathlib import Path

import torch

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support.target_answers import TREE, head_for
from tests.support.targets.trained_pictures import (
    BACKWARDS,
    CHECKPOINT,
    EOS,
    FORWARDS,
    NUM_DIGITS,
    answer,
    prompt_parts,
)
from tests.workers.vision.test_images_greedy import requests_of, worker_of

NUM_PICTURES = 12


def answers(speculative: SpeculativeConfig | None) -> list[Request]:
    """Ask for each picture forwards and backwards."""
    given = [prompt_parts(digits, question, random.Random(i)) for i, (digits, question) in enumerate(asked())]
    requests = requests_of(CHECKPOINT, given)
    for request in requests:
        request.sampling = SamplingParams(24, 0.0, stop_token_ids=(EOS,))
    with local_engine(EngineSpec(worker_of(CHECKPOINT), speculative)) as engine:
        engine.run(requests, 4)
    return requests


def asked() -> list[tuple[list[int], int]]:
    generator = random.Random(5)
    digits = [[generator.randrange(10) for _ in range(NUM_DIGITS)] for _ in range(NUM_PICTURES)]
    return [(each, question) for each in digits for question in (FORWARDS, BACKWARDS)]


def test_answers_are_what_the_pictures_show_with_and_without_drafts(tmp_path: Path) -> None:
    """At least 90 % are right; of guesses, one in a thousand would be."""
    torch.set_num_threads(1)
    plain = answers(None)
    right = [request.output == answer(*each) for request, each in zip(plain, asked(), strict=True)]
    assert sum(right) >= 0.9 * len(right)
    head = head_for(read_target_config(ModelSource(path=str(CHECKPOINT)), 1), tmp_path)
    for speculative in (SpeculativeConfig(method="suffix"), SpeculativeConfig(str(head), "eagle3", *TREE)):
        drafted = answers(speculative)
        assert [request.output for request in drafted] == [request.output for request in plain]
        assert sum(request.num_draft_tokens for request in drafted) > 0
