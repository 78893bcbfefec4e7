"""Makes the folder of a checkpoint that stands for a GGUF file: config.json, the tokenizer's files, and the list of
tensors. Everything that reads checkpoints reads this folder; the weights stay in the file."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aerie.workers.models.gguf.families import StoredTensor, is_linear, read_config, stored_tensors
from aerie.workers.models.gguf.header import FileTensor, GgufFile, read_gguf, split_parts
from aerie.workers.models.gguf.tensors import INDEX, Weights
from aerie.workers.models.gguf.vocabulary import Vocabulary, write_vocabulary
from aerie.workers.quantization.block_scheme import METHOD
from aerie.workers.quantization.block_types import BLOCK_TYPES

_VERSION = 2  # of what is written: raise it with a change
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    "chat_template.jinja",
)


def checkpoint_folder(path: Path, cache: Path, tokenizer: Path | None = None) -> Path:
    """Return the folder that stands for a GGUF file, named after it, in `cache`; written if it is missing.

    path: the file, or any one of several that belong together.
    tokenizer: a folder with the tokenizer's files to use instead of the file's own.
    Raises ValueError, in one line, if the file is missing, damaged, or not supported.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    path = path.resolve()
    parts = split_parts(path)
    chosen = [] if tokenizer is None else _tokenizer_files(tokenizer)
    states = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in (*parts, *chosen)]
    digest = hashlib.sha256(json.dumps([_VERSION, states]).encode()).hexdigest()[:16]
    stem = parts[0].name.removesuffix(".gguf").split("-00001-of-")[0]
    folder = cache / digest / stem
    if not (folder / INDEX).is_file():
        _write(read_gguf(path), folder, chosen)
    return folder


def _tokenizer_files(folder: Path) -> list[Path]:
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--tokenizer {folder}: has no tokenizer.json; give the folder of a model or a tokenizer")
    return found


def _write(file: GgufFile, folder: Path, tokenizer: list[Path]) -> None:
    """Write the folder under another name first, so that it is complete or missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        config = read_config(file, lambda name: _vector(file, file.tensors[name]))
        tensors, quantization = _weights(file, config)
        if quantization:
            config["quantization_config"] = quantization
        if tokenizer:
            for each in tokenizer:
                shutil.copyfile(each, scratch / each.name)
        else:
            config["eos_token_id"] = Vocabulary(file.metadata, str(file.paths[0])).end_ids
            write_vocabulary(file.metadata, str(file.paths[0]), scratch, _dump)
        _dump(scratch / "config.json", config)
        sizes = [path.stat().st_size for path in file.paths]
        weights = Weights([str(path) for path in file.paths], sizes, tensors)
        (scratch / INDEX).write_bytes(msgspec.json.encode(weights))
        scratch.chmod(0o755)
        try:
            os.rename(scratch, folder)
        except OSError:
            if not (folder / INDEX).is_file():  # else another process has written it meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _dump(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _vector(file: GgufFile, tensor: FileTensor) -> list[float]:
    if tensor.type != "F32":
        raise ValueError(f"{file.paths[0]}: {tensor.name} is {tensor.type}, not F32; use the model in safetensors")
    count = tensor.num_bytes // 4
    values: list[float] = np.fromfile(file.paths[tensor.file], "<f4", count, offset=tensor.offset).tolist()
    return values


def _weights(file: GgufFile, config: dict[str, Any]) -> tuple[list[StoredTensor], dict[str, Any] | None]:
    """Return the checkpoint's tensors, and its quantization_config."""
    experts = {tensor.type for tensor in file.tensors.values() if "_exps." in tensor.name and len(tensor.shape) == 3}
    if config["architectures"] == ["GptOssForCausalLM"] and experts == {"MXFP4"}:
        tensors = stored_tensors(file, config, lambda kind: kind == "MXFP4")
        return tensors, {"quant_method": "mxfp4"}
    tensors = stored_tensors(file, config, lambda kind: kind in BLOCK_TYPES and BLOCK_TYPES[kind].packed is not None)
    types: dict[str, list[str]] = {}
    for tensor in tensors:
        if tensor.source.type in BLOCK_TYPES and is_linear(tensor.name):
            types.setdefault(tensor.source.type, []).append(tensor.name.format(expert=0).removesuffix(".weight"))
    return tensors, {"quant_method": METHOD, "types": types} if types else None
