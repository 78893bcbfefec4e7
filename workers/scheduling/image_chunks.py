"""`ImageChunks`: how many images a step encodes, where its chunks may end, and which pixels its plan contains."""

from collections.abc import Sequence as List

import msgspec

from aerie.workers.prompt_inputs import Image, ImageSizes
from aerie.workers.scheduling.encoded_images import EncodedImages
from aerie.workers.scheduling.plan import Chunk
from aerie.workers.scheduling.sequence import Sequence

# Patches that a step encodes beside its rounds, or one larger image. 4,096 patches are a picture of a megapixel, whose
# tower has about the operations of a prompt chunk of 2,048 tokens.
STEP_PATCHES = 4096


class ImageChunks:
    """Images of one engine's plans. sizes: None for an engine that takes no images."""

    def __init__(self, sizes: ImageSizes | None) -> None:
        self._sizes = sizes
        self._encoded = EncodedImages(0 if sizes is None else sizes.cache_bytes)
        self._left = STEP_PATCHES  # of the plan under construction
        self._planned: set[bytes] = set()

    def begin(self) -> None:
        """Begin a plan."""
        self._left = STEP_PATCHES
        self._planned.clear()

    def room(self, sequence: Sequence, start: int, count: int, limit: int) -> int:
        """Return how many of `count` tokens from position `start` the plan may compute: those before the first image
        that it cannot encode.

        Where tokens of an image attend to later ones, a chunk ends before or after an image: it may have more than
        `count` tokens, up to `limit`, if it starts within one.
        """
        inputs, left = sequence.request.inputs, self._left
        if inputs is None or not inputs.images:
            return count
        if self._sizes is not None and self._sizes.whole:
            count = _end_of(inputs.images, start, count, limit)
        for image in inputs.images:
            if image.end <= start or image.start >= start + count or not self._is_new(image):
                continue
            if left < image.num_patches and (left < STEP_PATCHES or image.start > start):
                return max(0, image.start - start)
            left -= image.num_patches
        return count

    def take(self, sequence: Sequence, start: int, count: int) -> None:
        """Count the images of a planned chunk."""
        inputs = sequence.request.inputs
        for image in () if inputs is None else inputs.images:
            if start < image.end and image.start < start + count and self._is_new(image):
                self._planned.add(image.digest)
                self._left -= image.num_patches

    def sent(self, chunks: List[Chunk]) -> tuple[tuple[Chunk, ...], bool]:
        """Return the chunks of a plan, without the pixels of images that the ranks have encoded, and whether they
        encode any. Must be called for each plan, in order."""
        if self._sizes is None or all(chunk.inputs is None or not chunk.inputs.images for chunk in chunks):
            return tuple(chunks), False
        found, encodes = [], False
        for chunk in chunks:
            if chunk.inputs is not None and chunk.inputs.images:
                images = []
                for image in chunk.inputs.images:
                    is_kept = image.digest in self._encoded
                    encodes |= not is_kept
                    images.append(msgspec.structs.replace(image, data=b"") if is_kept else image)
                    num_tokens = image.num_patches // self._sizes.merge_size**2
                    self._encoded.use(image.digest, num_tokens * self._sizes.row_bytes)
                inputs = msgspec.structs.replace(chunk.inputs, images=tuple(images))
                chunk = msgspec.structs.replace(chunk, inputs=inputs)
            found.append(chunk)
        return tuple(found), encodes

    def clear(self) -> None:
        """Forget all images, because the ranks are lost."""
        self._encoded.clear()

    def fitting(self, sequence: Sequence, start: int, count: int) -> int:
        """Return how many of `count` tokens from position `start` a chunk may have that cannot have more."""
        inputs = sequence.request.inputs
        if inputs is None or self._sizes is None or not self._sizes.whole:
            return count
        return _end_of(inputs.images, start, count, count)

    def _is_new(self, image: Image) -> bool:
        return image.digest not in self._encoded and image.digest not in self._planned


def _end_of(images: List[Image], start: int, count: int, limit: int) -> int:
    """Return the number of tokens from `start` to an end that is not within an image: at most `count`, or up to the end
    of the image at `start`, if `limit` allows."""
    for image in images:
        if count and image.start < start + count < image.end:
            if image.start > start:
                return image.start - start
            return image.end - start if image.end - start <= limit else 0
    return count
