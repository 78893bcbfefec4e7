"""A checkpoint of ten times the memory that a rank may use loads: files are mapped, and a rank copies its share.

pytest -s -m slow tests/workers/models/test_checkpoint_memory.py
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow
CGROUPS = Path("/sys/fs/cgroup/memory")
RANKS = 16
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# Imports first: what they take is charged to the group that the process leaves.
LOAD = """
import logging, sys, torch
from pathlib import Path
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.models.weights import num_checkpoint_bytes

folder, group, ranks, hoards = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
(group / "cgroup.procs").write_text("0")
if hoards:
    torch.ones(num_checkpoint_bytes(folder), dtype=torch.uint8)
    sys.exit()
source = ModelSource(path=folder, device="cpu", dtype="bfloat16")
heard = []
model = load_target(
    source, read_target_config(source, ranks), TPGroup(0, ranks), torch.device("cpu"), 64,
    advance=lambda *done: heard.append(done),
)
assert heard == sorted(heard) and heard[-1][0] > 0.99 * heard[-1][1], heard[-1]
print("share", sum(each.numel() * each.element_size() for each in model.parameters()))
"""


def sparse_checkpoint(folder: Path) -> int:
    """Write a Llama of zeros that takes no blocks of the disk. Return its bytes."""
    hidden, mlp, vocab = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(SIZES["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        shapes |= {f"{path}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{path}.mlp.{part}_proj.weight": (mlp, hidden) for part in ("gate", "up")}
        shapes[f"{path}.mlp.down_proj.weight"] = (hidden, mlp)
        shapes |= {f"{path}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return offset


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of its own; needs root and version 1 of control groups."""
    made = CGROUPS / f"aerie-load-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group: {error}")
    yield made
    made.rmdir()


@pytest.mark.parametrize("hoards", [False, True])
def test_a_checkpoint_of_ten_times_the_memory_loads(tmp_path: Path, group: Path, hoards: bool) -> None:
    """hoards: allocate as much as the checkpoint has instead, and be killed: the limit is one."""
    size = sparse_checkpoint(tmp_path)
    (group / "memory.limit_in_bytes").write_text(str(size // 10))
    command = [sys.executable, "-c", LOAD, str(tmp_path), str(group), str(RANKS), str(hoards)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    if hoards:
        assert done.returncode == -9, done.stderr
        return
    assert done.returncode == 0, (done.returncode, done.stderr)
    print(size, done.stdout)
    assert f"{size / 1e9:.2f} GB read in " in done.stdout and "GB/s)" in done.stdout
    share = int(done.stdout.rpartition("share ")[2])
    assert size / RANKS <= share < 1.01 * size / RANKS
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < size / 100
