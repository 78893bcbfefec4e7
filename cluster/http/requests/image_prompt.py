"""Puts prepared images into a prompt: each placeholder of the chat template becomes as many as the image has tokens,
with the rotary positions of the model. Raises ApiError."""

from collections.abc import Sequence
from itertools import pairwise

from aerie.cluster.http.errors import invalid
from aerie.cluster.http.schema.message import ImagePart, Message
from aerie.workers.prompt_inputs import Image, PreparedImage, PromptInputs
from aerie.workers.scheduling.plan import pack_i32
from aerie.workers.vision.positions import mrope_positions


def images_of(messages: Sequence[Message]) -> list[PreparedImage]:
    """Return the images of messages, in order."""
    found = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                if part.image is None:
                    raise invalid(f"messages[{i}].content[{j}].type", "images are not read here; send text")
                found.append(part.image)
    return found


def with_images(tokens: list[int], images: Sequence[PreparedImage]) -> tuple[list[int], PromptInputs]:
    """Return a prompt with as many placeholders as its images have tokens, and its inputs."""
    places = [i for i, token in enumerate(tokens) if token == images[0].token_id]
    if len(places) != len(images):
        raise invalid(
            "messages",
            f"the chat template shows {len(places)} of the {len(images)} images of the messages to the model",
        )
    prompt, inputs = tokens[: places[0]], list[Image]()
    for image, (place, following) in zip(images, pairwise([*places, len(tokens)]), strict=True):
        inputs.append(Image.of(len(prompt), image.num_rows, image.grid, image.data))
        prompt += [image.token_id] * image.num_rows + tokens[place + 1 : following]
    positions = mrope_positions(len(prompt), inputs, images[0].merge_size)
    return prompt, PromptInputs(positions=pack_i32(positions), images=tuple(inputs), num_axes=3)
