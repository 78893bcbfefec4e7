"""The examples of docs/add-an-endpoint.md and docs/add-a-parser.md, as they are written there."""

import pytest

from aerie.cluster.http import app
from aerie.cluster.http.answer import Piece
from aerie.cluster.http.parsers.output_parser import OutputParser, joined_deltas
from tests.support.edge_client import MODEL, in_process
from tests.support.fake_engine import FakeEngine, says
from tests.support.repository.pages import page_code


async def test_the_endpoint_answers_and_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ROUTES", (*app.ROUTES, page_code("add-an-endpoint.md")))
    async with in_process(FakeEngine(says("x"))) as client:
        tokens = await client.post("/tokenize", json={"prompt": "hello wörld", "add_special_tokens": False})
        counted = await client.post("/count", json={"model": MODEL, "text": "hello wörld", "typo": 1})
        refused = await client.post("/count", json={"text": 7})
        other = await client.post("/count", json={"text": "x", "model": "another"})
        document = (await client.get("/openapi.json")).json()
    assert counted.json() == {"count": tokens.json()["count"]}
    assert counted.headers["x-aerie-ignored"] == "typo"
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text"
    assert other.status_code == 404
    assert document["paths"]["/count"]["post"]["summary"] == "Count the tokens of a text."


@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("2 + 2 is Anna's 4\nAnswer: 4", "2 + 2 is Anna's 4", " 4"),
        ("Answer:Answer:", "", "Answer:"),
        ("no mark, Answe", "no mark, Answe", ""),
    ],
)
def test_the_parser_cut_at_every_place(answer: str, reasoning: str, content: str) -> None:
    for at in range(len(answer) + 1):
        parser: OutputParser = page_code("add-a-parser.md").AnswerParser()
        deltas = [parser.push(Piece(answer[:at], (0,))), parser.push(Piece(answer[at:], (0,), finish="stop"))]
        whole, calls = joined_deltas(deltas)
        assert (whole.reasoning.rstrip(), whole.content, whole.finish, calls) == (reasoning, content, "stop", []), at
