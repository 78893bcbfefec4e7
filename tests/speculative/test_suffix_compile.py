"""The kernels of `aerie.kernels.drafting.suffix_match`, compiled for Hopper without a GPU."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.drafting import suffix_match_triton as suffix_match  # noqa: E402
from tests.kernels.attend.test_triton_compile import compiled  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
_SLOTS = {"history_ptr": "i32", "slot_ptr": "i64", "chain_ptr": "i64"}
_FIELDS = dict.fromkeys(("token_ptr", "parent_ptr", "depth_ptr", "mask_ptr"), "i64")
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "record": (
        suffix_match._record_tokens,
        _SLOTS | {"length_ptr": "i32", "token_ptr": "i64", "count_ptr": "i64", "out_ptr": "i64"},
        {"M": 16, "K": 15, "PADDED": 16},
        1,
    ),
    "scan": (
        suffix_match._scan,
        _SLOTS | {"seq_len_ptr": "i32", "best_ptr": "i64"},
        {"LONGEST": 16, "BLOCK": suffix_match._BLOCK, "PROGRAMS": 32},
        4,
    ),
    "propose": (
        suffix_match._propose,
        _SLOTS | {"seq_len_ptr": "i32", "best_ptr": "i64", "length_ptr": "i64"},
        {"K": 15, "K_PADDED": 16, "PROGRAMS": 32, "EMPTY": -1},
        1,
    ),
    "attach": (
        suffix_match._attach_chains,
        _SLOTS | _FIELDS,
        {"W": 24, "W_PADDED": 32, "K": 15, "K_PADDED": 16, "EMPTY": -1},
        1,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_fits_hopper(name: str, tmp_path: Path) -> None:
    """Without spills; only the reduction of a scan takes shared memory."""
    kernel, pointers, constants, warps = KERNELS[name]
    spills, shared, ptx = compiled(kernel, tmp_path, pointers, constants, warps, 1)
    assert spills == 0 and shared <= 1024 and "st.global" in ptx
