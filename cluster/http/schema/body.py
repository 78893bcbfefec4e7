"""Reads and validates bodies of requests, with one rule for unknown fields.

A field that a schema knows is honoured, has no effect (documented), or is refused by name (`Schema.refused`), because
the answer would mean something else without it. Other fields are ignored and named in a header of the reply: those that
no schema knows, and those that cannot be honoured but leave the answer's meaning (`Schema.ignored`,
`Schema.without_effect`). With `ingress.strict` they are refused (`check_ignored`). Arguments of earlier calls that are
no JSON are repaired and named too, because a model wrote them. The rules hold in every part of a body, because every
part is a `Schema`. Called by `aerie.cluster.http.endpoint`.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError

from aerie.cluster.http.errors import ApiError, invalid, unsupported
from aerie.cluster.http.text.json_text import MAX_NESTING, Repaired, nesting

# name -> (reason of the refusal, accepted values without effect). null is always accepted.
Refusals = dict[str, tuple[str, tuple[Any, ...]]]

# Checked before pydantic, which holds the interpreter's lock while it validates every element: 6-12 s for the worst
# bodies of 8 MB, during which all streams of this process would stop.
MAX_CONTAINERS = 2**16  # lists and objects; decoding two million took 3 s, and validating them another 3 s
MAX_PARAMETERS = 128  # maximum fields of a request
MAX_MESSAGES = 4096  # maximum messages of a request, over all of its conversations
MAX_MESSAGE_FIELDS = 32  # maximum fields of a message
MAX_PARTS = 4096  # parts of one message, item or turn
MAX_PARTS_IN_ALL = 16384  # maximum content parts of all messages together
MAX_OBJECT_FIELDS = 1024  # fields of an object parameter; logit_bias is the largest
_CONVERSATIONS = ("messages", "input", "sampling_params")  # parameters that are lists of messages or items


class Schema(BaseModel):
    """A body, or an object in one. Known fields are checked strictly, unknown ones kept in `model_extra`.

    refused: known fields that cannot be honoured, and without which the answer would mean something else.
    ignored: other known fields that cannot be honoured, with the values that need not be named.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    refused: ClassVar[Refusals] = {}
    ignored: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def without_effect(self) -> Iterable[str]:
        """Return the fields, or `field=value`, that are ignored and named."""
        return self.model_extra or ()


Body = TypeVar("Body", bound=BaseModel)


@runtime_checkable
class Choosing(Protocol):
    """A body that fits one of several schemas, distinguished by its fields."""

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[Schema]: ...


def by_type(default: str = "") -> Discriminator:
    """Choose among schemas by the field `type`; their tags are the values in angle brackets. default: value for objects
    without the field. Strings have the tag `<string>`."""

    def tag(value: Any) -> str:
        if isinstance(value, dict):
            return f"<{value.get('type', default)}>"
        return "<string>" if isinstance(value, str) else f"<{getattr(value, 'type', '')}>"

    return Discriminator(tag)


def known_type_or_other(*known: str) -> Discriminator:
    """Choose among objects whose `type` is known, each tagged `<type>`, and others, tagged `<other>`. Without a type it
    is the first of the known ones."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{known[0] if kind is None else kind if kind in known else 'other'}>"

    return Discriminator(tag)


def text_or_list() -> Discriminator:
    """Choose between a string, tagged `<string>`, and a list, `<list>`."""
    return Discriminator(lambda value: "<string>" if isinstance(value, str) else "<list>")


def object_or_list() -> Discriminator:
    """Choose between an object, tagged `<object>`, and a list, `<list>`."""
    return Discriminator(lambda value: "<list>" if isinstance(value, list) else "<object>")


def parse_body(raw: bytes, kind: type[Body], strict: bool = False) -> tuple[Body, list[str]]:
    """Return the checked request of a JSON body, and the paths of ignored fields. strict: refuse these.

    Unlike Python's, msgspec's parser refuses NaN, Infinity, unbounded numbers and nesting, and lone surrogates. Raises
    ApiError (400).
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:
        num, depth = nesting(raw)
        if depth > MAX_NESTING:
            raise invalid(None, f"The request body is nested more than {MAX_NESTING} deep", "invalid_json")
        if num > MAX_CONTAINERS:
            message = f"The request body has {num} lists and objects; at most {MAX_CONTAINERS} are allowed"
            raise invalid(None, message)
    try:
        values = msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8))  # sent by some clients on Windows
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"The request body is not valid JSON: {reason}", "invalid_json") from None
    if not isinstance(values, dict):
        raise invalid(None, "The request body must be a JSON object", "invalid_json")
    return checked_body(values, kind, strict)


def checked_body(values: Mapping[str, Any], kind: type[Body], strict: bool) -> tuple[Body, list[str]]:
    """Validate a decoded body. Raises ApiError (400)."""
    _check_sizes(values)
    if issubclass(kind, Choosing):
        kind = kind.choose(values)
    if issubclass(kind, Schema):
        values = without_refused(values, kind.refused, kind.ignored)
        _check_spelling(values, kind)
    body = validated(values, kind)
    ignored = list(ignored_fields(body))
    check_ignored([path for path, is_repaired in ignored if not is_repaired], strict)
    return body, [path for path, _ in ignored]


def check_ignored(names: Sequence[str], strict: bool) -> None:
    """Raise ApiError (400) if fields are ignored by a server that is `strict`."""
    if strict and names:
        listed = ", ".join(name[:100] for name in names[:20])
        raise invalid(names[0][:100], f"Unknown parameter: {listed} (ingress.strict)", "unknown_parameter")


def validated(values: Mapping[str, Any], kind: type[Body]) -> Body:
    """Return a body of these values. Raises ApiError (400) with the first fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _validation_fault(error, values) from None


def ignored_fields(value: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the path of each field that is not honoured as it stands, such as `messages[0].name`, and whether it is
    repaired: a call's arguments that are no JSON."""
    if isinstance(value, Schema):
        dot = f"{path}." if path else ""
        yield from ((dot + name, False) for name in value.without_effect())
        for name in type(value).model_fields:
            yield from ignored_fields(getattr(value, name), dot + name)
    elif isinstance(value, list) and value and isinstance(value[0], Schema | list):
        for i, entry in enumerate(value):
            yield from ignored_fields(entry, f"{path}[{i}]")
    elif isinstance(value, Repaired):
        yield path, True


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Raise ApiError for bodies with more elements than any reasonable request."""
    if len(values) > MAX_PARAMETERS:
        raise invalid(None, f"The request body has {len(values)} parameters; at most {MAX_PARAMETERS} are allowed")
    for name, value in values.items():
        if isinstance(value, dict) and len(value) > MAX_OBJECT_FIELDS:
            raise invalid(name[:100], f"{name[:100]} has {len(value)} entries; at most {MAX_OBJECT_FIELDS} are allowed")
    params = values.get("sampling_params")
    for param in params if isinstance(params, list) else [params]:
        bias = param.get("logit_bias") if isinstance(param, dict) else None
        if isinstance(bias, dict) and len(bias) > MAX_OBJECT_FIELDS:
            where = "sampling_params.logit_bias"
            raise invalid(where, f"{where} has {len(bias)} entries; at most {MAX_OBJECT_FIELDS} are allowed")
    for name in _CONVERSATIONS:
        if isinstance(values.get(name), list):
            _check_conversation(name, values[name])


def _check_conversation(name: str, messages: list[Any]) -> None:
    """Raise ApiError for too many messages, fields or parts."""
    for i, conversation in enumerate(messages):
        if isinstance(conversation, list):  # of a batch
            _check_conversation(f"{name}[{i}]", conversation)
    if len(messages) + sum(len(entry) for entry in messages if isinstance(entry, list)) > MAX_MESSAGES:
        raise invalid(name, f"{name} has {len(messages)} entries; at most {MAX_MESSAGES} are allowed")
    num_parts = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if len(message) > MAX_MESSAGE_FIELDS:
            where = f"{name}[{i}]"
            raise invalid(where, f"{where} has {len(message)} fields; at most {MAX_MESSAGE_FIELDS} are allowed")
        lists = {field: value for field, value in message.items() if isinstance(value, list)}
        for field, parts in lists.items():
            if len(parts) > MAX_PARTS:
                where = f"{name}[{i}].{field[:100]}"
                raise invalid(where, f"{where} has {len(parts)} parts; at most {MAX_PARTS} are allowed")
            num_parts += len(parts) + sum(map(_num_inner_parts, parts))
    if num_parts > MAX_PARTS_IN_ALL:
        raise invalid(name, f"{name} has {num_parts} parts; at most {MAX_PARTS_IN_ALL} are allowed")


def _num_inner_parts(part: Any) -> int:
    """Return the number of parts in a part, such as a tool's result in Anthropic's form."""
    inner = part.get("content") if isinstance(part, dict) else None
    return len(inner) if isinstance(inner, list) else 0


def without_refused(
    values: Mapping[str, Any], refused: Refusals, ignored: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return `values` without refused and ignored parameters whose values ask for nothing. Raises ApiError for other
    values of refused ones; other values of ignored ones are kept, and become unknown fields."""
    used = {}
    for name, value in values.items():
        if name not in refused:
            if name not in ignored or (value is not None and value not in ignored[name]):
                used[name] = value
            continue
        reason, harmless = refused[name]
        if value is not None and value not in harmless:
            raise unsupported(name, reason)
    return used


def _check_spelling(values: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Raise ApiError for a known parameter in another spelling (`maxTokens`), because ignoring it would change the
    answer."""
    unknown = values.keys() - kind.model_fields.keys()
    if not unknown:
        return
    known = {_bare(name): name for name in kind.model_fields}
    for name in unknown:
        if _bare(name) in known:
            meant = known[_bare(name)]
            raise invalid(name[:100], f"Unknown parameter: {name[:100]} (is {meant} meant?)", "unknown_parameter")


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


NO_IMAGE = "no_image"  # type of a fault of a field that may be missing
_MEDIA = ("image", "video", "audio")  # substrings of part types in all APIs


def _validation_fault(error: ValidationError, values: Mapping[str, Any]) -> ApiError:
    """Return the first fault as an ApiError. values: the body."""
    fault = error.errors(include_url=False, include_input=False)[0]
    param = _path(fault["loc"], values, fault["type"] in ("missing", NO_IMAGE))
    match fault["type"]:
        case "missing":
            return invalid(param, f"Missing required parameter: {param}", "missing_required_parameter")
        case "union_tag_invalid":
            return _unknown_type(param, fault["ctx"]["tag"], fault["ctx"]["expected_tags"])
    message = fault["msg"]
    return invalid(param, f"Invalid value for {param}: {message[0].lower()}{message[1:]}")


def _unknown_type(param: str, tag: str, expected: str) -> ApiError:
    """Return the error for a value that is no member of a union.

    tag, expected: the value's tag and all known ones, as pydantic quotes them. `by_type` makes tags: "<TYPE>"; "<>" and
        "<None>" of objects without a type, "<string>" of strings.
    """
    known = expected.translate(str.maketrans("", "", "<>'")).removeprefix("string, ")
    if tag in ("<>", "<None>", "<string>"):
        return invalid(param, f"{param} must be an object whose type is one of: {known}")
    kind = tag[1:-1][:40]
    if "image" in kind and "image_url" in known:
        return unsupported(f"{param}.type", f"type {kind!r}: images are parts of type image_url; these are: {known}")
    if any(medium in kind for medium in _MEDIA):
        reason = f"type {kind!r}: models read text and images only; these are: {known}"
        return unsupported(f"{param}.type", reason)
    return unsupported(f"{param}.type", f"type {kind!r} is not known here; these are: {known}")


def _path(location: tuple[int | str, ...], values: Any, is_missing: bool) -> str:
    """("messages", 0, "content", "<list>", 1) -> "messages[0].content[1]".

    values: the body; pydantic's names of a union's members, which are not in it, are left out. is_missing: whether the
    last name is of a missing field."""
    path = ""
    for i, part in enumerate(location):
        if isinstance(part, int) and isinstance(values, list):
            path, values = f"{path}[{part}]", values[part]
        elif isinstance(values, dict) and (part in values or (is_missing and i == len(location) - 1)):
            path, values = f"{path}.{part}" if path else str(part), values.get(part)
    return path
