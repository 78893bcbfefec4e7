"""Joins requests of one prompt each to one request. Called by the routes."""

import dataclasses
from collections.abc import Sequence

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError, invalid
from aerie.cluster.http.requests.edge_request import EdgeRequest, chat_request
from aerie.cluster.http.schema.request import BatchRequest, ChatCompletionRequest
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.prompt_inputs import PromptInputs


async def batch_request(body: BatchRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the chats of a batch as one request with a prompt for each. Raises ApiError."""
    if len(body.messages) > config.max_choices:
        raise invalid("messages", f"{len(body.messages)} conversations are more than {config.max_choices}")
    values = {name: getattr(body, name) for name in body.model_fields_set - {"messages", *(body.model_extra or ())}}
    chats = []
    for i, messages in enumerate(body.messages):
        try:
            one = ChatCompletionRequest.model_construct(messages=messages, **values)
            chats.append(await chat_request(one, config, tokenizer))
        except ApiError as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = error.param.replace("messages", f"messages[{i}]", 1)
                error.message = error.message.replace("messages", f"messages[{i}]", 1)
            raise
    return joined_request(chats)


def joined_request(requests: Sequence[EdgeRequest]) -> EdgeRequest:
    """Join requests of one prompt each, which differ only in prompts, choices and echoes."""
    return dataclasses.replace(
        requests[0],
        prompts=[request.prompts[0] for request in requests],
        prompt_texts=tuple(text for request in requests for text in request.prompt_texts),
        continued=tuple(text for request in requests for text in request.continued),
        choices=[
            dataclasses.replace(choice, prompt=i) for i, request in enumerate(requests) for choice in request.choices
        ],
        inputs=(
            tuple((request.inputs or (PromptInputs(),))[0] for request in requests)
            if any(request.inputs for request in requests)
            else ()
        ),
        echo=[(request.echo or [""])[0] for request in requests] if any(request.echo for request in requests) else [],
    )
