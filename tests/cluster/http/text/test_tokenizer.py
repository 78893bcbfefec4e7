"""The edge's tokenizer against transformers' own, and text from tokens one at a time against decoding all at once."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from aerie.cluster.http.text.chat_template import ChatTemplate, ChatTemplateError
from aerie.cluster.http.text.detokenizer import MAX_HELD_TOKENS, PrefixDetokenizer
from aerie.cluster.http.text.tokenizer import LONG_TEXT, ChatTokenizer
from tests.support.fake_engine import CHATML, EOS, chat_tokenizer, small_tokenizer

T = TypeVar("T")

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<|start|>system {{ strftime_now("%Y") }}
{{ system }}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
{% generation %}<|start|>assistant {{ message['content'] }}{% endgeneration %}
    {%- else %}
<|start|>{{ message['role'] }} {{ message['content'] }}{{ eos_token }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% if thinking is defined and not thinking %} quick{% endif %}
{% endif %}"""

CONVERSATIONS = [
    [{"role": "user", "content": "hello world"}],
    [
        {"role": "system", "content": "  Be <b>brief</b> & kind.\n"},
        {"role": "user", "content": "ä€𝄞\u2028 \\n {{ x }}"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|>"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"é": [1, "<"]}}}]},
        {"role": "tool", "content": "12"},
    ],
]


@pytest.fixture(scope="module", params=[CHATML, LLAMA_LIKE], ids=["chatml", "llama-like"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    fast = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer(), eos_token=EOS, bos_token="<|endoftext|>")
    fast.chat_template = request.param
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [266, 268], "top_k": 20}))
    return path


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
async def test_chat_prompts_equal_those_of_transformers(
    folder: Path, messages: list[dict[str, object]], add_generation_prompt: bool
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTokenizer.from_folder(folder)
    for variables in ({}, {"thinking": False}):
        text = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
        assert ours.render(messages, add_generation_prompt, variables).text == text
        assert await ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids


def test_end_of_sequence_ids_are_the_generation_configs_and_the_tokenizers_own(folder: Path) -> None:
    assert ChatTokenizer.from_folder(folder).eos_token_ids == (266, 268)
    assert ChatTokenizer.from_folder(folder).sampling_defaults == {"top_k": 20}


def test_ingress_process_does_not_import_torch() -> None:
    code = "import sys, aerie.cluster.http.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_folder_without_a_fast_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: missing; save the tokenizer in the fast format"):
        ChatTokenizer.from_folder(tmp_path)


def test_developer_becomes_system_only_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(messages) == "system"
    shows = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert ChatTemplate("{# developer #}" + shows, {}).render(messages) == "developer: x"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", {}).render(messages) == "system"  # and no text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", r"cannot render these messages \(TypeError\)"),
        ("{{ messages.clear() }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_template_that_fails_says_why(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_template_that_does_not_parse_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"chat template: .* \(line 1\)"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_text_equals_decoding_at_once_for_any_tokens(skip: bool) -> None:
    """Random tokens: most sequences are not valid UTF-8, and some ids are beyond the vocabulary."""
    tokenizer, edge, rng = small_tokenizer(), chat_tokenizer(), random.Random(1)
    for _ in range(500):
        tokens = [rng.randrange(edge.vocab_size + 3) for _ in range(rng.randrange(20))]
        detokenizer = edge.detokenizer(skip)
        text = "".join(map(detokenizer.step, tokens)) + detokenizer.flush()
        assert text == tokenizer.decode(tokens, skip_special_tokens=skip), tokens


def test_character_split_over_tokens_comes_when_it_is_whole() -> None:
    edge = chat_tokenizer()
    detokenizer = edge.detokenizer(True)
    tokens = small_tokenizer().encode("𝄞a", add_special_tokens=False).ids
    assert [detokenizer.step(token) for token in tokens] == ["", "", "", "𝄞", "a"]
    assert [detokenizer.step(token) for token in tokens[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def _sentencepiece_like() -> Tokenizer:
    """Words with U+2581 for spaces and byte tokens for what is no word, as Llama 2 has them."""
    words = ["<unk>", "▁hello", "▁world", "▁", "lo", "!"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(LLAMA)
    return tokenizer


def _byte_tokens(text: str) -> list[int]:
    return [6 + byte for byte in text.encode()]


def test_prefix_detokenizer_equals_decoding_at_once() -> None:
    tokenizer, rng = _sentencepiece_like(), random.Random(2)
    edge = ChatTokenizer(tokenizer, None, ())
    parts = [[1], [2], [3], [4], [5], _byte_tokens("ä"), _byte_tokens("€"), _byte_tokens("𝄞")]
    for _ in range(200):
        tokens = [token for part in rng.choices(parts, k=10) for token in part]
        detokenizer = edge.detokenizer(True)
        assert isinstance(detokenizer, PrefixDetokenizer)
        text = "".join(map(detokenizer.step, tokens)) + detokenizer.flush()
        assert text == tokenizer.decode(tokens), tokens


@pytest.mark.parametrize("decoder", [decoders.Sequence(LLAMA), decoders.Sequence(LLAMA[:-1]), decoders.Metaspace()])
def test_the_bytes_of_a_token_are_its_part_of_a_text(decoder: Any) -> None:
    """Log-probabilities name tokens by them: of Llama 2's, Gemma's and T5's tokenizers."""
    tokenizer, rng = _sentencepiece_like(), random.Random(3)
    tokenizer.decoder = decoder
    edge = ChatTokenizer(tokenizer, None, ())
    has_bytes = not isinstance(decoder, decoders.Metaspace)
    parts = [[1], [2], [3], [4], [5], *(_byte_tokens(each) for each in "aä€𝄞" if has_bytes)]
    for _ in range(100):
        tokens = [token for part in rng.choices(parts, k=8) for token in part]
        text, whole = b"".join(map(edge.token_bytes, tokens)).decode(), tokenizer.decode(tokens)
        assert text in (whole, " " + whole), tokens  # without the space that begins a text
    assert [edge.token_bytes(token) for token in (1, 2, 3, 4, 10**6)] == [b" hello", b" world", b" ", b"lo", b""]
    assert not has_bytes or [edge.token_bytes(6 + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]


def test_completion_continues_its_prompt_with_a_space() -> None:
    edge = ChatTokenizer(_sentencepiece_like(), None, ())
    assert edge.detokenizer(True, before=[1]).step(2) == " world"
    assert edge.detokenizer(True).step(2) == "world"


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    detokenizer = ChatTokenizer(_sentencepiece_like(), None, ()).detokenizer(True)
    texts = [detokenizer.step(6 + 0x80) for _ in range(3 * MAX_HELD_TOKENS)]
    assert "\ufffd" in "".join(texts)
    assert detokenizer.step(4) == "lo"


async def test_long_text_is_encoded_as_a_short_one() -> None:
    edge = chat_tokenizer()
    assert await edge.encode("hello world" * 1000, False) == (await edge.encode("hello world", False)) * 1000


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("made", [small_tokenizer, _sentencepiece_like])
async def test_many_tokens_are_decoded_as_few_are(made: Callable[[], Tokenizer], skip: bool) -> None:
    edge, rng = ChatTokenizer(made(), None, ()), random.Random(4)
    tokens = [rng.randrange(edge.vocab_size + 3) for _ in range(LONG_TEXT + 1)]
    assert await edge.decode_long(tokens, skip) == made().decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize(("made", "count"), [(small_tokenizer, 3_000_000), (_sentencepiece_like, 500_000)])
async def test_event_loop_goes_on_while_many_tokens_are_decoded(made: Callable[[], Tokenizer], count: int) -> None:
    text, turns = await _result_and_turns(ChatTokenizer(made(), None, ()).decode_long([66] * count))
    assert len(text) == count
    assert turns > 10


async def test_event_loop_goes_on_while_a_long_text_is_encoded() -> None:
    """1 MB takes 0.3 s or more, in which a loop that goes on turns some hundred times and one that hangs once or
    twice."""
    tokens, turns = await _result_and_turns(chat_tokenizer().encode("a" * 1_000_000, False))
    assert len(tokens) == 1_000_000
    assert turns > 10


async def _result_and_turns(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Return what `work` returns, and how many turns the event loop had meanwhile."""
    working, turns = asyncio.ensure_future(work), 0
    while not working.done():
        await asyncio.sleep(0.001)
        turns += 1
    return await working, turns


async def test_tokens_that_only_the_configuration_has_are_added(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    added = {
        str(size): {"content": "<|new|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<tag>", "special": False, "lstrip": True},
        str(size + 9): {"content": "<|far|>", "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    edge = ChatTokenizer.from_folder(folder)
    text = "a <|new|> b <tag>c"
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    assert await edge.encode(text, False) == reference(text, add_special_tokens=False)["input_ids"]
    assert edge.added_ids(["<|new|>", "<tag>", "<|far|>"]) == {size: "<|new|>", size + 1: "<tag>"}
    assert "'<|far|>'" in caplog.text
