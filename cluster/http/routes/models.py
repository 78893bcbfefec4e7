"""The served models and the server's version."""

import time

import msgspec
from starlette.requests import Request

from aerie.attention import distribution
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import Endpoint, get
from aerie.cluster.http.errors import model_not_found
from aerie.cluster.http.routes.status import require_engine
from aerie.cluster.http.schema.response import ModelCard, ModelList, ThinkingSwitch, VersionReply
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.scheduling.plan import VALUES

_QUESTION = [{"role": "user", "content": "hi"}]


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    root, length, created = edge.config.served_model_name, edge.config.max_model_len, int(time.time())
    sampling, thinking = _default_sampling(edge.config), thinking_switch(edge.tokenizer)
    cards = {
        name: ModelCard(
            id=name,
            created=created,
            owned_by="aerie",
            root=root,
            max_model_len=length,
            default_sampling_params=sampling,
            thinking=thinking,
        )
        for name in edge.config.model_names
    }

    def all_cards() -> dict[str, ModelCard]:
        adapters = edge.engine.adapters() if edge.config.serves_adapters else {}
        adapter_cards = {
            name: msgspec.structs.replace(cards[root], id=name, root=path, parent=root)
            for name, path in sorted(adapters.items())
        }
        return cards | adapter_cards

    async def models(http: Request) -> ModelList:
        """The served model, under each of its names, and its LoRA adapters; 503 until an engine has been ready, because
        clients poll it."""
        await require_engine(edge)
        return ModelList(data=list(all_cards().values()))

    async def model(http: Request) -> ModelCard:
        """The model or LoRA adapter of this name."""
        await require_engine(edge)
        card = all_cards().get(http.path_params["model"])
        if card is None:
            raise model_not_found(http.path_params["model"], root)
        return card

    async def version(http: Request) -> VersionReply:
        """Return the server's version."""
        return VersionReply(version=distribution.version())

    return [
        get("/v1/models", models, ModelList),
        get("/v1/models/{model:path}", model, ModelCard),
        get("/version", version, VersionReply),
    ]


def thinking_switch(tokenizer: ChatTokenizer) -> ThinkingSwitch | None:
    """Return the boolean variable that switches thinking; None if there is none."""
    off = tokenizer.efforts.get("none", {})
    variable = next((name for name, value in off.items() if value is False), None)
    if variable is None:
        return None
    on, unset = (tokenizer.render(_QUESTION, variables=variables).text for variables in ({variable: True}, {}))
    return ThinkingSwitch(variable, default=unset == on)


def _default_sampling(config: EdgeConfig) -> dict[str, float]:
    """Return the sampling parameters of a request without any: temperature always, the others where they are set."""
    return {"temperature": VALUES["temperature"].default} | config.sampling_defaults
