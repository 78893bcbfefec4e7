"""Inputs of a prompt besides its token ids. No torch; the API and the scheduler import it."""

from collections import OrderedDict
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

MAX_KNOWN_INPUTS = 1 << 16  # about 200 bytes each
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
Int32s = npt.NDArray[np.int32]


class ImageSizes(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of a model's images.

    merge_size: rows, and columns, of the patches that make a token.
    patch_bytes: uint8 values of a patch.
    max_patches: maximum patches of an image.
    row_bytes: bytes of the embeddings of a token on a rank.
    cache_bytes: maximum bytes of the images' embeddings that a rank keeps.
    tower_bytes: bytes of the vision tower's weights on a rank.
    num_axes: rotary positions of a token.
    whole: whether tokens of an image attend to later ones, so that a step computes all that are left.
    num_blocks: layers of the tower.
    paused_bytes: bound on the bytes of an image of which some layers are computed.
    """

    merge_size: int
    patch_bytes: int
    max_patches: int
    row_bytes: int
    cache_bytes: int
    tower_bytes: int
    num_axes: int
    whole: bool = False
    num_blocks: int = 1
    paused_bytes: int = 0

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of an image."""
        return self.max_patches // self.merge_size**2


class Embeddings(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of consecutive prompt tokens.

    start: position of the first one in the prompt. Their token ids are placeholders: only penalties, copied drafts and
        draft models see them.
    num_rows: their number.
    data: [num_rows, hidden_size] in `dtype`, little-endian, as the model's embedding layer returns them.
    digest: what their KV pages are found by in the prefix cache. Equal digests must mean equal embeddings.
    """

    start: int
    num_rows: int
    data: bytes
    digest: bytes
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    @staticmethod
    def of(start: int, rows: npt.NDArray[np.float32]) -> "Embeddings":
        """Return the embeddings `rows` [n, hidden_size] of the tokens from `start`, with the digest of their values."""
        data = rows.astype("<f4").tobytes()
        return Embeddings(start, len(rows), data, blake2b(data, digest_size=32).digest())

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; 0 without rows."""
        return len(self.data) // max(self.num_rows, 1)

    def cut(self, start: int, end: int) -> "Embeddings | None":
        """Return the part at positions `start` to `end` - 1; None if there is none."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        size = self.row_bytes
        data = self.data[(first - self.start) * size : (last - self.start) * size]
        return Embeddings(first, last - first, data, self.digest, self.dtype)

    def rows(self) -> npt.NDArray[np.float32]:
        """Return the values, [num_rows, hidden_size] float32."""
        raw = np.frombuffer(self.data, _DTYPES[self.dtype]).reshape(self.num_rows, -1)
        if self.dtype == "bfloat16":
            return (raw.astype("<u4") << 16).view("<f4")
        return raw.astype(np.float32)


class Placeholder(msgspec.Struct, frozen=True, array_like=True):
    """What stands for an image in prompts.

    text, replacement: what chat templates write for an image, and the text that replaces it before it is encoded;
        ("", "") if nothing does.
    token_id: token that stands for an image in the encoded text.
    filler_id: token that stands for each of the image's tokens.
    merge_size: rows, and columns, of the patches that make a token.
    has_mrope: whether tokens have M-RoPE positions.
    """

    text: str = ""
    replacement: str = ""
    token_id: int = -1
    filler_id: int = -1
    merge_size: int = 1
    has_mrope: bool = False


class PreparedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image's patches, or why there are none.

    grid: its patches as frames, rows and columns.
    data: [patches, channels, pixels of a patch] uint8: see `Image`.
    placeholder: what stands for the image in prompts.
    num_rows: number of its tokens, each of which has a row of embeddings.
    fault: what is wrong with the image; "" if it is prepared.
    """

    grid: tuple[int, int, int] = (0, 0, 0)
    data: bytes = b""
    placeholder: Placeholder = Placeholder()  # noqa: RUF009 - frozen
    num_rows: int = 0
    fault: str = ""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image, whose embeddings the ranks compute (`aerie.workers.vision`), or its part in a chunk.

    start: position in the prompt of its first token of these. Their ids are placeholders.
    num_rows: their number.
    grid: its patches as frames, rows and columns.
    data: [patches, channels, pixels of a patch] uint8, of one frame, in the order of the checkpoint's processor, before
        they are scaled and normalised; empty where the ranks have its embeddings.
    digest: hash of `grid` and `data`.
    first_row: number of its tokens before `start`.
    """

    start: int
    num_rows: int
    grid: tuple[int, int, int]
    data: bytes
    digest: bytes
    first_row: int = 0

    @staticmethod
    def of(start: int, num_rows: int, grid: tuple[int, int, int], data: bytes) -> "Image":
        """Return a whole image."""
        return Image(start, num_rows, grid, data, blake2b(repr(grid).encode() + data, digest_size=32).digest())

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def cut(self, start: int, end: int) -> "Image | None":
        """Return the part at positions `start` to `end` - 1; None if there is none."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        return Image(first, last - first, self.grid, self.data, self.digest, self.first_row + first - self.start)


class Encoding(msgspec.Struct, frozen=True, array_like=True):
    """A part of the tower's pass over an image.

    image: without `data`, unless the pass begins. Another image's pass that has not ended is abandoned.
    num_blocks: layers to compute; 0: to the end.
    """

    image: Image
    num_blocks: int = 0


class PromptInputs(msgspec.Struct, frozen=True, array_like=True):
    """Inputs of a prompt, or of one of its chunks.

    embeddings: in the order of their positions, without overlap.
    positions: int32 bytes, the rotary position of each token; empty: 0, 1, 2, ... Output tokens continue after the
        largest one. KV pages and sampling go by the number of tokens before a token, not by these.
    images: in the order of their positions, without overlap, also with `embeddings`.
    num_axes: rotary positions of a token: 1, or 3 for M-RoPE (frame, row, column). `positions` then has all tokens'
        first positions, then all second ones, and so on.
    """

    embeddings: tuple[Embeddings, ...] = ()
    positions: bytes = b""
    images: tuple[Image, ...] = ()
    num_axes: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of embeddings and images."""
        return sum(len(part.data) for part in self.parts)

    @property
    def parts(self) -> tuple[Embeddings | Image, ...]:
        """Return embeddings, then images."""
        return (*self.embeddings, *self.images)

    @property
    def axes(self) -> Int32s:
        """Return `positions` as [num_axes, tokens] int32."""
        return np.frombuffer(self.positions, "<i4").reshape(self.num_axes, -1)

    @property
    def shift(self) -> int:
        """Return how far the rotary positions of output tokens are from the number of tokens before them."""
        axes = self.axes
        return int(axes.max()) + 1 - axes.shape[1] if self.positions else 0

    def cut(self, start: int, end: int) -> "PromptInputs | None":
        """Return the inputs of tokens `start` to `end` - 1 of prompt and output; None if they need none."""
        embeddings = tuple(part for values in self.embeddings if (part := values.cut(start, end)) is not None)
        image_parts = (image.cut(start, end) for image in self.images)
        images = tuple(image for image in image_parts if image is not None)
        positions = b""
        if self.positions:
            axes = self.axes
            later = np.arange(max(start, axes.shape[1]), end, dtype="<i4") + self.shift
            rest = np.broadcast_to(later, (self.num_axes, len(later)))
            positions = np.concatenate((axes[:, start:end], rest), axis=1).astype("<i4").tobytes()
        return PromptInputs(embeddings, positions, images, self.num_axes) if embeddings or images or positions else None

    def check(self, prompt_len: int, hidden_size: int, max_positions: int, images: ImageSizes | None = None) -> None:
        """Raise ValueError for inputs that do not fit.

        hidden_size: the model's.
        max_positions: exclusive bound on rotary positions of the prompt.
        images: sizes of the model's images; None for a model without.
        """
        last = 0
        for part in sorted(self.parts, key=lambda part: part.start):
            kind = "embeddings" if isinstance(part, Embeddings) else "image"
            if part.num_rows < 1 or part.start < last or part.end > prompt_len:
                raise ValueError(
                    f"{kind} of tokens {part.start} to {part.end - 1}: must be in order, without overlap, and "
                    f"within the prompt's {prompt_len} tokens"
                )
            if isinstance(part, Embeddings):
                _check_values(part, hidden_size)
            else:
                _check_image(part, images)
            if len(part.digest) < 16:
                raise ValueError(f"digest of {kind}: must have at least 16 bytes, or others' KV might be used")
            last = part.end
        if self.positions:
            self._check_positions(prompt_len, max_positions, 1 if images is None else images.num_axes)

    def _check_positions(self, prompt_len: int, max_positions: int, num_axes: int) -> None:
        count = len(self.positions) // 4
        if self.num_axes not in (1, num_axes) or count % self.num_axes:
            raise ValueError(f"num_axes={self.num_axes}: this model's tokens have {num_axes} rotary positions")
        positions = self.axes
        if positions.shape[1] != prompt_len or positions.min() < 0 or positions.max() >= max_positions:
            raise ValueError(
                f"positions: {positions.shape[1]} from {positions.min()} to {positions.max()}; must be one for each of "
                f"the {prompt_len} tokens, from 0 to {max_positions - 1}"
            )
        if self.num_axes == 1 and positions[0, -1] != positions.max():
            raise ValueError(f"positions: the last one, {positions[0, -1]}, must be the largest, {positions.max()}")


def _check_values(embeddings: Embeddings, hidden_size: int) -> None:
    size = hidden_size * np.dtype(_DTYPES[embeddings.dtype]).itemsize
    if len(embeddings.data) != embeddings.num_rows * size:
        raise ValueError(
            f"embeddings of tokens {embeddings.start} to {embeddings.end - 1}: {len(embeddings.data)} bytes of "
            f"{embeddings.dtype}, but {embeddings.num_rows} rows of this model's hidden_size={hidden_size} have "
            f"{embeddings.num_rows * size}"
        )


def _check_image(image: Image, sizes: ImageSizes | None) -> None:
    name = f"image of tokens {image.start} to {image.end - 1}"
    if sizes is None:
        raise ValueError(f"{name}: this engine takes none; see model.images")
    merged = sizes.merge_size
    if image.grid[0] != 1 or min(image.grid) < 1 or image.grid[1] % merged or image.grid[2] % merged:
        raise ValueError(f"{name}: grid={image.grid}: must be one frame of multiples of {merged} rows and columns")
    if image.num_patches > sizes.max_patches:
        raise ValueError(f"{name}: {image.num_patches} patches are more than {sizes.max_patches}; send a smaller image")
    tokens, size = image.num_patches // merged**2, image.num_patches * sizes.patch_bytes
    if image.num_rows != tokens or image.first_row or len(image.data) != size:
        raise ValueError(
            f"{name}: {len(image.data)} bytes, but {image.num_patches} patches have {size} and {tokens} tokens"
        )


class InputKeys:
    """Gives prompts the token sequences by which the prefix cache finds their pages.

    Where embeddings or images begin, and where rotary positions do not continue, the token id is replaced by a negative
    number that stands for digest, id and distance of positions. The cache compares whole prefixes, so later tokens
    keep their ids: equal keys mean equal inputs. Numbers are never used twice; inputs that came again after
    `MAX_KNOWN_INPUTS` others get a new number, and their pages are computed anew.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._next = -1

    def of(self, prompt: Int32s, inputs: PromptInputs) -> Int32s:
        """Return the keys [n] int32 of a prompt [n] int32. Raises ValueError when all numbers are used."""
        keys, shifts = prompt.copy(), np.zeros((inputs.num_axes, len(prompt)), np.int64)
        changes = {part.start: part.digest + part.num_rows.to_bytes(4, "little") for part in inputs.parts}
        if inputs.positions:
            shifts = inputs.axes - np.arange(len(prompt))
            places = set(np.flatnonzero(np.diff(shifts, axis=1, prepend=0).any(0)).tolist())
            for image in inputs.images:  # its digest stands for the positions within it
                places.difference_update(range(image.start, image.end))
            for index in places:
                changes.setdefault(index, b"")
        for index, digest in changes.items():
            facts = f"{prompt[index]} {shifts[:, index].tolist()} ".encode() + digest
            keys[index] = self._number(blake2b(facts, digest_size=32).digest())
        return keys

    def _number(self, facts: bytes) -> int:
        """Return the negative number that stands for these inputs in keys of the prefix cache. facts: a digest of the
        inputs."""
        number = self._known.get(facts)
        if number is None:
            number = self._next
            if number < np.iinfo(np.int32).min:
                raise ValueError("embeddings: this engine has seen 2^31 different ones; restart it")
            self._next -= 1
        self._known[facts] = number
        self._known.move_to_end(facts)
        if len(self._known) > MAX_KNOWN_INPUTS:
            self._known.popitem(last=False)
        return number
