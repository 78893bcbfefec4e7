"""`aerie token-map`: counts each token of a model in a text, for drafts with a trimmed vocabulary head."""

import argparse
import json
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from aerie.cluster.config import ConfigError
from aerie.deploy.config.hub import model_folder
from aerie.speculative.drafts.trimmed_head import AUTO_ROWS, write_token_map
from aerie.speculative.training.rows import read_conversations

_BATCH = 1024  # texts tokenized at once


def run(arguments: argparse.Namespace) -> int:
    """Write the map to the model's folder and print its coverage of the text. Raises ConfigError, TrainingError."""
    folder = model_folder(arguments.model, None)
    texts = [turn.content for row in read_conversations(arguments.data) for turn in row.turns]
    counts = _counts(folder, texts)
    ids = sorted(counts, key=lambda id: (-counts[id], id))
    file = write_token_map(folder, _vocab_size(folder), ids)
    total = sum(counts.values())
    print(f"{file}: {len(ids)} of the vocabulary's tokens occur, in a text of {total} tokens")
    for rows in (AUTO_ROWS // 4, AUTO_ROWS // 2, AUTO_ROWS):
        if rows < len(ids):
            share = sum(counts[id] for id in ids[:rows]) / total
            print(f"the {rows} most frequent are {share:.2%} of it")
    return 0


def _counts(folder: Path, texts: list[str]) -> Counter[int]:
    """Count the tokens of the texts with the model's tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file}: missing; save the tokenizer in the fast format (transformers' save_pretrained)")
    tokenizer = Tokenizer.from_file(str(file))
    counts: Counter[int] = Counter()
    for start in range(0, len(texts), _BATCH):
        for encoding in tokenizer.encode_batch(texts[start : start + _BATCH], add_special_tokens=False):
            counts.update(encoding.ids)
    return counts


def _vocab_size(folder: Path) -> int:
    """Return the vocabulary size in config.json, which may nest the text model's configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ConfigError(f"{folder / 'config.json'}: has no vocab_size; give the folder of a language model")
    return size
