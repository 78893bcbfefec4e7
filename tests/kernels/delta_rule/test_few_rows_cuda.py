"""The delta rule's kernel in CUDA C++: where it is chosen, and what NVRTC makes of it for Hopper."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from aerie.kernels import cuda_source
from aerie.kernels.capability import Capability
from aerie.kernels.delta_rule import few_rows_cuda, formulas
from aerie.kernels.delta_rule.rounds import delta_rule_rounds
from aerie.kernels.delta_rule.tables import DeltaHeads, DeltaState
from tests.support.kernels.cuobjdump import dumped
from tests.support.kernels.delta_rule import random_rows, random_weights

HEADS = DeltaHeads(16, 48, 128, 128)
REGISTERS_PER_SM = 1 << 16
HOPPER = (9, 0)


def constants(width: int, path: int, programs: int) -> tuple[tuple[str, int | float], ...]:
    """Return the macros with which a launch compiles the kernel for a round of these sizes."""
    cpu = torch.device("cpu")
    kept = DeltaState.zeros(1, HEADS, 1, 1, max(width, path), path, torch.bfloat16, cpu).layer(0)
    rows = random_rows(HEADS, 1, torch.bfloat16, cpu)
    tiles = few_rows_cuda.tiles_of(programs)
    return few_rows_cuda.constants_of(rows, random_weights(HEADS, torch.bfloat16, cpu), kept, width, tiles, True)


def test_rounds_choose_cuda_where_it_compiles() -> None:
    with_compiler = Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"}))
    without = Capability("cuda", HOPPER, frozenset({"triton"}))
    names = [[each.name for each in delta_rule_rounds.serving(here)] for here in (with_compiler, without)]
    assert "cuda, few rows" in names[0] and "cuda, few rows" not in names[1]


def test_the_kernel_is_compiled_with_the_references_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "NORM_EPS", 0.25)
    assert dict(constants(4, 4, 48))["L2_EPS"] == 0.25


def nvrtc_here() -> str | None:
    """Return NVRTC of an installed wheel; it needs no GPU."""
    packages = find_spec("nvidia")
    folders = packages.submodule_search_locations or () if packages else ()
    return next((str(each) for folder in folders for each in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))), None)


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("programs", [48, 1536])
@pytest.mark.parametrize("width,path", [(4, 4), (8, 6), (2, 2), (10, 4)])
def test_few_rows_fit_hopper(
    width: int, path: int, programs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Almost no spills, and nothing is written before the wait."""
    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = cuda_source.compiled(few_rows_cuda.source(), constants(width, path, programs), HOPPER)
    usage = dumped(code, tmp_path, "--dump-resource-usage")
    registers, stack = (int(number) for number in re.findall(r"(?:REG|STACK):(\d+)", usage))
    tiles = few_rows_cuda.tiles_of(programs)
    assert 32 * tiles.warps * tiles.programs * registers <= REGISTERS_PER_SM and stack <= 256
    before, after = dumped(code, tmp_path).split("ACQBULK", 1)
    assert "STG" in after and "STG" not in before and "LDG.E.NA.128" in before
