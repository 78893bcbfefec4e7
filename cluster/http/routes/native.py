"""SGLang's own routes, which its users' scripts call."""

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.endpoint import Endpoint, get, post
from cluster.http.errors import ApiError
from cluster.http.replies.native import NativeReply
from cluster.http.replies.reply import ReplyContext
from cluster.http.requests.edge_request import text_request
from cluster.http.requests.native import native_completion, scored_from, to_native_error
from cluster.http.routes.status import require_engine
from cluster.http.schema.native_reply import NativeAnswer, NativeModel
from cluster.http.schema.native_request import NativeRequest
from cluster.http.serving import Edge, GenerationResponse
from cluster.logs import request_id


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    async def generate(http: Request, body: NativeRequest) -> Response:
        """Continues a text, in SGLang's form."""
        try:
            request = await text_request(native_completion(body), config, tokenizer)
        except ApiError as error:
            raise to_native_error(error) from None
        if (grammar := request.choices[0].sampling.grammar) is not None:
            await edge.grammars.check(grammar)
        if body.rid is not None:
            http.state.request_id = body.rid
            request_id.set(body.rid)
        prompts = body.input_ids if body.text is None else body.text
        several = isinstance(prompts, list) and not (prompts and type(prompts[0]) is int)

        def form(context: ReplyContext) -> NativeReply:
            return NativeReply(context, several, body.return_text_in_logprobs is True, scored_from(body))

        name: str = http.state.request_id
        return GenerationResponse(edge, request, form, name, name)

    async def model(http: Request) -> NativeModel:
        """The served model, as SGLang's clients ask for it."""
        await require_engine(edge)
        name = config.served_model_name
        return NativeModel(model_path=name, tokenizer_path=name, max_model_len=config.max_model_len)

    return [
        post("/generate", generate, NativeRequest, NativeAnswer, event=NativeAnswer, generates=True),
        get("/get_model_info", model, NativeModel),
        get("/model_info", model, NativeModel),
    ]
