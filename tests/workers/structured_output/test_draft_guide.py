"""What a guide proposes: walked on the host along texts as the embedded pair's tokenizer writes them, and otherwise."""

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from aerie.kernels.drafting.guides import MAX_STATES, GuideTable, begin, follow, forced_or
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.mask_process.draft_guide import Endings, MaskRows, TreeWalk
from aerie.workers.structured_output.mask_process.matcher import Matcher
from aerie.workers.structured_output.mask_process.request_grammar import Tree
from aerie.workers.structured_output.mask_process.token_texts import TokenTexts
from aerie.workers.structured_output.mask_table import NUM_SPARE, GuideBlock, MaskTable
from tests.support import MODELS
from tests.support.embedded import eos_token_ids
from tests.support.structured_output.sampled import grammar_of

VOCAB, WIDTH, SLOTS = 4096, 4, torch.tensor([0])
TOKENIZER = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
COMPILER = GrammarCompiler(Vocabulary(MODELS / "target", VOCAB))
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ONE = {
    "type": "object",
    "properties": {"kind": {"const": "fixed"}},
    "required": ["kind"],
    "additionalProperties": False,
}


class Walked:
    """The guide after `before` of one request whose tree is `tree`, token lists of its nodes' texts."""

    def __init__(
        self,
        schema: Any,
        before: str | bytes,
        tree: Tree,
        endings: Endings | None = None,
        num_guided: int = WIDTH,
        any_whitespace: bool = False,
        ended: int | None = None,
    ) -> None:
        compiled = COMPILER.compile(grammar_of(schema, any_whitespace))
        self.texts = COMPILER.texts_of(compiled)
        matcher = Matcher(compiled)
        assert matcher.accept_string(before.encode() if isinstance(before, str) else before)
        self.masks = MaskTable(1, WIDTH, VOCAB, torch.device("cpu"))
        assert self.masks.guides is not None
        self.guides: GuideTable = self.masks.guides
        self.guides.index[0] = 0
        block = GuideBlock(self.guides.blocks[0].numpy())
        block.clear()
        count = len(tree.tokens)
        words, scratch = self.masks.host_words, torch.zeros_like(self.masks.words[:1])
        rows = MaskRows(words, words.numpy(), 0, count, count + NUM_SPARE, scratch)
        self.walk = TreeWalk(
            matcher,
            self.texts,
            endings or Endings(),
            eos_token_ids(),
            rows,
            block,
            num_guided,
            any_whitespace,
            ended=ended,
        )
        self.walk.run(tree.tokens, tree.children)

    def after(self, *tokens: int, node: int = 0) -> str:
        """Return what is forced behind a node and tokens, the first of them the bonus, as far as it is."""
        return TOKENIZER.decode(self.ids_after(*tokens, node=node), skip_special_tokens=False)

    def ids_after(self, *tokens: int, node: int = 0) -> list[int]:
        """The same as token ids."""
        states = begin(self.guides, SLOTS, torch.tensor([node]), torch.tensor(tokens[:1]))
        for token in tokens[1:]:
            states = follow(self.guides, SLOTS, states, torch.tensor([[token]]))
        found = list[int]()
        while True:
            token = int(forced_or(self.guides, SLOTS, states, torch.tensor([[-1]])))
            if token < 0 or len(found) > 30:
                return found
            found.append(token)
            states = follow(self.guides, SLOTS, states, torch.tensor([[token]]))


def token_of(texts: TokenTexts, byte: int) -> int:
    """The token of a single byte."""
    return next(token for token in range(VOCAB) if texts[token] == bytes((byte,)))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def letters(text: str) -> list[int]:
    """A token for each letter: how no tokenizer writes."""
    return [TOKENIZER.token_to_id(letter) for letter in text]


ROOT = Tree([0], [[]])


def test_a_demanded_text_is_forced_however_it_was_begun() -> None:
    walked = Walked(PERSON, "", ROOT)
    assert walked.after(*letters("{")) == '"name": "'
    assert walked.after(*letters('{"n')) == 'ame": "'
    assert walked.after(*ids('{"name')) == '": "'
    assert walked.after(*letters("x")) == "", "a token that the grammar does not allow leads nowhere"


def test_what_follows_a_constant_is_the_end() -> None:
    end = TOKENIZER.decode([eos_token_ids()[0]], skip_special_tokens=False)
    assert Walked(ONE, "", ROOT).after(*letters("{")) == '"kind": "fixed"}' + end


def test_endings_lead_out_of_an_open_place() -> None:
    """A quote ends a string; before the grammar has shown it, nothing is known of it."""
    quote = letters('"')[0]
    assert Walked(PERSON, '{"name": "Bo', ROOT).after(quote) == ""
    endings = Endings()
    endings.add(quote)
    walked = Walked(PERSON, '{"name": "Bo', ROOT, endings)
    assert walked.after(quote) == ', "age": '
    assert walked.after(*letters("bo"), quote) == ', "age": ', "letters lead back to the string"


def test_a_token_that_ended_an_open_place_is_remembered() -> None:
    endings, quote = Endings(), letters('"')[0]
    Walked(PERSON, '{"name": "Bo', ROOT, endings, ended=letters("o")[0])
    assert list(endings) == []
    Walked(PERSON, '{"name": "Bo"', ROOT, endings, ended=quote)
    assert list(endings) == [quote]


def test_where_whitespace_is_open_one_space_or_none_is_proposed() -> None:
    endings, quote = Endings(), letters('"')[0]
    endings.add(quote)
    assert Walked(PERSON, "", ROOT, endings, any_whitespace=True).after(*letters("{")) == '"name": "'
    assert Walked(PERSON, '{"name": "Bo', ROOT, endings, any_whitespace=True).after(quote) == ', "age": '
    endings.is_spaced = False
    assert Walked(PERSON, '{ "name":"Bo', ROOT, endings, any_whitespace=True).after(quote) == ',"age":'


def test_an_open_place_has_its_mask() -> None:
    walked = Walked(PERSON, '{"name": "Bo', ROOT)
    states = begin(walked.guides, SLOTS, torch.tensor([0]), torch.tensor(letters("b")))
    row = int(walked.guides.rows[0, int(states)])
    assert row == 0 and torch.equal(walked.masks.words[row], walked.masks.words[0])
    after_text = Walked(PERSON, '{"name": "Bo"', ROOT)
    states = begin(after_text.guides, SLOTS, torch.tensor([0]), torch.tensor(letters(",")))
    for token in ids(' "age": '):
        states = follow(after_text.guides, SLOTS, states, torch.tensor([[token]]))
    row = int(after_text.guides.rows[0, int(states)])
    digit, letter = letters("7a")
    words = after_text.masks.words[row]
    assert words[digit // 32] >> digit % 32 & 1 and not words[letter // 32] >> letter % 32 & 1


def test_each_node_has_its_place() -> None:
    """A tree whose nodes go on within a text, and one that the grammar forbids."""
    tokens = [0, *letters('{"x')]
    walked = Walked(PERSON, "", Tree(tokens, [[1], [2], [3], []]))
    assert walked.after(*letters("n"), node=2) == 'ame": "'
    assert walked.walk.is_forced == {0: True, 1: True, 2: True}
    few = Walked(PERSON, "", Tree(tokens, [[1], [2], [3], []]), num_guided=1)
    assert few.after(*letters("{")) == '"name": "' and few.after(*letters("n"), node=2) == ""


def test_the_matcher_stays_where_it_was() -> None:
    endings = Endings()
    for token in letters('",}]'):
        endings.add(token)
    walked = Walked(PERSON, '{"name": "Bo', Tree([0, *letters("b")], [[1], []]), endings)
    assert walked.walk.matcher.accept_string('b", "age": 3}')


@pytest.mark.parametrize("length", [300, 3000])
def test_a_long_text_takes_no_more_than_there_is(length: int) -> None:
    schema = {"const": "a b" * length}
    walked = Walked(schema, "", ROOT)
    assert walked.walk.guide.num_states <= MAX_STATES
    assert len(walked.after(*letters('"'))) > 10


def test_a_tokenizer_that_writes_otherwise_is_not_believed() -> None:
    """One that puts a space before every text: the longest tokens that fit are taken."""
    texts = TokenTexts([b"", b"a", b"b", b"ab", b" ab"], _Spaced())  # type: ignore[arg-type]
    states = texts.states(b"abb")
    assert states.forced.tolist() == [3, 2, 2]
    assert sorted(zip(states.origins.tolist(), states.tokens.tolist(), states.targets.tolist(), strict=True)) == [
        (0, 1, 2),
        (0, 3, 1),
        (1, 2, -1),
        (2, 2, 1),
    ]


class _Spaced:
    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return type("Encoding", (), {"ids": [4, 2]})


@pytest.mark.parametrize("texts", [["да", "нет"], ["да"], ["北京", "北海"], ["é"], ["éa", "éb"], ["😀!", "😁!"]])
def test_demanded_bytes_may_begin_and_end_inside_a_character(texts: list[str]) -> None:
    """Where each byte has a token of its own, what is forced goes on with one of the texts."""
    all_raw = [f'"{text}"'.encode() for text in texts]
    for raw in all_raw:
        for offset in range(len(raw) - 1):
            walked = Walked({"enum": texts}, raw[:offset], ROOT)
            forced = walked.ids_after(token_of(walked.texts, raw[offset]))
            going_on = [other[offset + 1 :] for other in all_raw if other.startswith(raw[: offset + 1])]
            spelt = b"".join(walked.texts[token] for token in forced if token not in eos_token_ids())
            assert any(rest.startswith(spelt) for rest in going_on)
            num_ways = len({other[offset] for other in all_raw if other.startswith(raw[:offset])})
            if num_ways == 1 == len({rest[:1] for rest in going_on}):
                assert spelt, "there is one way to go on"


@pytest.mark.parametrize("seed", range(4))
def test_each_node_has_the_mask_of_its_path(seed: int) -> None:
    """Random trees with forbidden nodes: these and the nodes below them have no mask."""
    drawn = random.Random(seed)
    before, usual = '{"name": "Bo', ids('", "age": 12345}')
    tokens = [0, *(drawn.choice([*usual, *letters('ab"')]) for _ in range(WIDTH - 1))]
    parents = [-1, *(drawn.randrange(node) for node in range(1, WIDTH))]
    walked = Walked(PERSON, before, Tree.of(tokens, parents))
    for node in range(WIDTH):
        path = [node]
        while path[-1]:
            path.append(parents[path[-1]])
        matcher = Matcher(COMPILER.compile(grammar_of(PERSON, False)))
        assert matcher.accept_string(before.encode())
        if all(matcher.accept_token(tokens[each]) for each in path[-2::-1]):
            expected = torch.full_like(walked.masks.words[:1], -1)
            if not matcher.is_terminated():
                matcher.fill(expected)
            assert torch.equal(walked.masks.words[node], expected[0]), node
