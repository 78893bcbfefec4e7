"""A GGUF file's tokenizer as the files of a model folder: tokenizer.json, tokenizer_config.json, the chat template and
generation_config.json.

Texts are split by the rules of llama.cpp (`src/llama-vocab.cpp`) and of the published tokenizer.json. transformers
(5.17) instead splits all texts of byte-level vocabularies by GPT-2's rule. With that rule, digits in texts for SmolLM2
or Llama 3 would become other tokens than in training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_SPACE = "▁"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = rf"{_CASED.replace('{end}', f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_PATHS}"
_TEKKEN = rf"{_CASED.replace('{end}', '')}|\p{{N}}|{_PATHS}"
# By tokenizer.ggml.pre: patterns, applied one after the other, and whether a word that is a token stays whole.
_SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    **dict.fromkeys(("gpt-2", "olmo"), ((_GPT2,), False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), ((r"\p{N}", _GPT2), False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), ((_LLAMA3,), True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ((_LLAMA3,), False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), ((_QWEN2,), False)),
    **dict.fromkeys(("gpt-4o", "llama4"), ((_O200K,), False)),
    "tekken": ((_TEKKEN,), True),
}
_NORMALISED = ("qwen2", "deepseek-r1-qwen")  # to NFC
# Tokens that end a turn, which older files do not list, by their texts.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class Vocabulary:
    """Converts a GGUF file's vocabulary to the files of a model folder.

    metadata: the file's metadata.
    source: names it in errors.
    """

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata, self._source = metadata, source
        self._tokens: list[str] = self._get("tokens", [])
        kinds = self._get("token_type") or [_NORMAL] * len(self._tokens)
        if not self._tokens or len(kinds) != len(self._tokens):
            raise ValueError(f"{source}: has no complete list of tokens; give a tokenizer's folder by --tokenizer")
        self._kinds: list[int] = kinds

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _token(self, key: str) -> str | None:
        """Return a named special token's text."""
        number = self._get(f"{key}_token_id")
        return self._tokens[number] if isinstance(number, int) and 0 <= number < len(self._tokens) else None

    @property
    def end_ids(self) -> list[int]:
        """Return the tokens that end an answer."""
        named = [self._get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        by_text = [i for i, kind in enumerate(self._kinds) if kind == _CONTROL and self._tokens[i] in _ENDS]
        return list(dict.fromkeys(token for token in [*named, *by_text] if isinstance(token, int)))

    def config_files(self) -> dict[str, Any]:
        """Return the JSON of the files other than tokenizer.json, by name; a template's as text."""
        special = {name: self._token(key) for key, name in _SPECIAL.items()}
        config = {name: text for name, text in special.items() if text is not None}
        sampling = {name: self._metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        generation = {"eos_token_id": self.end_ids, "bos_token_id": self._get("bos_token_id")}
        files: dict[str, Any] = {
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **config},
            "generation_config.json": {
                name: value for name, value in (generation | sampling).items() if value not in (None, [])
            },
        }
        if template := self._metadata.get("tokenizer.chat_template"):
            files["chat_template.jinja"] = template
        for name in self._metadata.get("tokenizer.chat_templates", []):
            files[f"additional_chat_templates/{name}.jinja"] = self._metadata.get(f"tokenizer.chat_template.{name}", "")
        return files

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ValueError for a kind that is not supported."""
        kind = self._get("model")
        makers: dict[Any, Callable[[], Tokenizer]] = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if kind not in makers:
            known = " and ".join(makers)
            raise ValueError(
                f"{self._source}: a tokenizer of the kind {kind} is not supported, only {known}; give the model's own "
                "by --tokenizer FOLDER"
            )
        tokenizer = makers[kind]()
        self._add_tokens(tokenizer)
        self._add_ends(tokenizer, is_default=kind == "llama")
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        """Return a byte-level BPE tokenizer with the splits of `tokenizer.ggml.pre`. Raises ValueError for unknown
        ones."""
        pre = str(self._get("pre", "default"))
        if pre not in _SPLITS:
            raise ValueError(
                f"{self._source}: tokenizer.ggml.pre={pre!r} is not supported; supported are {', '.join(_SPLITS)}; "
                "give the model's own tokenizer by --tokenizer FOLDER"
            )
        patterns, keeps_words = _SPLITS[pre]
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("merges", [])]
        tokenizer = Tokenizer(BPE(self._numbers(self._tokens), merges, ignore_merges=keeps_words))
        if pre in _NORMALISED:
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, whole])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """Build the tokenizer of a SentencePiece vocabulary: BPE with bytes for unknown characters."""
        pieces = self._get("merges")
        merges = [tuple(merge.split(" ", 1)) for merge in pieces] if pieces else self._merges_by_score()
        unknown = self._token("unknown")
        tokenizer = Tokenizer(
            BPE(self._numbers(self._tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefixed = bool(self._get("add_space_prefix", True))
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
        return tokenizer

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Return the merges of which SentencePiece stores only the results: pairs of tokens that make a token, in
        descending order of its score. User-defined tokens are found in the text first, as in SentencePiece."""
        mergeable = {token: i for i, token in enumerate(self._tokens) if self._kinds[i] == _NORMAL}
        scores = self._get("scores") or [0.0] * len(self._tokens)
        merges = []
        for token, number in mergeable.items():
            pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
            own = [pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable]
            own.sort(key=lambda pair: (mergeable[pair[0]], mergeable[pair[1]]))
            merges += [(-scores[number], pair) for pair in own]
        return [pair for _, pair in sorted(merges, key=lambda scored: scored[0])]

    def _numbers(self, tokens: list[str]) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for number, token in enumerate(tokens):
            numbers.setdefault(token, number)
        return numbers

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """Make control and user-defined tokens be found in texts before all others, the longest first."""
        special = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
        added = [
            AddedToken(token, normalized=False, special=special[kind])
            for token, kind in zip(self._tokens, self._kinds, strict=True)
            if kind in special and token
        ]
        tokenizer.add_tokens(added)

    def _add_ends(self, tokenizer: Tokenizer, is_default: bool) -> None:
        """Make texts begin with the first token, and end with the last one, if the file says so. is_default: whether
        texts begin with it if the file does not say."""
        texts = {"bos": self._token("bos"), "eos": self._token("eos")}
        has = {"bos": self._get("add_bos_token", is_default), "eos": self._get("add_eos_token", False)}
        ids = [(text, self._get(f"{key}_token_id")) for key, text in texts.items() if has[key] and text is not None]
        if not ids:
            return
        first, last = ([texts[key]] if has[key] and texts[key] else [] for key in ("bos", "eos"))
        one, two = [*first, "$A", *last], [*first, "$B:1", *last]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(map(str, one)), pair=" ".join(map(str, one + two)), special_tokens=ids
        )


def write_vocabulary(metadata: Mapping[str, Any], source: str, folder: Path, dump: Callable[[Path, Any], None]) -> None:
    """Write the files of the tokenizer into `folder`. dump: writes JSON, or text as it is. Raises ValueError."""
    vocabulary = Vocabulary(metadata, source)
    vocabulary.tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in vocabulary.config_files().items():
        dump(folder / name, content)
