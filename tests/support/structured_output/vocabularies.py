"""Small tokenizers of the published kinds, trained on a few sentences; the folder of each holds its tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    'The quick brown fox says {"name": "Ann", "age": 31, "ok": true, "list": [1, 2.5, -3e4], "none": null}.',
    "yes no maybe false true answer call function arguments 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ _-+*/=<>()!?@#$%^&",
    "Grüße aus Köln, ça va, привет мир, 你好世界, こんにちは, 😀😁",
] * 4
END = "<|end|>"


def byte_level() -> Tokenizer:
    """GPT-2's, Llama 3's, Qwen's kind: a token for each byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _trained(tokenizer, trainers.BpeTrainer, 420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def byte_level_without_some_bytes() -> Tokenizer:
    """SmolLM2's kind, with the decoder that transformers gives a GGUF file: only the bytes of the training's text."""
    tokenizer = Tokenizer(models.BPE(unk_token=END, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(steps)
    return _trained(tokenizer, trainers.BpeTrainer, 300, initial_alphabet=[])


def byte_level_stripped() -> Tokenizer:
    """The same with a space before the text, which the decoder removes."""
    tokenizer = byte_level_without_some_bytes()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's and Mistral's kind: U+2581 for spaces, and tokens for bytes."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _with_byte_tokens([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")], steps)


def sentencepiece_of_gguf() -> Tokenizer:
    """The same with the decoder's steps in transformers' order for a GGUF file."""
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    return _with_byte_tokens([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")], steps)


def sentencepiece_unstripped() -> Tokenizer:
    """Gemma's kind: no space before the text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_byte_tokens([normalizers.Replace(" ", "▁")], steps)


def unigram() -> Tokenizer:
    """T5's kind: pieces with U+2581, without tokens for bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer, 200, unk_token="<unk>")


def wordpiece() -> Tokenizer:
    """BERT's kind: "##" continues a word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=END))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    return _trained(tokenizer, trainers.WordPieceTrainer, 300)


KINDS: tuple[Callable[[], Tokenizer], ...] = (
    byte_level,
    byte_level_without_some_bytes,
    byte_level_stripped,
    sentencepiece,
    sentencepiece_of_gguf,
    sentencepiece_unstripped,
    unigram,
    wordpiece,
)


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    """Write tokenizer.json to `folder`, and return `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _trained(tokenizer: Tokenizer, trainer: Callable[..., object], size: int, **options: object) -> Tokenizer:
    made = trainer(vocab_size=size, special_tokens=["<unk>", END], show_progress=False, **options)
    tokenizer.train_from_iterator(SENTENCES, made)
    tokenizer.add_tokens([AddedToken("<call>"), AddedToken("<a call>")])
    return tokenizer


def _with_byte_tokens(before: list[normalizers.Normalizer], steps: list[decoders.Decoder]) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(before)
    _trained(trained, trainers.BpeTrainer, 300)
    known = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = dict(known["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [(left, right) for left, right in known["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(before), decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", END])
    tokenizer.add_tokens([AddedToken("<call>"), AddedToken("<a call>")])
    return tokenizer
