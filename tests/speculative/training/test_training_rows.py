"""Rows of every form are read, and bad ones are refused with their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aerie.speculative.training.rows import (
    Conversation,
    RowError,
    Turn,
    read_conversations,
    split_validation,
)
from tests.support.targets.llama import without_calc_marks


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Why?", "answer": "So."},
        {"instruction": "Why?", "input": "", "response": "So."},
        {"instruction": "Why?", "output": "So."},
        {"prompt": "Why?", "response": "So.", "id": 7},
        {"prompt": "Why?", "completion": "So."},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]},
    ],
)
def test_every_row_form_gives_the_same_conversation(tmp_path: Path, row: dict[str, object]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    wanted = Conversation((Turn("user", "Why?"), Turn("assistant", "So.")))
    assert read_conversations([str(tmp_path)]) == [wanted]


def test_an_instruction_s_input_follows_on_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "Add.", "input": "1, 2", "response": "3"}]))
    assert read_conversations([str(tmp_path)])[0].turns[0].content == "Add.\n1, 2"


def test_a_source_may_be_repeated_and_a_folder_holds_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"question": "a", "answer": "b"}]))
    (tmp_path / "b.jsonl").write_text('{"question": "c", "answer": "d"}\n\n{"question": "e", "answer": "f"}\n')
    found = read_conversations([f"{tmp_path}@2"])
    assert [conversation.turns[0].content for conversation in found] == ["a", "c", "e"] * 2


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"question": "c"}', r"rows.jsonl:2: keys \['question'\] fit no known format; use one of: messages; turns"),
        ("{no json", r"rows.jsonl:2: not valid JSON"),
        ('{"question": "c", "answer": 5}', r"rows.jsonl:2: 'answer' must be a string, not int"),
        ('{"question": "c", "answer": " "}', r"rows.jsonl:2: 'question' and 'answer' must not be empty"),
        ('["c"]', r"rows.jsonl:2: a row must be a JSON object, not list"),
        ('{"messages": [{"role": "robot", "content": "c"}]}', r"rows.jsonl:2: role='robot' is unknown; use one of"),
        ('{"messages": []}', r"rows.jsonl:2: 'messages' must be a list"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_remedy(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(RowError, match=text):
        read_conversations([str(path)])


def test_a_bad_row_of_a_list_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a", "response": "b"}, {"prompt": "a"}]))
    with pytest.raises(RowError, match=r"rows.json: row 2: keys \['prompt'\]"):
        read_conversations([str(path)])


def test_a_source_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file or folder; give a \.json or \.jsonl file"):
        read_conversations([str(tmp_path / "absent.json")])
    with pytest.raises(ValueError, match=r"the folder holds no \.json or \.jsonl file"):
        read_conversations([str(tmp_path)])


def test_validation_is_a_seeded_share_that_spares_repeated_rows(conversations: list[Conversation]) -> None:
    wanted = Conversation((Turn("user", "Hello"), Turn("assistant", "Hi")))
    rows = [*conversations, wanted, wanted]
    train, held = split_validation(rows, 0.2, seed=3)
    assert len(held) == 7 and wanted not in held
    assert sorted(map(repr, train + held)) == sorted(map(repr, rows))
    assert split_validation(rows, 0.2, seed=3) == (train, held)


def test_calc_marks_go_and_the_sum_stays() -> None:
    marked = Conversation((Turn("assistant", "48/2 = <<48/2=24>>24 clips"),))
    assert without_calc_marks(marked).turns[0].content == "48/2 = 24 clips"
