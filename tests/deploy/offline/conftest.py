"""One engine of the embedded pair for all tests of a file."""

from collections.abc import Iterator

import pytest
import torch

from aerie.deploy.offline.llm import LLM
from tests.support.ranks import forked_ranks  # noqa: F401 - every test has it


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM("eagle", tensor_parallel_size=1) as llm:
        yield llm
