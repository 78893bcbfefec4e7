"""Compiles the sampling kernels for Hopper without a GPU: no spills, and registers for several programs at once."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.sampling import choose_triton as choose  # noqa: E402
from aerie.kernels.sampling import choose_triton as logprobs  # noqa: E402
from aerie.kernels.sampling import draft_scores_triton as draft_scores  # noqa: E402
from aerie.kernels.sampling import filters_triton as filters  # noqa: E402
from aerie.kernels.sampling import penalties_triton as masks  # noqa: E402
from aerie.kernels.sampling import penalties_triton as penalties  # noqa: E402
from aerie.kernels.vocabulary import topk_log_softmax_triton as largest  # noqa: E402
from aerie.kernels.vocabulary.topk_log_softmax import NOT_FINITE  # noqa: E402
from tests.kernels.attend import test_triton_compile as compiling  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = compiling.pytestmark

POINTERS = dict.fromkeys(
    ("slot_ptr", "position_ptr", "seed_ptr", "id_ptr", "top_k_ptr", "min_len_ptr", "stop_ptr", "path_token_ptr"), "i64"
)
POINTERS |= dict.fromkeys(
    (
        "temperature_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "peak_ptr",
        "sum_ptr",
        "before_sum_ptr",
        "needed_ptr",
        "value_ptr",
        "best_ptr",
        "out_ptr",
        "bias_ptr",
        "penalty_ptr",
        "norm_ptr",
        "row_peak_ptr",
        "summary_ptr",
    ),
    "fp32",
)
POINTERS |= dict.fromkeys(("path_ptr", "prompt_ptr", "shapes_ptr"), "i8")
SEARCH = {"PARTS": 32, "PART": filters.PART, "TILE": filters.TILE}
CASES: list[tuple[Any, dict[str, Any], int]] = [
    (filters._peaks, {"BLOCK": filters.PART}, 8),
    (filters._narrow, {**SEARCH, "BY_MASS": False}, 4),
    (filters._narrow, {**SEARCH, "BY_MASS": True}, 4),
    (filters._limits, {"PARTS": 32}, 1),
    (choose._choose, {"FILTERED": False, "PART": 4 * choose.TILE, "TILE": choose.TILE}, 4),
    (choose._choose, {"FILTERED": True, "PART": choose.TILE, "TILE": choose.TILE}, 4),
    (draft_scores._count_bands, {"PART": draft_scores.PART, "TILE": draft_scores.TILE}, 8),
    (draft_scores._perturb, {"FILTERED": False, "PARTS": 1, "BLOCK": draft_scores.BLOCK}, 4),
    (draft_scores._perturb, {"FILTERED": True, "PARTS": 8, "BLOCK": draft_scores.BLOCK}, 4),
    (draft_scores._perturb, {"FILTERED": True, "PARTS": 64, "BLOCK": draft_scores.BLOCK}, 4),
    (masks._apply_masks, {"FREE": -1, "BLOCK": masks.MASK_BLOCK}, 4),
    (penalties._apply_penalties, {"STOPS": 64, "BLOCK": penalties.BLOCK}, 4),
    (logprobs._summarize, {"PART": logprobs.PART, "BLOCK": logprobs.BLOCK}, 4),
    (largest._partial_largest, {"BLOCK": largest.BLOCK}, 8),
    (largest._combine_largest, {"BROKEN": NOT_FINITE, "PARTS": 128}, 1),
]


@pytest.mark.parametrize("dtype", ["fp32", *slow("bf16")])
@pytest.mark.parametrize("kernel,constants,warps", CASES, ids=lambda case: getattr(case, "__name__", None))
def test_sampling_kernels_fit_hopper(
    kernel: Any, constants: dict[str, Any], warps: int, dtype: str, tmp_path: Path
) -> None:
    spills, shared, ptx = compiling.compiled(kernel, tmp_path, POINTERS | {"x_ptr": dtype}, constants, warps, 3)
    assert spills == 0
    assert shared <= compiling.SHARED_PER_SM // 8
    assert "atom" not in ptx and "red.global" not in ptx  # sums in one order, so that a draw can be repeated
    assert not re.search(r"\.f64", ptx)
