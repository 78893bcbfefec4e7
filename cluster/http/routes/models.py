"""The served models and the server's version."""

import time

from starlette.requests import Request

from attention import distribution
from cluster.http.endpoint import Endpoint, get
from cluster.http.errors import model_not_found
from cluster.http.routes.status import require_engine
from cluster.http.schema.response import ModelCard, ModelList, VersionReply
from cluster.http.serving import Edge


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    root, length, created = edge.config.served_model_name, edge.config.max_model_len, int(time.time())
    cards = {
        name: ModelCard(id=name, created=created, owned_by="aerie", root=root, max_model_len=length)
        for name in edge.config.model_names
    }

    async def models(http: Request) -> ModelList:
        """The served model, under each of its names; 503 until an engine has been ready, because clients poll it."""
        await require_engine(edge)
        return ModelList(data=list(cards.values()))

    async def model(http: Request) -> ModelCard:
        """The model of this name."""
        await require_engine(edge)
        card = cards.get(http.path_params["model"])
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
