"""Answers questions from documents: a deployment of its own finds the paragraph, and Aerie, by its handle, the answer.

On a cluster where `aerie serve --address` runs, in this folder:

    serve run --non-blocking --address A:6379 --name documents --route-prefix /documents documents:app
    curl http://A:8000/documents -H 'content-type: application/json' -d '{"question": "What is a slot?"}'
"""

import re
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

PARAGRAPHS = [
    "A slot is the place of a running request in the batch.",
    "A page holds the keys and values of a few tokens.",
    "A draft proposes tokens, which the target verifies in one step.",
]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100)
class Documents:
    def __init__(self, paragraphs: list[str], application: str = "aerie") -> None:
        self._paragraphs = paragraphs
        self._model = serve.get_app_handle(application)

    def _chat(self, question: str) -> dict[str, Any]:
        paragraph = max(self._paragraphs, key=lambda text: len(words(text) & words(question)))
        message = {"role": "user", "content": f"{paragraph}\n\n{question}"}
        return {"messages": [message], "max_tokens": 100, "temperature": 0}

    async def answer(self, question: str) -> str:
        """For other deployments."""
        reply = await self._model.chat.remote(self._chat(question))
        return str(reply["choices"][0]["message"]["content"])

    async def __call__(self, http: Request) -> StreamingResponse:
        """For HTTP: streams the answer. If the client leaves, the chat ends too."""
        question = (await http.json())["question"]
        chunks = self._model.options(stream=True).chat.remote(self._chat(question))

        async def texts() -> AsyncIterator[str]:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""

        return StreamingResponse(texts(), media_type="text/plain")


app = Documents.bind(PARAGRAPHS)
