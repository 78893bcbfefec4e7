"""The models of `tests.bench` that are given by a config.json."""

import json
from pathlib import Path
from typing import Any

from aerie.speculative.drafts.trimmed_head import AUTO_ROWS, write_token_map
from tests.bench.models import deepseek_rank, hybrids, published

CONFIGS: dict[str, dict[str, Any]] = {**deepseek_rank.CONFIGS, **hybrids.CONFIGS, **published.CONFIGS}


def write_config(folder: Path, name: str, block_draft: str = "dflash") -> None:
    """config.json of the target under `folder`; the weights are dummies. A hybrid gets a token map as `aerie token-map`
    makes it, for a draft head of its size; a model without a module to draft with gets the block draft it has here, of
    the kind `block_draft`."""
    (folder / "target").mkdir(parents=True)
    (folder / "target" / "config.json").write_text(json.dumps(CONFIGS[name]))
    if name in hybrids.CONFIGS:
        write_token_map(folder / "target", CONFIGS[name]["vocab_size"], range(AUTO_ROWS))
    published.write_draft(folder, name, block_draft)


def floor_bytes(
    folder: Path, name: str, requests: int, width: int, tokens: float, passes: int, draft_rows: int, ranks: int = 1
) -> float:
    """Bytes that a round of `requests` with `width` rows each must move: see the model's module. folder: that
    `write_config` wrote to."""
    rows = requests * width
    if name in published.CONFIGS:
        contexts = [tokens / requests] * requests
        return published.floor_bytes(folder / "target", name, rows, contexts, passes) / ranks
    if name in published.DRAFTS:
        target = hybrids.floor_bytes(name, rows, tokens, 0, draft_rows, ranks, requests)
        return target + (published.block_draft_bytes(folder / "draft", passes) / ranks if passes else 0)
    if name in hybrids.CONFIGS:
        return hybrids.floor_bytes(name, rows, tokens, passes, draft_rows, ranks, requests)
    return deepseek_rank.floor_bytes(name, rows, tokens, passes, draft_rows, ranks)
