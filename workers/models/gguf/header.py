"""Reads the header of GGUF files, versions 2 and 3 (ggml's specification of GGUF): metadata, and where each tensor is.

The package `gguf` reads every string of the vocabulary as arrays of numpy, 50,000 of which take several seconds; this
takes 0.1 s, and its errors name the file and the remedy.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from aerie.workers.quantization.block_scheme import BLOCK_TYPES, PLAIN_TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # versions of the format that can be read
_ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
_STRING, _ARRAY, _BOOL = 8, 9, 7  # types of metadata values
# Numbers of the types of values, and their letters in `struct`.
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
# Names of the types of tensors, by their numbers (`ggml_type`).
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K"}
_TYPES |= {11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"}
_TYPES |= {19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"}
_TYPES |= {27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}


@dataclass(frozen=True)
class FileTensor:
    """A tensor as a GGUF file stores it.

    shape: as in PyTorch, outputs first.
    type: a key of `PLAIN_TYPES` or `BLOCK_TYPES`.
    file: index in `GgufFile.paths`.
    offset: offset of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    file: int
    offset: int

    @property
    def num_bytes(self) -> int:
        if self.type in PLAIN_TYPES:
            return prod(self.shape) * PLAIN_TYPES[self.type].itemsize
        return prod(self.shape[:-1]) * BLOCK_TYPES[self.type].row_bytes(self.shape[-1])


@dataclass(frozen=True)
class GgufFile:
    """A model in one file or in several. metadata: that of the first file. tensors: of all files, by name."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, FileTensor]


def read_gguf(paths: tuple[Path, ...]) -> GgufFile:
    """Read the headers of a model's file, or of all its parts. Raises ValueError, naming the file and the remedy, for a
    damaged, incomplete or unsupported one."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, FileTensor] = {}
    for index, part in enumerate(paths):
        own, others = _read_file(part, index)
        metadata = metadata or own
        number, count = own.get("split.no", 0), own.get("split.count") or 1
        if (number, count) != (index, len(paths)):
            raise ValueError(
                f"{part}: is number {number + 1} of {count} files; name them NAME-00001-of-{count:05}.gguf, ... and "
                "put all into one folder"
            )
        if twice := tensors.keys() & others.keys():
            raise ValueError(f"{part}: has {min(twice)}, which another file has too; download the files again")
        tensors |= others
    return GgufFile(paths, metadata, tensors)


def _read_file(path: Path, index: int) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """Return the metadata and tensors of one file's header. index: number of the file among those of a model."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            if len(start) < 8 or start[:4] != _MAGIC:
                raise ValueError(f"{path}: is no GGUF file; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                reader = _Reader(content, path)
                return reader.metadata(), reader.tensors(index, size)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


class _Reader:
    """Reads a header from its start to its end."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content, self._path, self._at = content, path, 4
        version = self._number("I")
        if version not in _VERSIONS:
            reason = "is big-endian" if version & 0xFFFF == 0 else f"has version {version} of GGUF"
            raise ValueError(f"{path}: {reason}, which is not supported; convert the model again")
        self._num_tensors, self._num_values = self._number("Q"), self._number("Q")
        self._metadata: dict[str, Any] = {}

    def metadata(self) -> dict[str, Any]:
        for _ in range(self._num_values):
            name = self._string()
            self._metadata[name] = self._value(self._number("I"))
        return self._metadata

    def tensors(self, file: int, size: int) -> dict[str, FileTensor]:
        """Call after `metadata`. size: of the file in bytes, for the check that it is complete."""
        headers = []
        for _ in range(self._num_tensors):
            name = self._string()
            shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
            headers.append((name, shape, self._number("I"), self._number("Q")))
        alignment = int(self._metadata.get("general.alignment", _ALIGNMENT)) or 1
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in headers:
            kind = self._type(name, number)
            if kind in BLOCK_TYPES and (not shape or shape[-1] % BLOCK_TYPES[kind].values):
                raise ValueError(f"{self._path}: {name} has shape {list(shape)}, not whole blocks of {kind}")
            tensors[name] = FileTensor(name, shape, kind, file, start + offset)
        end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"{self._path}: is cut off: {size} of {end} bytes; download it again")
        return tensors

    def _type(self, name: str, number: int) -> str:
        kind = _TYPES.get(number, f"number {number}")
        if kind not in PLAIN_TYPES and kind not in BLOCK_TYPES:
            known = ", ".join([*PLAIN_TYPES, *BLOCK_TYPES])
            raise ValueError(f"{self._path}: {name} has type {kind}, which is not supported; supported are {known}")
        return kind

    def _value(self, kind: int) -> Any:
        """Read a value of a GGUF type: a string, number or array."""
        if kind == _STRING:
            return self._string()
        if kind in _VALUES:
            return self._number(_VALUES[kind])
        if kind != _ARRAY:
            raise ValueError(f"{self._path}: has a value of type {kind} in its header; download it again")
        element, count = self._number("I"), self._number("Q")
        if element in _VALUES:
            array = np.frombuffer(self._bytes(count * struct.calcsize(_VALUES[element])), _VALUES[element])
            return array.tolist()
        self._check(count)  # every element has a byte at least
        return [self._value(element) for _ in range(count)]

    def _number(self, letter: str) -> Any:
        size = struct.calcsize(letter)
        self._check(size)
        (value,) = struct.unpack_from(f"<{letter}", self._content, self._at)
        self._at += size
        return value

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", errors="replace")

    def _bytes(self, size: int) -> bytes:
        self._check(size)
        self._at += size
        return self._content[self._at - size : self._at]

    def _check(self, size: int) -> None:
        if size > len(self._content) - self._at:
            raise ValueError(
                f"{self._path}: is cut off in its header, after {len(self._content)} bytes; download it again"
            )
