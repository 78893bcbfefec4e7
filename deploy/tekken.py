"""`aerie tekken`: creates tokenizer.json from tekken.json, for Mistral checkpoints that lack it.

mistral-common reads tekken.json too, but needs numpy below 2.4 on Python up to 3.12; other packages need a later one.
"""

import argparse
import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from aerie.cluster.config import ConfigError
from aerie.deploy.config.hub import model_folder
from aerie.workers.structured_output.token_bytes import BYTE_OF

# Special tokens of a tekken.json that lists none (mistral-common 1.13, tokens/tokenizers/tekken.py).
_DEFAULT_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "TokenizersBackend"}
_CHARACTER = {byte: character for character, byte in BYTE_OF.items()}


def run(arguments: argparse.Namespace) -> int:
    """Write tokenizer.json, and tokenizer_config.json if it is missing. Raises ConfigError."""
    folder = model_folder(arguments.model, None)
    source, file = folder / "tekken.json", folder / "tokenizer.json"
    if file.exists():
        raise ConfigError(f"{file}: is there already; remove it to have it written from tekken.json")
    tokenizer = tekken_tokenizer(_read(source), str(source))
    tokenizer.save(str(file))
    print(f"{file}: {tokenizer.get_vocab_size()} tokens")
    config = folder / "tokenizer_config.json"
    if not config.exists():
        config.write_text(json.dumps(_CONFIG, indent=2) + "\n")
        print(f"{config}: names of special tokens")
    if not (folder / "chat_template.jinja").exists() and "chat_template" not in json.loads(config.read_text()):
        print("chats need a chat_template.jinja, too; completions do not")
    return 0


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold a JSON object; download it again")
    return content


def tekken_tokenizer(content: Mapping[str, Any], source: str) -> Tokenizer:
    """Return the tokenizer of a tekken.json: special tokens, then byte-level BPE by rank. Raises ConfigError.

    source: names the file in errors.
    """
    try:
        config = content["config"]
        num_special, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        special = _special_tokens(content.get("special_tokens"), num_special)
        words = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][: size - num_special]]
        pattern = Regex(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: is no tekken.json ({error!r}); download it again") from None
    vocab = {text: id for id, text in enumerate(special)}
    vocab |= {_printed(word): num_special + rank for rank, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_merges(words)), ignore_merges=True))
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if "<s>" in vocab:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
        )
    return tokenizer


def _special_tokens(listed: list[Mapping[str, Any]] | None, number: int) -> list[str]:
    """Return the special tokens by id. Ids without a text get mistral-common's filler names."""
    named = {int(entry["rank"]): str(entry["token_str"]) for entry in listed or ()} or dict(enumerate(_DEFAULT_TOKENS))
    return [named.get(id, f"<SPECIAL_{id}>") for id in range(number)]


def _merges(words: list[bytes]) -> Iterator[tuple[str, str]]:
    """Return all pairs of tokens that merge into one, in the order of the merged token's rank."""
    rank_of = {word: rank for rank, word in enumerate(words)}
    for word in words:
        pairs = [(word[:at], word[at:]) for at in range(1, len(word))]
        known = [pair for pair in pairs if pair[0] in rank_of and pair[1] in rank_of]
        for left, right in sorted(known, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]])):
            yield _printed(left), _printed(right)


def _printed(word: bytes) -> str:
    """Return a word in the spelling of byte-level vocabularies."""
    return "".join(map(_CHARACTER.__getitem__, word))
