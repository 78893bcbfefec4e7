"""Headers of GGUF files, and the folders that stand for them: what is wrong with a file is one clear line."""

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from aerie.workers.config import ModelSource
from aerie.workers.models.gguf.folder import checkpoint_folder
from aerie.workers.models.gguf.header import read_gguf
from aerie.workers.models.loading import read_target_config
from aerie.workers.models.weights import checkpoint_tensors
from tests.support.targets.gguf_files import write_gguf
from tests.support.tiny_models import make_target


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_target(folder / "target", num_hidden_layers=2), folder / "tiny.gguf")


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        checkpoint_folder(path, path.parent / "cache")
    assert "\n" not in str(error.value)
    assert not list((path.parent / "cache").rglob("config.json"))


def test_the_header_is_read_as_llama_cpps_library_reads_it(file: Path) -> None:
    ours, theirs = read_gguf((file,)), gguf.GGUFReader(file)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    found = {name: (each.shape, each.type, each.offset, each.num_bytes) for name, each in ours.tensors.items()}
    assert found == {
        each.name: (tuple(map(int, each.shape[::-1])), each.tensor_type.name, each.data_offset, each.n_bytes)
        for each in theirs.tensors
    }


def test_a_folder_is_written_once_and_again_for_a_changed_file(file: Path, tmp_path: Path) -> None:
    path = shutil.copy(file, tmp_path / "tiny.gguf")
    folder = checkpoint_folder(path, tmp_path / "cache")
    written = (folder / "config.json").stat().st_mtime_ns
    assert folder.name == "tiny" and checkpoint_folder(path, tmp_path / "cache") == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"tiny\.gguf: has changed since .*gguf\.json was written; start again from"):
        list(checkpoint_tensors(folder))
    assert checkpoint_folder(path, tmp_path / "cache") != folder


def test_a_cut_or_damaged_file_is_named_with_what_is_missing(file: Path, tmp_path: Path) -> None:
    content, path = file.read_bytes(), tmp_path / "cut.gguf"
    for size in (5, 30, 300, 2000):
        path.write_bytes(content[:size])
        refused(path, r"cut\.gguf: is (no GGUF file|cut off in its header, after \d+ bytes); download it again")
    path.write_bytes(content[:-100])
    refused(path, rf"cut\.gguf: is cut off: {len(content) - 100} of \d+ bytes; download it again")
    path.write_bytes(b"PK\3\4" + content[4:])
    refused(path, r"cut\.gguf: is no GGUF file; download it again")
    path.write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])
    refused(path, r"cut\.gguf: is big-endian, which is not supported")
    path.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    refused(path, r"cut\.gguf: has version 1 of GGUF, which is not supported")
    refused(tmp_path / "none.gguf", r"none\.gguf: no such file")


def test_any_damaged_byte_of_the_header_ends_in_one_line_or_loads(file: Path, tmp_path: Path) -> None:
    content, rng = file.read_bytes(), np.random.default_rng(2)
    path = tmp_path / "damaged.gguf"
    for at in rng.integers(8, 6000, 60):
        damaged = bytearray(content)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            folder = checkpoint_folder(path, tmp_path / "cache")
            read_target_config(ModelSource(path=str(folder)), 1)
        except ValueError as error:
            assert "\n" not in str(error)


def write(path: Path, architecture: str, quant: Type = Type.F32, tensor: str = "token_embd.weight") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(64)
    shape = (4, 256) if quant == Type.F32 else (4, gguf.quant_shape_to_byte_shape((256,), quant)[0])
    writer.add_tensor(tensor, np.zeros(shape, np.float32 if quant == Type.F32 else np.uint8), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    refused(write(tmp_path / "a.gguf", "bert"), "architecture bert is not served from GGUF; served are llama, qwen2, ")
    refused(write(tmp_path / "b.gguf", "llama", Type.IQ2_XXS), "token_embd.weight has type IQ2_XXS, which is not supp")
    refused(write(tmp_path / "c.gguf", "llama", tensor="v.patch_embd.weight"), "has no token_embd.weight; it is no lan")
    refused(write(tmp_path / "d.gguf", "llama"), r"llama\.attention\.head_count is missing; serve the model in safete")


def test_parts_of_a_split_file_are_read_together(file: Path, tmp_path: Path) -> None:
    """Split as llama.cpp's `gguf-split` does: metadata in the first part, the number of each in all."""
    whole = gguf.GGUFReader(file)
    parts = [tmp_path / f"tiny-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for i, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        writer.add_key_value("split.no", i, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", 3, gguf.GGUFValueType.UINT16)
        for name, field in whole.fields.items() if i == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture" and field.contents() != []:
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        for each in whole.tensors[i::3]:
            writer.add_tensor(each.name, np.array(each.data), raw_dtype=each.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    folder = checkpoint_folder(parts[1], tmp_path / "cache")
    assert folder.name == "tiny"
    one = {name: tensor for name, tensor, _ in checkpoint_tensors(checkpoint_folder(file, tmp_path / "other"))}
    split = {name: tensor for name, tensor, _ in checkpoint_tensors(folder)}
    assert one.keys() == split.keys() and all(one[name].equal(split[name]) for name in one)
    parts[2].unlink()
    with pytest.raises(ValueError, match="is one of 3 files, and tiny-00003-of-00003.gguf is missing beside it"):
        checkpoint_folder(parts[0], tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    refused(parts[0].rename(tmp_path / "alone.gguf"), r"alone\.gguf: is number 1 of 3 files; name them NAME-00001-of-0")
