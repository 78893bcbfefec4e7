"""What is served, and by which version."""

import time

from starlette.requests import Request

from attention import distribution
from cluster.http.endpoint import Endpoint, get
from cluster.http.errors import model_not_found
from cluster.http.routes.status import require_engine
from cluster.http.schema.response import ModelCard, ModelList, VersionReply
from cluster.http.serving import Edge


def endpoints(edge: Edge) -> list[Endpoint]:
    """Of one ingress."""
    name = edge.config.served_model_name
    card = ModelCard(
        id=name, created=int(time.time()), owned_by="aerie", root=name, max_model_len=edge.config.max_model_len
    )

    async def models(http: Request) -> ModelList:
        """The one model that is served; 503 until an engine has been ready, because clients wait for this."""
        await require_engine(edge)
        return ModelList(data=[card])

    async def model(http: Request) -> ModelCard:
        """The model of this name."""
        await require_engine(edge)
        if http.path_params["model"] != name:
            raise model_not_found(http.path_params["model"], name)
        return card

    async def version(http: Request) -> VersionReply:
        """Of the server."""
        return VersionReply(version=distribution.version())

    return [
        get("/v1/models", models, ModelList),
        get("/v1/models/{model:path}", model, ModelCard),
        get("/version", version, VersionReply),
    ]
