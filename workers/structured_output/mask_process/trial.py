"""Tries a grammar before its request runs: whether it compiles, and the time of masks of sample answers.

Each trial runs in a process of its own (`aerie.workers.structured_output.mask_process.template_process`).
`aerie.cluster.http.requests.grammar_checker` starts it, and kills it if it takes too long.
"""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.mask_messages import InvalidGrammarError, VocabularyError, receive, send

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import xgrammar

    from aerie.workers.structured_output.compiler import Vocabulary

TOKEN_LIMIT_S = 0.2  # CPU time for one token of an answer; the rank's process allows five times as much
WALK_LIMIT_S = 2.0  # CPU time for all sample answers
MIN_TOKENS = 100  # minimum tokens of sample answers within this time
WALK_TOKENS = 96  # per sample answer
MAX_SHOWN_BYTES = 40  # bytes of a sample answer that an error shows
_REPEATED = (b"a", b" ", b"0", b"\n")


class TrialResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a trial.

    fault: why the grammar cannot be used; "" if it can.
    is_model_fault: whether the model's tokenizer is the reason.
    is_compiled: whether this is the interim result that the grammar compiles; sample answers follow.
    """

    fault: str = ""
    is_model_fault: bool = False
    is_compiled: bool = False


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to try."""

    grammar: Grammar


def run_trial(files: list[int], vocabulary: "Vocabulary") -> None:
    """Run a trial. files: descriptor of the socket that receives the grammar and sends results."""
    own = socket.socket(fileno=files[0])
    trial = receive(own, Trial)
    if trial is None:
        return

    def limit_walk() -> None:
        send(own, TrialResult(is_compiled=True))
        used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        limit_s = used_s + int(WALK_LIMIT_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))  # kills the process inside a call that takes longer

    send(own, try_grammar(trial.grammar, vocabulary, limit_walk))


def try_grammar(
    grammar: Grammar, vocabulary: "Vocabulary", on_compiled: Callable[[], None] = lambda: None
) -> TrialResult:
    """Compile a grammar and try sample answers. on_compiled: called in between."""
    from aerie.workers.structured_output.mask_process.draft_guide import may_jump

    try:
        compiled = _compile(grammar, vocabulary)
        on_compiled()
        _walk(compiled, may_jump(grammar))
    except InvalidGrammarError as error:
        return TrialResult(str(error))
    except VocabularyError as error:
        return TrialResult(str(error), is_model_fault=True)
    except MemoryError:
        return TrialResult("it takes too much memory; make it smaller")
    except Exception as error:  # the library would raise it in an engine, too
        return TrialResult(f"the compiler fails on it: {type(error).__name__}: {error}")
    return TrialResult()


def _compile(grammar: Grammar, vocabulary: "Vocabulary") -> "xgrammar.CompiledGrammar":
    """Compile a grammar. Raises InvalidGrammarError, also for the library's warnings, because it ignores parts with
    warnings."""
    from aerie.workers.structured_output.compiler import GrammarCompiler

    with tempfile.TemporaryFile() as said:
        own = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            compiled = GrammarCompiler(
                vocabulary, num_threads=2 if (os.cpu_count() or 1) > 4 else 1, caches=False
            ).compile(grammar)
        finally:
            os.dup2(own, 2)
            os.close(own)
        said.seek(0)
        warnings = [line for line in said.read().decode(errors="replace").splitlines() if "Warning: " in line]
    if warnings:
        raise InvalidGrammarError(warnings[0].partition("Warning: ")[2])
    return compiled


def _walk(compiled: "xgrammar.CompiledGrammar", jumps: bool) -> None:
    """Generate sample answers that are likely to be slow: of the longest tokens, of the shortest, and of one repeated
    token. Raises InvalidGrammarError if they take too long, or if no text is allowed.

    jumps: see `draft_guide.may_jump`.
    """
    import numpy as np

    texts = compiled.tokenizer_info.decoded_vocab
    lengths = np.array([len(text) for text in texts], np.int32)
    ends = compiled.tokenizer_info.stop_token_ids
    lengths[ends] = 0
    repeated = [texts.index(text) for text in _REPEATED if text in texts]
    began_s, num_tokens = time.thread_time(), 0
    for prefer in (None, 0, *repeated):
        for took_s in _answer(compiled, texts, lengths, prefer, jumps):
            num_tokens += 1
            if took_s > TOKEN_LIMIT_S:
                raise InvalidGrammarError(
                    f"a token of an answer takes {took_s:.2f} s, and more than {TOKEN_LIMIT_S:g} s is too long; nest "
                    "fewer repetitions, or write it so that a text can be read in one way only"
                )
            if time.thread_time() - began_s > WALK_LIMIT_S:
                if num_tokens < MIN_TOKENS:
                    per_token_ms = 1000 * WALK_LIMIT_S / num_tokens
                    raise InvalidGrammarError(
                        f"tokens of an answer take {per_token_ms:.0f} ms each, and more than "
                        f"{1000 * WALK_LIMIT_S / MIN_TOKENS:g} ms is too long; make it simpler"
                    )
                return


def _answer(
    compiled: "xgrammar.CompiledGrammar",
    texts: list[bytes],
    lengths: "npt.NDArray[np.int32]",
    prefer: int | None,
    jumps: bool,
) -> Iterator[float]:
    """Generate one sample answer, and yield the CPU seconds of each token. Raises InvalidGrammarError.

    texts: bytes of each token.
    lengths: [vocab] int32, their numbers; 0 for tokens to avoid.
    prefer: a token to choose if it is allowed, else the shortest; None: always the longest.
    """
    import numpy as np
    import xgrammar

    from aerie.workers.structured_output.mask_process.matcher import Matcher

    words, text = xgrammar.allocate_token_bitmask(1, len(lengths)), b""
    matcher, shortest = Matcher(compiled), np.where(lengths > 0, 1_000_000 - lengths, 0)
    for _ in range(WALK_TOKENS):
        began_s = time.thread_time()
        matcher.fill(words)
        if jumps:
            matcher.jump()
        filled_s = time.thread_time() - began_s
        allowed = np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little")[: len(lengths)]
        if not allowed.any():
            after = f" after {text[-MAX_SHOWN_BYTES:].decode(errors='replace')!r}" if text else ""
            raise InvalidGrammarError(f"no text is allowed{after} that the model's tokens can spell")
        best = int(np.argmax(allowed * (lengths if prefer is None else shortest)))
        token = prefer if prefer and allowed[prefer] else best
        if not allowed[token] or lengths[token] == 0:
            yield filled_s
            return  # only an end token or a token without text is allowed
        began_s = time.thread_time()
        matcher.take(token)
        text += texts[token]
        yield filled_s + time.thread_time() - began_s
        if matcher.is_terminated():
            return
