"""Prepares the images of a conversation before it becomes a prompt: gets their bytes, and lets the checkpoint's
processor decode and resize each in a process of its own, which a hostile file may crash. Called by the routes."""

import asyncio
import collections
import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import invalid, overloaded, unsupported
from aerie.cluster.http.requests.image_fetch import Fetcher, data_of
from aerie.cluster.http.schema.message import ImagePart, Message
from aerie.workers.config import ModelSource
from aerie.workers.prompt_inputs import PreparedImage
from aerie.workers.structured_output.mask_messages import VocabularyError, send
from aerie.workers.structured_output.mask_process.template_process import ForkedProcess, TemplateError, Work, template
from aerie.workers.structured_output.token_bytes import read_json
from aerie.workers.vision.config import CONFIG, VisionConfig, read_vision, why_no_images
from aerie.workers.vision.processor import ImageJob

MAX_CACHED_BYTES = 1 << 26  # patches of the last images, because clients send a conversation's images again
MAX_WAITING = 64  # waiting images; more are refused


class ImageReader:
    """Refuses images. why: the reason."""

    def __init__(self, why: str = "this server takes no images") -> None:
        self._why = why

    async def read(self, messages: Sequence[Message], param: str = "messages") -> None:
        """Prepare the images of messages (`ImagePart.image`). Raises ApiError. param: name of the messages."""
        for where, _ in _images(messages, param):
            raise unsupported(f"{where}.type", f"images are not read here: {self._why}; send text")

    async def begin(self) -> None:
        """Start what the first image would wait for."""


def image_reader(source: ModelSource, config: EdgeConfig) -> ImageReader:
    """Return the reader for a model. Raises ValueError for a checkpoint whose images' settings are not supported."""
    raw = read_json(source.folder / CONFIG)
    vision = read_vision(raw, source)
    return ImageReader(why_no_images(raw, source)) if vision is None else ProcessReader(source, vision, config)


class ProcessReader(ImageReader):
    """Prepares images, as many at a time as there are cores, at most four."""

    def __init__(self, source: ModelSource, vision: VisionConfig, config: EdgeConfig) -> None:
        super().__init__()
        self._folder, self._vision, self._config = str(source.folder), vision, config
        self._fetcher = Fetcher(config.image_hosts, config.max_image_bytes, config.image_timeout_s)
        self._semaphore = asyncio.Semaphore(min(4, os.cpu_count() or 1))
        self._num_waiting = 0
        self._known: collections.OrderedDict[bytes, PreparedImage] = collections.OrderedDict()
        self._known_bytes = 0

    async def begin(self) -> None:
        with contextlib.suppress(OSError, TemplateError, VocabularyError):
            process, own = await asyncio.to_thread(self._forked)
            own.close()
            process.kill()

    async def read(self, messages: Sequence[Message], param: str = "messages") -> None:
        """Fetch and prepare the images of messages, and set them in their parts. Raises ApiError."""
        images = list(_images(messages, param))
        if len(images) > self._config.max_images:
            raise invalid(param, f"{len(images)} images are more than {self._config.max_images} (ingress.max_images)")
        for where, part in images:
            at, limit = f"{where}.image_url", self._config.max_image_bytes
            is_data = part.url[:5].lower() == "data:"
            data = data_of(part.url, at, limit) if is_data else await self._fetcher.fetch(part.url, at)
            image = await self._prepared(data)
            if image.fault:
                raise invalid(at, f"{at}: the image cannot be used: {image.fault}", "invalid_image")
            part.set_image(image)

    async def _prepared(self, data: bytes) -> PreparedImage:
        """Return the image of these bytes, from the cache or decoded. Raises ApiError if too many images wait."""
        digest = blake2b(data, digest_size=32).digest()
        image = self._known.get(digest)
        if image is not None:
            self._known.move_to_end(digest)
            return image
        if self._num_waiting >= MAX_WAITING:
            raise overloaded(f"{self._num_waiting} images wait to be decoded; retry later", 1.0)
        self._num_waiting += 1
        try:
            async with self._semaphore:
                image = await self._decoded(data)
        finally:
            self._num_waiting -= 1
        if not image.fault and digest not in self._known:
            self._known[digest] = image
            self._known_bytes += len(image.data)
            while self._known_bytes > MAX_CACHED_BYTES and len(self._known) > 1:
                self._known_bytes -= len(self._known.popitem(last=False)[1].data)
        return image

    async def _decoded(self, data: bytes) -> PreparedImage:
        """Prepare an image in a new process. Raises ApiError if that is not possible now."""
        config, vision = self._config, self._vision
        try:
            process, own = await asyncio.to_thread(self._forked)
        except (OSError, TemplateError, VocabularyError) as error:
            raise overloaded(f"the image cannot be decoded: {error}", 5.0) from None
        limit_s = config.image_timeout_s
        job = ImageJob(
            data,
            config.max_source_pixels,
            vision.max_pixels,
            vision.placeholder,
            vision.patch_size,
            max(1, round(limit_s)),
        )
        try:
            async with asyncio.timeout(3 * limit_s):  # wall time; on a busy machine CPU time takes longer
                return await _result(own, job)
        except TimeoutError:
            return PreparedImage(fault=f"it takes longer than {limit_s:g} s to decode")
        except (asyncio.IncompleteReadError, OSError):
            return PreparedImage(fault="it takes too much memory or time to decode")
        finally:
            process.kill()
            own.close()

    def _forked(self) -> tuple[ForkedProcess, socket.socket]:
        """Fork a process that waits for an image. Return it and the socket to it."""
        own, its = socket.socketpair()
        try:
            with its:
                process = template("images").fork(Work(self._folder, 0), [its.fileno()])
        except BaseException:
            own.close()
            raise
        return process, own


async def _result(own: socket.socket, job: ImageJob) -> PreparedImage:
    """Send a job to a decoding process, and return the prepared image. own: this end of the socket to the process."""
    await asyncio.to_thread(send, own, job)
    own.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=own, limit=1 << 20)
    try:
        head = await reader.readexactly(4)
        raw = await reader.readexactly(int.from_bytes(head, "little"))
        return msgspec.msgpack.decode(raw, type=PreparedImage)
    finally:
        writer.close()


def _images(messages: Iterable[Message], param: str) -> Iterator[tuple[str, ImagePart]]:
    """Yield the images of messages that are not prepared yet, with their places."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart) and part.image is None:
                yield f"{param}[{i}].content[{j}]", part
