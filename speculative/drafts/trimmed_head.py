"""Trims the target's vocabulary head to the most frequent tokens, for a draft (FR-Spec, arXiv 2502.14856).

A draft reads the whole head in every step, and most tokens of a large vocabulary are rare. Verification uses the whole
head, so the draft's smaller one changes the number of accepted drafts, but no emitted token. The frequent tokens are in
`FILE` in the target's folder, which `aerie token-map` writes. Without the file, they are the tokenizer's first tokens,
because merges are learnt in order of frequency. Called by `aerie.speculative.build` and
`aerie.speculative.drafts.loading`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.layers.vocab import LMHead

FILE = "token_map.json"
# Rows of "auto", chosen by the measured shares of text that they cover (docs/commands.md, "aerie token-map"). A token
# that a draft cannot propose ends a path, so more rows are needed without a map.
AUTO_ROWS = 32_768
AUTO_ROWS_WITHOUT_MAP = 65_536  # rows of the head that "auto" keeps without a file of frequent tokens
_AUTO_SHARE = 3  # "auto" trims only to a third or less; otherwise it saves too little for the proposals that it loses
_BLOCK_ROWS = 4096  # rows that ranks exchange at a time


def head_rows(setting: int | Literal["auto"], vocab_size: int, folder: str | Path) -> int | None:
    """Return the number of rows of the trimmed head; None for the target's whole head.

    setting: `speculative.draft_vocab_size`.
    folder: the target's.
    """
    if setting == "auto":
        rows = AUTO_ROWS if (Path(folder) / FILE).is_file() else AUTO_ROWS_WITHOUT_MAP
        setting = rows if rows * _AUTO_SHARE <= vocab_size else 0
    return setting if 0 < setting < vocab_size else None


def head_ids(folder: str | Path, vocab_size: int, size: int, end_ids: Sequence[int]) -> Tensor:
    """Return the target's ids of the trimmed head's rows: [size] int64 on the CPU, ascending.

    folder: the target's.
    end_ids: tokens that end an answer. They and the tokenizer's added tokens are always among the rows, because they
        are rare but mark where parts of a chat begin and end.
    Raises ValueError for a token map of another vocabulary, and for a size that these tokens alone exceed.
    """
    forced = [*end_ids, *_added_tokens(Path(folder))]
    wanted = dict.fromkeys(id for id in forced if id < vocab_size)
    if len(wanted) > size:
        raise ValueError(
            f"speculative.draft_vocab_size={size}: the tokenizer has {len(wanted)} added tokens, which a draft always "
            f"has; set it to {2 * len(wanted)} or more, or to 0 for the whole vocabulary"
        )
    for id in (*read_token_map(Path(folder), vocab_size), *range(vocab_size)):
        if len(wanted) == size:
            break
        wanted[id] = None
    return torch.tensor(sorted(wanted), dtype=torch.int64)


def read_token_map(folder: Path, vocab_size: int) -> list[int]:
    """Return token ids, the most frequent first; [] without a token map in `folder`. Raises ValueError for a bad
    one."""
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        made_for, ids = content["vocab_size"], content["token_ids"]
        fits = made_for == vocab_size and all(type(id) is int and 0 <= id < vocab_size for id in ids)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: is no token map; make it again: aerie token-map {folder}") from None
    if not fits:
        raise ValueError(
            f"{file}: was made for a vocabulary of {made_for}, the target has {vocab_size}; make it again: "
            f"aerie token-map {folder}"
        )
    return list(ids)


def write_token_map(folder: Path, vocab_size: int, ids: Iterable[int]) -> Path:
    """Write ids, the most frequent first, into the target's folder. Return the file. Raises OSError."""
    file = folder / FILE
    file.write_text(json.dumps({"vocab_size": vocab_size, "token_ids": list(ids)}) + "\n", encoding="utf-8")
    return file


def gathered_rows(head: LMHead, ids: Tensor, source: str) -> Tensor:
    """Return the rows `ids` of the target's head, [n, hidden], on every rank of its group. A collective.

    ids: [n] int64, ascending, on the head's device.
    source: the draft, for errors.
    Raises ValueError if the ranks' ids differ (their nodes have different files), and for a quantised head.
    """
    method = head.method.base
    if not isinstance(method, DenseLinearMethod):
        raise ValueError(
            f"{source}: the target's vocabulary head is quantised, so its rows cannot be selected; set "
            "speculative.draft_vocab_size: 0"
        )
    shard, weight = head.shard, method.dense_weight()
    if shard.group.size > 1:
        _check_equal(head, ids, source)
    blocks = []
    for block in torch.split(ids, _BLOCK_ROWS):
        local = block - shard.first
        mine = (local >= 0) & (local < shard.end - shard.first)
        rows = weight.index_select(0, torch.where(mine, local, 0)) * mine.unsqueeze(1)
        blocks.append(shard.group.all_reduce(rows.contiguous()))
    return torch.cat(blocks)


def _check_equal(head: LMHead, ids: Tensor, source: str) -> None:
    """Raise ValueError unless all ranks have the same ids; otherwise they would verify different trees."""
    weights = torch.arange(1, ids.shape[0] + 1, device=ids.device)
    # exact in float64: integers below 2^53
    sums = torch.stack(((ids * weights % 1_000_003).sum(), ids.sum())).double()
    gathered = head.shard.group.all_gather(sums)
    if not bool((gathered == gathered[0]).all()):
        raise ValueError(
            f"{source}: ranks trim the vocabulary differently; the target's folder must hold the same tokenizer.json "
            f"and {FILE} on every node"
        )


def _added_tokens(folder: Path) -> list[int]:
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return [int(token["id"]) for token in content.get("added_tokens", [])]
    except (OSError, ValueError, TypeError, KeyError):
        return []  # only targets in tests lack a tokenizer; a server has checked this before
