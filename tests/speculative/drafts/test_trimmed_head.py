"""A draft with some rows of the target's vocabulary head: which rows, on which rank, what is refused, and that no token
of an answer depends on it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.deploy.cli import main
from aerie.speculative.build import EngineSpec, plan_engine, plan_weights
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.drafts.trimmed_head import (
    AUTO_ROWS,
    AUTO_ROWS_WITHOUT_MAP,
    FILE,
    gathered_rows,
    head_ids,
    head_rows,
    write_token_map,
)
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.vocab import LMHead
from aerie.workers.layers.weighted import WeightKey
from aerie.workers.models.loading import load_target, read_target_config
from tests.speculative.drafts.test_loading import edited
from tests.speculative.drafts.test_trained_mtp import CHAIN, EOS, MODEL, TREE, accepted_tokens, answers
from tests.support.engine_plans import build_worker
from tests.support.thread_group import on_ranks

CPU = torch.device("cpu")
VOCAB, ROWS = 512, 128
ADDED = [0, 1, 2, 3, 4, 5]  # the tokenizer's own, eos among them


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with a token map of ids from 511 downwards."""
    folder = tmp_path_factory.mktemp("mapped") / "model"
    shutil.copytree(MODEL, folder)
    write_token_map(folder, VOCAB, range(VOCAB - 1, 200, -1))
    return folder


@pytest.mark.parametrize(
    ("setting", "vocab_size", "rows"),
    [
        ("auto", 98_303, None),
        ("auto", 98_304, AUTO_ROWS),
        ("auto", 196_607, AUTO_ROWS),
        ("auto", 248_320, AUTO_ROWS),
        (0, 248_320, None),
        (128, 512, 128),
        (512, 512, None),
        (1000, 512, None),
    ],
)
def test_large_vocabularies_are_trimmed(
    mapped: Path, tmp_path: Path, setting: Any, vocab_size: int, rows: int | None
) -> None:
    assert head_rows(setting, vocab_size, mapped) == rows
    without = AUTO_ROWS_WITHOUT_MAP if vocab_size >= 196_608 else None
    assert head_rows(setting, vocab_size, tmp_path) == (without if setting == "auto" else rows)


def test_rows_are_the_most_frequent_tokens_and_those_that_end_something(mapped: Path, tmp_path: Path) -> None:
    assert head_ids(MODEL, VOCAB, 12, (EOS,)).tolist() == list(range(12))
    assert head_ids(mapped, VOCAB, 12, (EOS, 300)).tolist() == [*ADDED, 300, *range(507, 512)]
    few = tmp_path / "few"
    few.mkdir()
    write_token_map(few, VOCAB, [400])
    assert head_ids(few, VOCAB, 4, (7,)).tolist() == [0, 1, 7, 400], "filled up in the tokenizer's order"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is no token map; make it again: aerie token-map"),
        ('{"vocab_size": 100, "token_ids": [1]}', "was made for a vocabulary of 100, the target has 512"),
        ('{"vocab_size": 512, "token_ids": [512]}', "was made for a vocabulary of 512"),
    ],
)
def test_a_token_map_of_another_model_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        head_ids(tmp_path, VOCAB, 12, ())


def test_sizes_without_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="draft_vocab_size=4: the tokenizer has 6 added tokens, .* set it to 12 or more"
    ):
        head_ids(MODEL, VOCAB, 4, ())
    with pytest.raises(ValueError, match="draft_vocab_size=2: must be at least top_k=4, or 0"):
        SpeculativeConfig("", "mtp", 5, 4, 8, draft_vocab_size=2)
    with pytest.raises(
        ValueError, match="draft_vocab_size=64: is only for method mtp; other heads have the vocabulary"
    ):
        SpeculativeConfig("d", "eagle3", draft_vocab_size=64)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_get_the_same_rows_from_shards(size: int) -> None:
    """With padded shards, one of them empty of wanted rows."""
    table = torch.randn(41, 6, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 3, 4, 14, 15, 40])

    def rows(group: TPGroup) -> torch.Tensor:
        head = LMHead(41, 6, group)
        head.load(WeightKey("weight"), table)
        return gathered_rows(head, ids, "draft x")

    for found in on_ranks(size, rows):
        assert torch.equal(found, table[ids])


def test_ranks_that_would_mean_other_tokens_are_refused() -> None:
    def rows(group: TPGroup) -> torch.Tensor:
        ids = torch.tensor([1, 2, 5, 8]) if group.rank else torch.tensor([1, 3, 4, 8])
        return gathered_rows(LMHead(9, 4, group), ids, "draft x")

    with pytest.raises(ValueError, match="draft x: ranks trim the vocabulary differently; the target's folder must"):
        on_ranks(2, rows)


def test_its_logits_are_those_of_the_targets_head(mapped: Path) -> None:
    source = ModelSource(path=str(mapped), dtype="float32", device="cpu")
    config = read_target_config(source, 1)
    target = load_target(source, config, SOLO, CPU, 8)
    method = read_draft("mtp", "", str(mapped), config).trimmed(ROWS)
    draft = load_draft(method, source, target, SOLO, CPU, 8)
    ids = head_ids(mapped, VOCAB, ROWS, (EOS,))
    assert draft.target_ids is not None and torch.equal(draft.target_ids, ids)
    assert draft.embed_tokens is target.embed_tokens
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(draft.logits(hidden), target.lm_head(hidden)[:, ids])


def test_the_plan_has_its_bytes(tmp_path: Path) -> None:
    large = edited(MODEL, tmp_path / "large", vocab_size=200_000)
    worker = WorkerConfig(ModelSource(str(large), dtype="float32", device="cpu"))
    found = {}
    for setting in (0, "auto", 1000):
        spec = EngineSpec(worker, SpeculativeConfig("", "mtp", draft_vocab_size=setting))  # type: ignore[arg-type]
        found[setting] = plan_weights(spec, plan_engine(spec), multiplies_fp8=True)
    whole = found[0]
    assert whole.head_rows is None
    for setting, rows in (("auto", AUTO_ROWS_WITHOUT_MAP), (1000, 1000)):
        assert (found[setting].head_rows, found[setting].head) == (rows, rows * 96 * 4)
        assert found[setting].draft == whole.draft + found[setting].head


def test_dummy_weights_have_a_trimmed_head_too() -> None:
    worker = WorkerConfig(ModelSource(str(MODEL), device="cpu", load_format="dummy"))
    spec = EngineSpec(worker, SpeculativeConfig("", "mtp", draft_vocab_size=ROWS))
    build_worker(spec, plan_engine(spec))


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [request.output for request in answers(None)]


@pytest.mark.parametrize(
    ("shape", "ranks", "draft_tp", "least"),
    [
        (CHAIN, 1, None, 2.0),
        pytest.param(TREE, 2, None, 2.3, marks=pytest.mark.slow),
        pytest.param(TREE, 2, 1, 2.3, marks=pytest.mark.slow),
    ],
    ids=["chain", "tree, 2 ranks", "tree, 2 ranks, draft whole on each"],
)
def test_a_quarter_of_the_vocabulary_changes_no_token(
    plain: list[list[int]], shape: tuple[int, int, int], ranks: int, draft_tp: int | None, least: float
) -> None:
    """Greedy and drawn, see `test_trained_mtp`."""
    requests = answers(shape, ranks, draft_vocab_size=ROWS, draft_tp=draft_tp)
    assert [request.output for request in requests] == plain
    assert accepted_tokens(requests) > least


def test_the_command_counts_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(MODEL, folder)
    rows.write_text(json.dumps({"question": "1 1 1 1", "answer": "2 2 1"}) + "\n")
    assert main(["token-map", str(folder), "--data", str(rows)]) == 0
    assert "tokens occur, in a text of " in capsys.readouterr().out
    content = json.loads((folder / FILE).read_text())
    assert content["vocab_size"] == VOCAB and len(content["token_ids"]) == len(set(content["token_ids"])) < 8
    assert main(["token-map", str(folder), "--data", str(tmp_path / "none.jsonl")]) == 2
