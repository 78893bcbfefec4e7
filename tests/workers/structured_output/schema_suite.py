"""What becomes of the schemas of JSON-Schema-Test-Suite: enforced, or refused by keyword.

    python -m tests.workers.structured_output.schema_suite FOLDER ...     # of its `tests`, as draft2020-12 or draft7

The sources of the package `jsonschema` have the suite (in `json/tests`). Each schema goes the way of one that a request
brings. Of those that are taken no instance may be possible that the suite calls invalid; valid ones that are not are
counted, since what is taken may be narrower than the schema. The exit status is 1 if an invalid one is possible.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import xgrammar

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.json_schema import checked_schema
from aerie.workers.structured_output.mask_process.trial import try_grammar
from aerie.workers.structured_output.schema_keywords import UnsupportedSchemaError
from tests.support import MODELS
from tests.support.embedded import eos_token_ids

TARGET = str(MODELS / "target")
MAX_DEPTH = 32
VOCABULARY = 4096  # the embedded pair's


def main(folders: list[str]) -> int:
    counts, keywords = Counter[str](), Counter[str]()
    vocabulary = Vocabulary(TARGET, VOCABULARY)
    compiler = GrammarCompiler(vocabulary)
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.json"))):
        for group in json.loads(path.read_text()):
            counts["schemas"] += 1
            try:
                grammar = Grammar("json_schema", checked_schema(group["schema"], MAX_DEPTH), eos_token_ids())
            except UnsupportedSchemaError as error:
                counts["refused by keyword"] += 1
                keywords[error.keyword] += 1
                continue
            if try_grammar(grammar, vocabulary).fault:
                counts["refused by the compiler"] += 1
                continue
            counts["taken"] += 1
            compiled = compiler.compile(grammar)
            for case in group["tests"]:
                possible = _allows(compiled, json.dumps(case["data"], ensure_ascii=False))
                valid = "valid" if case["valid"] else "invalid"
                counts[f"{valid} and {'possible' if possible else 'not possible'}"] += 1
                if possible and not case["valid"]:
                    print(f"{path.name}: {group['description']}: {case['description']}: {json.dumps(group['schema'])}")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    print("refused:", ", ".join(f"{name or 'size'} {count}" for name, count in keywords.most_common()))
    return int(counts["invalid and possible"] > 0)


def _allows(compiled: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.accept_token(eos_token_ids()[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
