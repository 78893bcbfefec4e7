"""Encodes chats with prepared images: each placeholder of the chat template becomes as many as the image has tokens,
with the rotary positions of the model. Raises ApiError."""

from collections.abc import Sequence
from itertools import pairwise

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import invalid
from aerie.cluster.http.requests.prompts import encode_prompt
from aerie.cluster.http.schema.message import ImagePart, Message
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.text.user_text import ChatText, Truncation
from aerie.workers.prompt_inputs import Image, PreparedImage, PromptInputs
from aerie.workers.scheduling.plan import pack_i32
from aerie.workers.vision.positions import mrope_positions


def images_of(messages: Sequence[Message]) -> list[PreparedImage]:
    """Return the images of messages, in order."""
    images = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                if part.image is None:
                    raise invalid(f"messages[{i}].content[{j}].type", "images are not read here; send text")
                images.append(part.image)
    return images


async def encode_chat(
    chat: ChatText,
    images: Sequence[PreparedImage],
    tokenizer: ChatTokenizer,
    config: EdgeConfig,
    truncation: Truncation | None = None,
    add_special_tokens: bool = False,
    param: str = "messages",
) -> tuple[list[int], PromptInputs | None]:
    """Return the tokens of a chat and its other inputs. images: its `images_of`. Others: see `encode_prompt`."""
    if images and (placeholder := images[0].placeholder).text:
        chat = chat.replaced(placeholder.text, placeholder.replacement)
    tokens = await encode_prompt(chat, add_special_tokens, param, tokenizer, config, truncation)
    return _with_images(tokens, images) if images else (tokens, None)


def _with_images(tokens: list[int], images: Sequence[PreparedImage]) -> tuple[list[int], PromptInputs]:
    """Return a prompt with as many placeholders as its images have tokens, and its inputs."""
    placeholder = images[0].placeholder
    places = [i for i, token in enumerate(tokens) if token == placeholder.token_id]
    if len(places) != len(images):
        raise invalid(
            "messages",
            f"the chat template shows {len(places)} of the {len(images)} images of the messages to the model",
        )
    prompt, inputs = tokens[: places[0]], list[Image]()
    for image, (index, following) in zip(images, pairwise([*places, len(tokens)]), strict=True):
        inputs.append(Image.of(len(prompt), image.num_rows, image.grid, image.data))
        prompt += [placeholder.filler_id] * image.num_rows + tokens[index + 1 : following]
    if not placeholder.has_mrope:
        return prompt, PromptInputs(images=tuple(inputs))
    positions = mrope_positions(len(prompt), inputs, placeholder.merge_size)
    return prompt, PromptInputs(positions=pack_i32(positions), images=tuple(inputs), num_axes=3)
