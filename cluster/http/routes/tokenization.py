"""Routes that convert text to tokens and back, under vLLM's and SGLang's paths."""

from msgspec import UNSET
from starlette.requests import Request

from aerie.cluster.http.endpoint import Endpoint, get, post
from aerie.cluster.http.errors import invalid, too_long
from aerie.cluster.http.requests.image_prompt import encode_chat, images_of
from aerie.cluster.http.requests.parameters import check_model
from aerie.cluster.http.requests.prompts import chat_text, check_token_ids, encode_prompt
from aerie.cluster.http.requests.tools import functions
from aerie.cluster.http.schema.request import DetokenizeRequest, TokenizeRequest
from aerie.cluster.http.schema.response import DetokenizeReply, TokenizeReply, TokenizerReply
from aerie.cluster.http.serving import Edge


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    async def tokenize(http: Request, body: TokenizeRequest) -> TokenizeReply:
        """The tokens of a text, or of messages in the model's chat template."""
        check_model(body.model, config)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.prompt is not None:
            tokens = await encode_prompt(body.prompt, body.add_special_tokens is not False, "prompt", tokenizer, config)
        else:
            tokens = await _chat_tokens(edge, body)
        return TokenizeReply(
            count=len(tokens),
            max_model_len=config.max_model_len,
            tokens=tokens,
            token_strs=[tokenizer.token_name(token) for token in tokens] if body.return_token_strs else UNSET,
        )

    async def detokenize(http: Request, body: DetokenizeRequest) -> DetokenizeReply:
        """The text of tokens."""
        check_model(body.model, config)
        limit = 2 * config.max_model_len  # the limit of texts in /tokenize
        if isinstance(body.tokens, list) and len(body.tokens) > limit:
            raise too_long(f"tokens has {len(body.tokens)} entries, more than {limit}; send them in parts", "tokens")
        tokens = check_token_ids("tokens", body.tokens, tokenizer)
        text = await tokenizer.decode_long(tokens, body.skip_special_tokens is True)
        return DetokenizeReply(prompt=text, text=UNSET if body.skip_special_tokens is None else text)

    async def tokenizer_info(http: Request) -> TokenizerReply:
        """Return the tokenizer's settings, for clients that tokenize themselves."""
        return TokenizerReply(
            vocab_size=tokenizer.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_ids=tokenizer.eos_token_ids,
            special_tokens=tokenizer.special_tokens,
            chat_template=tokenizer.template_source or None,
            tokenizer_class=tokenizer.class_name,
        )

    return [
        get("/tokenizer_info", tokenizer_info, TokenizerReply),
        *(post(path, tokenize, TokenizeRequest, TokenizeReply) for path in ("/tokenize", "/v1/tokenize")),
        *(post(path, detokenize, DetokenizeRequest, DetokenizeReply) for path in ("/detokenize", "/v1/detokenize")),
    ]


async def _chat_tokens(edge: Edge, body: TokenizeRequest) -> list[int]:
    """Return the tokens of messages in the chat template, which adds the special tokens itself."""
    assert body.messages is not None
    await edge.images.read(body.messages)
    continued = body.continue_final_message is True
    text = await chat_text(
        body.messages,
        edge.tokenizer,
        not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        {**(edge.config.chat_template_kwargs or {}), **(body.chat_template_kwargs or {})},
        () if body.tool_choice == "none" else functions(body.tools),
        continued,
    )
    images, special = images_of(body.messages), body.add_special_tokens is True
    tokens, _ = await encode_chat(text, images, edge.tokenizer, edge.config, None, special, "messages")
    return tokens
