"""The items of a response, and the events of a stream that build them, while they are generated or afterwards."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from aerie.cluster.http.replies.streaming import named_event
from aerie.cluster.http.requests.responses import joined_name
from aerie.cluster.http.schema.completions import FunctionDelta, TokenLogprob, ToolCallDelta
from aerie.cluster.http.schema.responses import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
)


class ItemEvents:
    """Builds items and their events. Only the last item can be open.

    namespaces: namespace and own name of functions that have one, by the name that the model sees.
    output: the items so far.
    Argument item_id of methods: the item's id; "" for a new one.
    """

    def __init__(self, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._namespaces = namespaces
        self.output: list[OutputItem] = []
        self._is_open = False  # whether the last item is open
        self._num_events = 0

    def reasoning(self, text: str, item_id: str = "") -> bytes:
        """Return the events for more reasoning."""
        events = b""
        if not (self._is_open and isinstance(self.output[-1], ReasoningItem)):
            item = ReasoningItem(id=item_id or _id("rs"), status="in_progress", content=[])
            events = self._open(item) + self._part("response.content_part.added", ReasoningText(""))
            item.content = [ReasoningText("")]
        last = self.output[-1]
        assert isinstance(last, ReasoningItem)
        last.content[0].text += text
        return events + self.event("response.reasoning_text.delta", **self._place(0), delta=text)

    def content(self, text: str, logprobs: list[TokenLogprob], item_id: str = "") -> bytes:
        """Return the events for more text of the answer."""
        events = b""
        if not (self._is_open and isinstance(self.output[-1], OutputMessage)):
            item = OutputMessage(id=item_id or _id("msg"), status="in_progress", content=[])
            events = self._open(item) + self._part("response.content_part.added", OutputText(""))
            item.content = [OutputText("", [], [])]
        last = self.output[-1]
        assert isinstance(last, OutputMessage)
        last.content[0].text += text
        last.content[0].logprobs += logprobs
        return events + self.event("response.output_text.delta", **self._place(0), delta=text, logprobs=logprobs)

    def call(self, call: ToolCallDelta, item_id: str = "") -> bytes:
        """Return the events for the beginning of a tool call, or for more of it."""
        events = b""
        if call.id is not UNSET:
            assert call.function.name is not UNSET
            namespace, name = self._namespaces.get(call.function.name, (UNSET, call.function.name))
            item = FunctionCallItem(
                id=item_id or _id("fc"),
                call_id=call.id,
                name=name,
                namespace=namespace,
                arguments="",
                status="in_progress",
            )
            events = self._open(item)
        last = self.output[-1]
        assert isinstance(last, FunctionCallItem)
        arguments = call.function.arguments
        if arguments is UNSET or not arguments:
            return events
        last.arguments += arguments
        return events + self.event("response.function_call_arguments.delta", **self._place(), delta=arguments)

    def _open(self, item: OutputItem) -> bytes:
        events = self.close("completed")
        self.output.append(item)
        self._is_open = True
        return events + self.event("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def close(self, status: ItemStatus) -> bytes:
        """Return the events that close the open item."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.output[-1]
        item.status = status
        place = self._place(0)
        if isinstance(item, FunctionCallItem):
            done = {"name": item.name, "arguments": item.arguments}
            events = self.event("response.function_call_arguments.done", **self._place(), **done)
        elif isinstance(item, ReasoningItem):
            events = self.event("response.reasoning_text.done", **place, text=item.content[0].text)
            events += self._part("response.content_part.done", item.content[0])
        else:
            text = item.content[0]
            events = self.event("response.output_text.done", **place, text=text.text, logprobs=text.logprobs)
            events += self._part("response.content_part.done", text)
        return events + self.event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _part(self, kind: str, part: OutputText | ReasoningText) -> bytes:
        return self.event(kind, **self._place(0), part=part)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": len(self.output) - 1, "item_id": self.output[-1].id}
        return place if content_index is None else place | {"content_index": content_index}

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event, numbered."""
        self._num_events += 1
        return named_event(kind, ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields))

    def whole(self, item: OutputItem) -> Iterator[bytes]:
        """Yield the events of a finished item."""
        if isinstance(item, ReasoningItem):
            events = self.reasoning(item.content[0].text, item.id)
        elif isinstance(item, FunctionCallItem):
            function = FunctionDelta(name=_shown_name(item), arguments=item.arguments)
            events = self.call(ToolCallDelta(index=0, id=item.call_id, function=function), item.id)
        else:
            events = self.content(item.content[0].text, item.content[0].logprobs, item.id)
        for event in (events + self.close(item.status)).split(b"\n\n")[:-1]:
            yield event + b"\n\n"


def replayed(response: Response) -> Iterator[bytes]:
    """Yield the events of a finished response. Each text is one delta."""
    calls = [item for item in response.output if isinstance(item, FunctionCallItem)]
    items = ItemEvents({_shown_name(item): (item.namespace, item.name) for item in calls if item.namespace})
    begun = msgspec.structs.replace(
        response, status="in_progress", output=[], usage=None, incomplete_details=None, metrics=UNSET
    )
    yield items.event("response.created", response=begun)
    yield items.event("response.in_progress", response=begun)
    for item in response.output:
        yield from items.whole(item)
    yield items.event(f"response.{response.status}", response=response)


def _shown_name(item: FunctionCallItem) -> str:
    return joined_name(item.namespace or None, item.name)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
