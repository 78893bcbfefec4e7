"""What becomes of a grammar, found out before its request runs: whether it compiles, and what the masks of its answers
cost. Runs in a process made for this one grammar (`workers.structured_output.template_process`), which its starter,
`cluster.http.requests.grammar_checker`, kills where it takes too long.
"""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from workers.scheduling.plan import Grammar
from workers.structured_output.faults import InvalidGrammarError, VocabularyError
from workers.structured_output.framing import receive, send

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import xgrammar

    from workers.structured_output.compiler import Vocabulary

TOKEN_LIMIT_S = 0.2  # of a processor, for one token of an answer; the rank's process gives up at five times that
WALK_LIMIT_S = 2.0  # of a processor, for all answers that are tried
MIN_TOKENS = 100  # that are to be walked in this time
NICENESS = 10  # of the process, beside engines that compute on the same cores
WALK_TOKENS = 96  # of each answer
_REPEATED = (b"a", b" ", b"0", b"\n")


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """fault: why the grammar cannot be used, "" if it can. with_model: the model's fault, not the grammar's.
    is_compiled: this is not the end; the grammar compiles, and its answers are being tried."""

    fault: str = ""
    with_model: bool = False
    is_compiled: bool = False


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to try."""

    grammar: Grammar


def run_trial(files: list[int], vocabulary: "Vocabulary") -> None:
    """files: a socket, on which the grammar comes and verdicts go."""
    os.nice(NICENESS)
    own = socket.socket(fileno=files[0])
    trial = receive(own, Trial)
    if trial is None:
        return

    def limit_walk() -> None:
        send(own, Verdict(is_compiled=True))
        used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        limit_s = used_s + int(WALK_LIMIT_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))  # ends the process amid a call that takes longer

    send(own, verdict(trial.grammar, vocabulary, limit_walk))


def verdict(grammar: Grammar, vocabulary: "Vocabulary", on_compiled: Callable[[], None] = lambda: None) -> Verdict:
    """What becomes of a grammar. on_compiled: called before its answers are tried."""
    try:
        compiled = _compile(grammar, vocabulary)
        on_compiled()
        _walk(compiled)
    except InvalidGrammarError as error:
        return Verdict(str(error))
    except VocabularyError as error:
        return Verdict(str(error), with_model=True)
    except MemoryError:
        return Verdict("it takes too much memory; make it smaller")
    except Exception as error:  # what the library raises here it would raise in an engine
        return Verdict(f"the compiler fails on it: {type(error).__name__}: {error}")
    return Verdict()


def _compile(grammar: Grammar, vocabulary: "Vocabulary") -> "xgrammar.CompiledGrammar":
    """Raises InvalidGrammarError, for what the library warns of too: it leaves that out of the grammar."""
    from workers.structured_output.compiler import GrammarCompiler

    with tempfile.TemporaryFile() as said:
        own = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            compiled = GrammarCompiler(
                vocabulary, num_threads=2 if (os.cpu_count() or 1) > 4 else 1, remembers=False
            ).compile(grammar)
        finally:
            os.dup2(own, 2)
            os.close(own)
        said.seek(0)
        warnings = [line for line in said.read().decode(errors="replace").splitlines() if "Warning: " in line]
    if warnings:
        raise InvalidGrammarError(warnings[0].partition("Warning: ")[2])
    return compiled


def _walk(compiled: "xgrammar.CompiledGrammar") -> None:
    """Write answers that are likely to be the hardest: of the longest tokens, of the shortest, and of one text again
    and again. Raises InvalidGrammarError where they take too long, or no text is allowed."""
    import numpy as np

    texts = compiled.tokenizer_info.decoded_vocab
    lengths = np.array([len(text) for text in texts], np.int32)
    ends = compiled.tokenizer_info.stop_token_ids
    lengths[ends] = 0
    repeated = [texts.index(text) for text in _REPEATED if text in texts]
    began_s, num_tokens = time.thread_time(), 0
    for prefer in (None, 0, *repeated):
        for took_s in _answer(compiled, lengths, prefer):
            num_tokens += 1
            if took_s > TOKEN_LIMIT_S:
                raise InvalidGrammarError(
                    f"a token of an answer takes {took_s:.2f} s, and more than {TOKEN_LIMIT_S:g} s is too long; nest "
                    "fewer repetitions, or write it so that a text can be read in one way only"
                )
            if time.thread_time() - began_s > WALK_LIMIT_S:
                if num_tokens < MIN_TOKENS:
                    each_ms = 1000 * WALK_LIMIT_S / num_tokens
                    raise InvalidGrammarError(
                        f"tokens of an answer take {each_ms:.0f} ms each, and more than "
                        f"{1000 * WALK_LIMIT_S / MIN_TOKENS:g} ms is too long; make it simpler"
                    )
                return


def _answer(
    compiled: "xgrammar.CompiledGrammar", lengths: "npt.NDArray[np.int32]", prefer: int | None
) -> Iterator[float]:
    """Write one answer; yields the processor time of each token. lengths: bytes of each token, 0 of those to avoid.
    prefer: this token wherever it is allowed, else the shortest; None: the longest. Raises InvalidGrammarError."""
    import numpy as np
    import xgrammar

    from workers.structured_output.matcher import Matcher

    words = xgrammar.allocate_token_bitmask(1, len(lengths))
    matcher, shortest = Matcher(compiled), np.where(lengths > 0, 1_000_000 - lengths, 0)
    for position in range(WALK_TOKENS):
        began_s = time.thread_time()
        matcher.fill(words)
        matcher.jump()
        filled_s = time.thread_time() - began_s
        allowed = np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little")[: len(lengths)]
        if position == 0 and not allowed.any():
            raise InvalidGrammarError("no text is allowed")
        best = int(np.argmax(allowed * (lengths if prefer is None else shortest)))
        token = prefer if prefer and allowed[prefer] else best
        if not allowed[token] or lengths[token] == 0:
            yield filled_s
            return  # the end alone may come, or a token without a text
        began_s = time.thread_time()
        matcher.take(token)
        yield filled_s + time.thread_time() - began_s
        if matcher.is_terminated():
            return
