"""A tiny random checkpoint with a byte-level tokenizer and a chat template, for whole-path tests."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_models import make_eagle3, make_target

VOCAB = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Target with tokenizer, and a draft for it. Token 1 ends a text, and begins none of those that tests ask for."""
    target = make_target(folder / "target", vocab_size=VOCAB, num_hidden_layers=8)
    make_tokenizer(target)
    return target, make_eagle3(folder / "draft", target)


def make_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """One token per byte, plus <s> and </s> and words up to `vocab` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    vocabulary |= {f"filler{i}": i for i in range(len(vocabulary), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
