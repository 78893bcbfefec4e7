"""The schemas that libraries write for one set of types: each is enforced, or refused by a sentence of the page; and
what is enforced gives answers that the schema admits."""

import dataclasses
import datetime
import decimal
import enum
import json
import random
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import numpy as np
import pydantic
import pytest
import xgrammar
from pydantic import Field

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.json_schema import checked_schema
from aerie.workers.structured_output.mask_process.matcher import Matcher
from aerie.workers.structured_output.mask_process.trial import try_grammar
from aerie.workers.structured_output.schema_keywords import UnsupportedSchemaError
from tests.support import MODELS, ROOT
from tests.support.embedded import eos_token_ids

VOCABULARY = Vocabulary(MODELS / "target")
COMPILER = GrammarCompiler(VOCABULARY)
PAGE = (ROOT / "docs/structured-output.md").read_text()
REFUSED_WORDS = PAGE.partition("## Schemas are enforced whole or refused")[2].partition("\n## ")[0]
ANSWERS, MAX_TOKENS = 6, 400
TEXTS = VOCABULARY.tokens(eos_token_ids(), False).decoded_vocab
CLOSING = np.array([text[:1] in (b'"', b"]", b"}") for text in TEXTS], np.uint8)  # and the end
CLOSING[list(eos_token_ids())] = 1


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"  # not among `required`
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "puppy"]
    good: bool = True


class Siamese(pydantic.BaseModel):
    kind: Literal["cat2"]
    coat: Literal["seal"]


class Persian(pydantic.BaseModel):
    kind: Literal["cat2"]
    coat: Literal["white", "grey"]


class Node(pydantic.BaseModel):
    value: int
    children: list["Node"] = []


class Everything(pydantic.BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=20)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")]
    color: Color
    size: Literal[1, 2, 3] = 1
    nick: str | None = None
    either: int | str | list[bool]
    pair: tuple[int, str]
    day: datetime.date
    at: datetime.datetime
    id: uuid.UUID
    link: pydantic.HttpUrl | None = None
    scores: dict[str, float]
    by_color: dict[Color, int]
    share: Annotated[float, Field(gt=0, lt=1)]
    matrix: list[list[int]]
    tags: Annotated[list[str], Field(max_length=3)]
    anything: Any = None


def of_pydantic(kind: Any) -> Any:
    return pydantic.TypeAdapter(kind).json_schema()


class MCat(msgspec.Struct, tag="cat"):
    lives: Annotated[int, msgspec.Meta(ge=1, le=9)]


class MDog(msgspec.Struct, tag="dog"):
    good: bool = True


class MNode(msgspec.Struct):
    value: int
    next: "MNode | None" = None


class MEverything(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=20)]
    color: Color
    pet: MCat | MDog
    pair: tuple[int, str]
    day: datetime.date
    id: uuid.UUID
    scores: dict[str, float]
    either: int | str | None = None


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


PYTHON: dict[str, Any] = {
    "fields": of_pydantic(Everything),
    "discriminated": of_pydantic(Annotated[Cat | Dog, Field(discriminator="kind")]),
    "list of discriminated": of_pydantic(list[Annotated[Cat | Dog, Field(discriminator="kind")]]),
    "nested discriminators": of_pydantic(
        Annotated[Annotated[Siamese | Persian, Field(discriminator="coat")] | Dog, Field(discriminator="kind")]
    ),
    "union": of_pydantic(Cat | Dog | None),
    "recursive": of_pydantic(Node),
    "dataclass": of_pydantic(Point),
    "decimal": of_pydantic(decimal.Decimal),
    "set": of_pydantic(set[int]),
    "map of literals": of_pydantic(dict[Literal["a", "b"], int]),
    "time and duration": of_pydantic(tuple[datetime.time, datetime.timedelta]),
    "network": of_pydantic(tuple[pydantic.IPvAnyAddress, pydantic.AnyUrl]),
    "msgspec fields": msgspec.json.schema(MEverything),
    "msgspec tagged": msgspec.json.schema(MCat | MDog),
    "msgspec recursive": msgspec.json.schema(MNode),
    "msgspec set": msgspec.json.schema(frozenset[str]),
}
PYTHON["decimal of pydantic 2.12"] = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
REFUSED = {"set": "uniqueItems", "msgspec set": "uniqueItems", "network": "format"}


def answer(compiled: xgrammar.CompiledGrammar, draw: random.Random) -> Any:
    """Return a random answer that ends soon, as JSON's value; None if it is longer than `MAX_TOKENS`."""
    matcher, text, words = Matcher(compiled), b"", xgrammar.allocate_token_bitmask(1, VOCABULARY.size)
    for _ in range(MAX_TOKENS):
        matcher.fill(words)
        bits = np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little")[: VOCABULARY.size]
        allowed, closing = np.flatnonzero(bits), np.flatnonzero(bits & CLOSING)
        token = int(draw.choice(closing if len(closing) and draw.random() < 0.6 else allowed))
        assert matcher.take(token)
        text += TEXTS[token]
        if matcher.is_terminated():
            return json.loads(text)
    return None


def check(schema: Any, name: str, least: int = ANSWERS // 2) -> str:
    """Check answers of a schema, of which at least `least` must end in time. Return the keyword by which it is refused;
    "" if it is enforced."""
    try:
        text = checked_schema(schema, 32)
    except UnsupportedSchemaError as error:
        assert f"`{error.keyword}`" in REFUSED_WORDS, f"{name}: the page does not list: {error}"
        return error.keyword
    grammar = Grammar("json_schema", text, eos_token_ids(), any_whitespace=False)
    assert try_grammar(grammar, VOCABULARY).fault == ""
    compiled, draw, num_whole = COMPILER.compile(grammar), random.Random(name), 0
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for _ in range(ANSWERS):
        found = answer(compiled, draw)
        if found is not None:
            num_whole += 1
            validator.validate(found)
    assert num_whole >= least, name
    return ""


@pytest.mark.parametrize("name", PYTHON)
def test_schemas_of_python_libraries(name: str) -> None:
    assert check(PYTHON[name], name) == REFUSED.get(name, "")
