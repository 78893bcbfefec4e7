"""The process that tries whether a grammar compiles, started by `cluster.http.requests.grammar_checker`.

Compiling is C++ over what strangers send: here it may take too long, take all memory or crash, and no stream notices.
Reads `Trial`s from stdin, answers each with a `Verdict` on stdout; both are msgpack behind four bytes of length.
"""

import functools
import os
import resource
import sys
import tempfile
from typing import IO, TYPE_CHECKING

import msgspec

from workers.scheduling.plan import Grammar

if TYPE_CHECKING:
    from workers.structured_output.compiler import GrammarCompiler

MEMORY_BYTES = 4 << 30  # that one process may have: torch takes 0.4 GB of it, and 1.5 GB of addresses


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """A grammar, and the folder of the model whose tokens it is to allow."""

    folder: str
    grammar: Grammar


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """fault: why the grammar cannot be used, "" if it can. with_model: the model's fault, not the grammar's."""

    fault: str = ""
    with_model: bool = False


def send(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write one message."""
    raw = msgspec.msgpack.encode(message)
    stream.write(len(raw).to_bytes(4, "little") + raw)
    stream.flush()


def receive(stream: IO[bytes], kind: type[msgspec.Struct]) -> msgspec.Struct | None:
    """Read one message of a type; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")), type=kind)


def verdict(trial: Trial) -> Verdict:
    """What becomes of a grammar."""
    from workers.structured_output.compiler import InvalidGrammarError, VocabularyError

    try:
        with tempfile.TemporaryFile() as said:
            own = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                _try(trial)
            finally:
                os.dup2(own, 2)
                os.close(own)
            said.seek(0)
            warnings = [line for line in said.read().decode(errors="replace").splitlines() if "Warning: " in line]
    except InvalidGrammarError as error:
        return Verdict(str(error))
    except VocabularyError as error:
        return Verdict(str(error), with_model=True)
    # what the library warns of it leaves out of the grammar
    return Verdict(warnings[0].partition("Warning: ")[2]) if warnings else Verdict()


def _try(trial: Trial) -> None:
    """Raises InvalidGrammarError or VocabularyError."""
    import xgrammar

    from workers.structured_output.compiler import InvalidGrammarError

    compiled = _compiler(trial.folder).compile(trial.grammar)
    mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
    if not mask.any():
        raise InvalidGrammarError("no text is allowed")


@functools.cache
def _compiler(folder: str) -> "GrammarCompiler":
    from tokenizers import Tokenizer

    from workers.structured_output.compiler import GrammarCompiler

    vocabulary = Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab(with_added_tokens=True)
    return GrammarCompiler(folder, max(vocabulary.values()) + 1, num_threads=2, remembers=False)


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints gets between the answers
    while (trial := receive(sys.stdin.buffer, Trial)) is not None:
        assert isinstance(trial, Trial)
        send(answers, verdict(trial))


if __name__ == "__main__":
    main()
