"""`ImageChunks`: which images a step encodes, where its chunks may end, and which pixels its plan contains.

Without rounds, a step encodes the images of its chunks, whole. Beside rounds, an image is encoded before the step that
has its first token, or in the same one: as many of the tower's layers a step as the step's limit leaves time for. A
short text before an image waits for it, because a step of its own would take longer than the text.
"""

from collections.abc import Sequence as List

import msgspec

from aerie.workers.prompt_inputs import Encoding, Image, ImageSizes
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.encoded_images import EncodedImages
from aerie.workers.scheduling.latency_budget import StepBudget
from aerie.workers.scheduling.plan import Chunk
from aerie.workers.scheduling.sequence import Sequence

# Patches that a step encodes beside its rounds, or one larger image. 4,096 patches are a picture of a megapixel, whose
# tower has about the operations of a prompt chunk of 2,048 tokens.
STEP_PATCHES = 4096
SHORT_TEXT = 256  # tokens; with fewer a step with a chunk takes about as long


class ImageChunks:
    """Images of one engine's plans. sizes: None for an engine that takes no images."""

    def __init__(self, sizes: ImageSizes | None) -> None:
        self._sizes = sizes
        self._encoded = EncodedImages(0 if sizes is None else sizes.cache_bytes)
        self._left = STEP_PATCHES  # patches that the plan under construction may still encode
        self._planned: set[bytes] = set()
        self._is_mixed = False  # whether rounds wait for the plan under construction
        self._costs: CostTable | None = None
        self._encodings: dict[bytes, Encoding] = {}  # the encodings of that plan
        self._partial, self._num_done = b"", 0  # digest of the image whose pass has not ended, and computed layers

    def use_costs(self, costs: CostTable) -> None:
        self._costs = costs if costs.image_patches else None

    def begin(self, is_mixed: bool = False) -> None:
        """Begin a plan. is_mixed: whether requests wait for their next token."""
        self._left = STEP_PATCHES
        self._planned.clear()
        self._encodings.clear()
        self._is_mixed = is_mixed and self._costs is not None

    def encode(self, sequence: Sequence, start: int, budget: StepBudget) -> None:
        """Encode the next image if it begins at most `SHORT_TEXT` tokens after `start`: beside rounds, a part of it or
        several whole ones; without rounds, what is left of an image of which a part is encoded."""
        inputs = sequence.request.inputs
        if self._sizes is None or self._costs is None or self._encodings or inputs is None:
            return
        for image in inputs.images:
            is_partial = image.digest == self._partial
            if image.end <= start or not self._is_new(image):
                continue
            if image.start > start + SHORT_TEXT or not (self._is_mixed or is_partial):
                return
            if self._encodings and budget.ms_left < self._costs.encode_ms(image.num_patches):
                return
            block_ms = self._costs.encode_ms(image.num_patches) / self._sizes.num_blocks
            left = self._sizes.num_blocks - (self._num_done if is_partial else 0)
            count = min(left, max(1, int(budget.ms_left / max(block_ms, 1e-6)))) if self._is_mixed else left
            budget.spend(count * block_ms)
            self._encodings[image.digest] = Encoding(image, 0 if count == left else count)
            if count < left:
                return
            self._planned.add(image.digest)

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
            if self._is_mixed:
                return image.start - start if image.start > start + SHORT_TEXT else 0
            if left < image.num_patches and (left < STEP_PATCHES or image.start > start + SHORT_TEXT):
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

    def finish_plan(self, chunks: List[Chunk]) -> tuple[tuple[Chunk, ...], tuple[Encoding, ...], bool]:
        """Return the chunks of a plan, without the pixels of images that the ranks have encoded, what they encode
        before, and whether they encode any. Must be called for each plan, in order."""
        encodings = tuple(map(self._started, self._encodings.values()))
        if self._sizes is None or all(chunk.inputs is None or not chunk.inputs.images for chunk in chunks):
            return tuple(chunks), encodings, bool(encodings)
        sent, encodes = [], bool(encodings)
        for chunk in chunks:
            if chunk.inputs is not None and chunk.inputs.images:
                images = []
                for image in chunk.inputs.images:
                    is_cached = image.digest in self._encoded
                    encodes |= not is_cached
                    images.append(msgspec.structs.replace(image, data=b"") if is_cached else image)
                    self._use(image)
                inputs = msgspec.structs.replace(chunk.inputs, images=tuple(images))
                chunk = msgspec.structs.replace(chunk, inputs=inputs)
            sent.append(chunk)
        return tuple(sent), encodings, encodes

    def _started(self, encoding: Encoding) -> Encoding:
        """Count a part that is sent, and return it with its image's pixels if it is the first one."""
        image, is_first = encoding.image, encoding.image.digest != self._partial
        if encoding.num_blocks:
            self._num_done = encoding.num_blocks + (0 if is_first else self._num_done)
            self._partial = image.digest
        else:
            self._partial, self._num_done = b"", 0
            self._use(image)
        return encoding if is_first else Encoding(msgspec.structs.replace(image, data=b""), encoding.num_blocks)

    def _use(self, image: Image) -> None:
        assert self._sizes is not None
        self._encoded.use(image.digest, image.num_patches // self._sizes.merge_size**2 * self._sizes.row_bytes)

    def clear(self) -> None:
        """Forget all images, because the ranks are lost."""
        self._encoded.clear()
        self._partial, self._num_done = b"", 0

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
