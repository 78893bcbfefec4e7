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


class PromptInputs(msgspec.Struct, frozen=True, array_like=True):
    """Inputs of a prompt, or of one of its chunks.

    embeddings: in the order of their positions, without overlap.
    positions: int32 bytes, the rotary position of each token; empty: 0, 1, 2, ... Output tokens continue after the
        last one, which is the largest. KV pages and sampling go by the number of tokens before a token, not by these.
    """

    embeddings: tuple[Embeddings, ...] = ()
    positions: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Bytes of the embeddings."""
        return sum(len(each.data) for each in self.embeddings)

    @property
    def shift(self) -> int:
        """Return how far the rotary positions of output tokens are from the number of tokens before them."""
        positions = np.frombuffer(self.positions, "<i4")
        return int(positions.max()) + 1 - len(positions) if len(positions) else 0

    def cut(self, start: int, end: int) -> "PromptInputs | None":
        """Return the inputs of tokens `start` to `end` - 1 of prompt and output; None if they need none."""
        parts = (each.cut(start, end) for each in self.embeddings)
        found = tuple(part for part in parts if part is not None)
        positions = b""
        if self.positions:
            length = len(self.positions) // 4
            later = np.arange(max(start, length), end, dtype="<i4") + self.shift
            positions = self.positions[4 * start : 4 * end] + later.tobytes()
        return PromptInputs(found, positions) if found or positions else None

    def check(self, prompt_len: int, hidden_size: int, max_positions: int) -> None:
        """Raise ValueError for inputs that do not fit.

        hidden_size: the model's.
        max_positions: exclusive bound on rotary positions of the prompt.
        """
        last = 0
        for each in self.embeddings:
            if each.num_rows < 1 or each.start < last or each.end > prompt_len:
                raise ValueError(
                    f"embeddings of tokens {each.start} to {each.end - 1}: must be in order, without overlap, and "
                    f"within the prompt's {prompt_len} tokens"
                )
            size = hidden_size * np.dtype(_DTYPES[each.dtype]).itemsize
            if len(each.data) != each.num_rows * size:
                raise ValueError(
                    f"embeddings of tokens {each.start} to {each.end - 1}: {len(each.data)} bytes of {each.dtype}, but "
                    f"{each.num_rows} rows of this model's hidden_size={hidden_size} have {each.num_rows * size}"
                )
            if len(each.digest) < 16:
                raise ValueError("digest of embeddings: must have at least 16 bytes, or others' KV might be used")
            last = each.end
        positions = np.frombuffer(self.positions, "<i4")
        if len(positions) and (len(positions) != prompt_len or positions.min() < 0 or positions.max() >= max_positions):
            raise ValueError(
                f"positions: {len(positions)} from {positions.min()} to {positions.max()}; must be one for each of the "
                f"{prompt_len} tokens, from 0 to {max_positions - 1}"
            )
        if len(positions) and positions[-1] != positions.max():
            raise ValueError(f"positions: the last one, {positions[-1]}, must be the largest, {positions.max()}")


class InputKeys:
    """Gives prompts the token sequences by which the prefix cache finds their pages.

    Where embeddings begin, and where rotary positions do not continue, the token id is replaced by a negative number
    that stands for digest, id and distance of positions. The cache compares whole prefixes, so later tokens keep their
    ids: equal keys mean equal inputs. Numbers are never used twice; inputs that came again after `MAX_KNOWN_INPUTS`
    others get a new number, and their pages are computed anew.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._next = -1

    def of(self, prompt: Int32s, inputs: PromptInputs) -> Int32s:
        """Return the keys [n] int32 of a prompt [n] int32. Raises ValueError when all numbers are used."""
        keys, shifts = prompt.copy(), np.zeros(len(prompt), np.int64)
        changes = {each.start: each.digest + each.num_rows.to_bytes(4, "little") for each in inputs.embeddings}
        if inputs.positions:
            shifts = np.frombuffer(inputs.positions, "<i4") - np.arange(len(prompt))
            for place in np.flatnonzero(np.diff(shifts, prepend=0)).tolist():
                changes.setdefault(place, b"")
        for place, digest in changes.items():
            facts = f"{prompt[place]} {shifts[place]} ".encode() + digest
            keys[place] = self._number(blake2b(facts, digest_size=32).digest())
        return keys

    def _number(self, facts: bytes) -> int:
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
