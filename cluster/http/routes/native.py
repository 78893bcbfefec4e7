"""SGLang's own routes, for scripts written for it."""

from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.endpoint import Endpoint, get, post
from aerie.cluster.http.replies.native import NativeReply
from aerie.cluster.http.replies.reply import ReplyContext
from aerie.cluster.http.requests.native import has_several, native_request, scored_from
from aerie.cluster.http.routes.status import require_engine
from aerie.cluster.http.schema.native import NativeAnswer, NativeModel, NativeRequest
from aerie.cluster.http.serving import Edge


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    async def generate(http: Request, body: NativeRequest) -> Response:
        """Continues a text, in SGLang's format."""
        request = await native_request(body, config, tokenizer)

        def form(context: ReplyContext) -> NativeReply:
            return NativeReply(context, has_several(body), body.return_text_in_logprobs is True, scored_from(body))

        return await edge.response(http, request, body.rid, form, "{}")

    async def model(http: Request) -> NativeModel:
        """The served model, in SGLang's format."""
        await require_engine(edge)
        name = config.served_model_name
        return NativeModel(model_path=name, tokenizer_path=name, max_model_len=config.max_model_len)

    return [
        post("/generate", generate, NativeRequest, NativeAnswer, event=NativeAnswer, generates=True),
        get("/get_model_info", model, NativeModel),
        get("/model_info", model, NativeModel),
    ]
