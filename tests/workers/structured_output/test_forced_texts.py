"""Forced texts without an end, or of repetitions in repetitions: the compiler's search for them has no limit. And
grammars in which there is much to search: a guide stays within its limit."""

import json
import multiprocessing
import random
import resource
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from aerie.kernels.drafting.guides import begin, forced_or
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.mask_process import draft_guide
from aerie.workers.structured_output.mask_process.draft_guide import MAX_SEARCHES, MaskRows
from aerie.workers.structured_output.mask_process.grammar_cache import CachedGrammar
from aerie.workers.structured_output.mask_process.mask_jobs import MASK_LIMIT_S
from aerie.workers.structured_output.mask_process.matcher import Matcher
from aerie.workers.structured_output.mask_process.request_grammar import RequestGrammar
from aerie.workers.structured_output.mask_table import NUM_SPARE, GuideBlock, MaskTable
from aerie.workers.structured_output.slot_grammars import MIN_GUIDED_NODES
from tests.support import MODELS
from tests.support.embedded import eos_token_ids
from tests.support.structured_output.hostile import RECURSIVE
from tests.support.structured_output.sampled import grammar_of

VOCAB = 4096
LIMIT_S, LIMIT_BYTES = 40, 4 << 30  # of a case's process
NESTED = '((("a"){8,}){8,}){8,}'
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "additionalProperties": False}
ENDLESS = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/n"}], "$defs": {"n": NODE}}
# a grammar, the text before, and the byte that it forces after the next one of these
CASES = {
    "endless": (Grammar("ebnf", 'root ::= "b" | "x" s\ns ::= "a" s', eos_token_ids()), "x", "a"),
    "nested": (Grammar("ebnf", f'root ::= "b" | "x" {NESTED}', eos_token_ids()), "x", "a"),
    "nested regex": (Grammar("regex", "b|x(((a){8,}){8,}){8,}", eos_token_ids()), "x", "a"),
    "endless schema": (Grammar("json_schema", json.dumps(ENDLESS), eos_token_ids(), False), "{", '"'),
}


def fill(name: str) -> None:
    """Fill the mask and the guide after a hidden entrance."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    grammar, before, forced = CASES[name]
    compiler = GrammarCompiler(Vocabulary(MODELS / "target", VOCAB))
    compiled = compiler.compile(grammar)
    texts = compiler.texts_of(compiled)
    tokens = {text: token for token, text in reversed([(t, texts[t]) for t in range(VOCAB)])}
    done: Future[Any] = Future()
    done.set_result(compiled)
    request = RequestGrammar(CachedGrammar(grammar, done), False, [tokens[before.encode()]])
    masks = MaskTable(1, 4, VOCAB, torch.device("cpu"))
    assert masks.guides is not None
    masks.guides.index[0] = 0
    words = masks.host_words
    rows = MaskRows(words, words.numpy(), 0, 1, 1 + NUM_SPARE, torch.zeros_like(masks.words[:1]))
    began_s = time.thread_time()
    assert request.fill(rows, 1, GuideBlock(masks.guides.blocks[0].numpy()), MIN_GUIDED_NODES, texts)
    assert time.thread_time() - began_s < MASK_LIMIT_S
    slots, first = torch.tensor([0]), torch.tensor([tokens[forced.encode()]])
    after = begin(masks.guides, slots, torch.tensor([0]), first)
    assert int(forced_or(masks.guides, slots, after, torch.tensor([[-1]]))) >= 0, "nothing is forced"


@pytest.mark.parametrize("name", CASES)
def test_a_forced_text_behind_a_hidden_entrance_takes_no_longer_than_a_mask_may(name: str) -> None:
    """In a process of its own, which ends where the search does not."""
    process = multiprocessing.get_context("fork").Process(target=fill, args=(name,))
    process.start()
    process.join(200)
    assert process.exitcode == 0


@pytest.mark.parametrize("any_whitespace", [False, True])
@pytest.mark.parametrize("name", RECURSIVE)
def test_a_guide_fills_no_more_masks_of_its_own_than_it_may(
    name: str, any_whitespace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along an answer of random tokens, of those that nest where there are any, with drafts of the same kind."""
    width, fills = 8, list[int]()
    filled = Matcher.fill

    def counted(*given: Any) -> None:
        fills.append(1)
        filled(*given)

    monkeypatch.setattr(Matcher, "fill", counted)
    monkeypatch.setattr(draft_guide, "_MAX_SEARCH_S", 60.0)  # the count alone, however busy the machine
    grammar = grammar_of(RECURSIVE[name], any_whitespace)
    compiler, drawn = GrammarCompiler(Vocabulary(MODELS / "target", VOCAB)), random.Random(3)
    done: Future[Any] = Future()
    done.set_result(compiler.compile(grammar))
    texts, request = compiler.texts_of(done.result()), RequestGrammar(CachedGrammar(grammar, done), False, [])
    masks = MaskTable(1, width, VOCAB, torch.device("cpu"))
    assert masks.guides is not None
    words, matcher = masks.host_words, Matcher(done.result())

    def drafts() -> list[int]:
        """Return tokens that the grammar allows, one after the other."""
        found = list[int]()
        while len(found) < width and not matcher.is_terminated():
            matcher.fill(masks.words[:1])
            bits = np.unpackbits(masks.words[0].numpy().view(np.uint8), bitorder="little")
            allowed = [token for token in np.flatnonzero(bits).tolist() if texts[token]]
            nesting = [token for token in allowed if set(texts[token]) & set(b"[{")]
            found.append(drawn.choice(nesting or allowed or [grammar.end_token_ids[0]]))
            assert matcher.accept_token(found[-1])
        matcher.rewind()
        return found

    most = 0
    for _ in range(30):
        rows = MaskRows(words, words.numpy(), 0, width, width + NUM_SPARE, torch.zeros_like(masks.words[:1]))
        fills.clear()
        assert request.fill(rows, width, GuideBlock(masks.guides.blocks[0].numpy()), 256, texts)
        most = max(most, len(fills))
        chain = drafts()
        if not matcher.take(chain[0]) or matcher.is_terminated():
            break
        request.advanced(chain[:1], chain, [node - 1 for node in range(len(chain))])
    assert MAX_SEARCHES // 2 < most <= width + NUM_SPARE + MAX_SEARCHES
