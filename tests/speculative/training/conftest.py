"""A tiny random target and its tokenizer, shared by the training tests."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from aerie.deploy.train_draft import add_command
from aerie.kernels.lazy_import import load
from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.training.eagle3 import draft_config, read_draft_config
from aerie.speculative.training.rows import Conversation, Turn
from tests.support.targets.__main__ import main as train_target
from tests.support.targets.llama import build_target, build_tokenizer

VOCAB_SIZE, MAX_POSITIONS = 300, 256


@pytest.fixture(scope="session")
def conversations() -> list[Conversation]:
    return [
        Conversation((Turn("user", f"What is {a} plus {b}?"), Turn("assistant", f"{a} plus {b} is {a + b}.")))
        for a in range(7)
        for b in range(5)
    ]


@pytest.fixture(scope="session")
def tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerBase:
    return build_tokenizer(conversations, VOCAB_SIZE, MAX_POSITIONS)


@pytest.fixture
def target(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
    )
    return build_target(config, tokenizer, seed=1).eval()


@pytest.fixture
def method(target: PreTrainedModel) -> Eagle3:
    """A head for the target, with a vocabulary of 64."""
    return read_draft_config(draft_config(target, 64), target, Path("draft"))


@pytest.fixture(scope="session", autouse=True)
def frozen_modules() -> None:
    """The Trainer collects garbage before each training, which would take half a second among torch's objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny matrices: more threads only make the tests slower and their sums less repeatable."""
    torch.set_num_threads(1)


@pytest.fixture
def rows(tmp_path: Path, conversations: list[Conversation]) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"messages": conversation.messages()}) for conversation in conversations]
    path.write_text("\n".join(lines))
    return path


def run(line: str) -> int:
    """`aerie train-draft ...`."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    arguments = parser.parse_args([*line.split(), "--device", "cpu"])
    return int(load(arguments.run)(arguments))


def train_small(line: str) -> int:
    """`python -m tests.support.targets ...`."""
    return train_target([*line.split(), "--device", "cpu"])
