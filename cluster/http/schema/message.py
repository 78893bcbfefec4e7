"""A conversation as clients send it: messages, tools, which tool to call."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from aerie.cluster.http.schema.body import MAX_PARTS, NO_IMAGE, Schema, by_type, known_type_or_other, text_or_list
from aerie.cluster.http.text.json_text import call_arguments
from aerie.workers.prompt_inputs import PreparedImage

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]  # Anthropic's length; OpenAI's is 64
# OpenAI's five roles, and any other that the model's chat template supports. A role may stand between control tokens in
# the prompt, so its characters are restricted.
Role = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_ .-]{1,64}$")]


class TextPart(Schema):
    """A part of a message's text. The other names are those of /v1/responses. annotations, logprobs: from a reply that
    is sent back; no effect."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Schema):
    """The assistant's refusal in an earlier turn."""

    type: Literal["refusal"]
    refusal: str


class ImageURL(Schema):
    """url: of the image, or a data URL with the image itself. detail: no effect; the server's limit of pixels holds."""

    url: str
    detail: str | None = None


def _given_image(image: ImageURL | str | None, info: ValidationInfo) -> ImageURL | str | None:
    """Refuse a part that names an image without containing it. info: has the fields before."""
    if info.data.get("file_id") is not None:
        raise PydanticCustomError(NO_IMAGE, "no files are kept here; send the image in image_url")
    if not (image.url if isinstance(image, ImageURL) else image):
        reason = "no image is given" if info.data.get("uuid") is None else "no images are kept by uuid"
        raise PydanticCustomError(NO_IMAGE, f"{reason}; send it in image_url")
    return image


class ImagePart(Schema):
    """An image in a message. detail, file_id: of /v1/responses. uuid: vLLM's name of an image that it has cached.
    Refused without an image."""

    type: Literal["image_url", "input_image"]
    detail: str | None = None
    file_id: str | None = None
    uuid: str | None = None
    image_url: Annotated[ImageURL | str | None, AfterValidator(_given_image)] = Field(None, validate_default=True)
    _image: PreparedImage | None = PrivateAttr(None)

    def without_effect(self) -> Iterable[str]:
        yield from super().without_effect()
        if self.uuid is not None:
            yield "uuid"

    @property
    def url(self) -> str:
        assert self.image_url is not None, "checked by `_given_image`"
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url

    @property
    def image(self) -> PreparedImage | None:
        """The image, once `aerie.cluster.http.requests.image_reader` has prepared it."""
        return self._image

    def set_image(self, image: PreparedImage) -> None:
        self._image = image


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[ImagePart, Tag("<input_image>")]
    | Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    by_type(),
]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[Annotated[str, Tag("<string>")] | Annotated[Parts, Tag("<list>")], text_or_list()]


# Arguments of an earlier call: a JSON text, or the object itself. The value is always an object.
Arguments = Annotated[
    dict[str, Any] | str | None,
    Field(validate_default=True),
    AfterValidator(lambda given: given if isinstance(given, dict) else call_arguments(given or "")),
]


class CalledFunction(Schema):
    name: str
    arguments: Arguments = None


class MessageToolCall(Schema):
    """A call in an earlier answer. index: from a stream's events; no effect."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class Message(Schema):
    """One turn of a conversation.

    tool_calls, reasoning_content, reasoning (its other name), refusal: only in the assistant's turns.
    annotations, audio, function_call: empty fields of earlier answers that OpenAI's client sends back.
    """

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=128, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class _Sent(Schema):
    """An object that chat templates show in the order of its fields."""

    _names: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _with_order(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        message = validate(value)
        message._names = tuple(value) if isinstance(value, dict) else ()
        return message

    def as_sent(self) -> dict[str, Any]:
        """Return the known fields that were sent, without null, in their order."""
        sent = ((name, getattr(self, name)) for name in self._names if name in type(self).model_fields)
        return {name: value for name, value in sent if value is not None}


class Function(_Sent):
    """parameters: JSON schema of the arguments; null: no arguments. strict: a grammar makes arguments fit the
    schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Sent):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class OtherTool(Schema):
    """A tool of another type, such as `web_search` or `custom`: the model is not shown it, so it does not call it."""

    type: str

    def without_effect(self) -> Iterable[str]:
        """See `Schema.without_effect`: the tool as a whole."""
        return (f"type={self.type}",)


Tools = list[
    Annotated[
        Annotated[Tool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")], known_type_or_other("function")
    ]
]


class FunctionReference(Schema):
    name: FunctionName


class NamedTool(Schema):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionReference


class ToolSubset(Schema):
    """The functions that the model may (auto) or must (required) choose from. Tools of other types are ignored."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
                known_type_or_other("function"),
            ]
        ],
        Field(min_length=1),
    ]


class AllowedTools(Schema):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


ToolMode = Annotated[Literal["none", "auto", "required"], Tag("<string>")]
ToolChoice = Annotated[
    ToolMode | Annotated[NamedTool, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")], by_type()
]
