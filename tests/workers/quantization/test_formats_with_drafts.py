"""Every format of quantised weights on one, two and four ranks, beside drafts: answers of the model that they mean."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.speculative.config import SpeculativeConfig
from tests.support.int_checkpoints import awq, gptq, int_quantized, pack_quantized, quantise
from tests.support.target_answers import CHAIN, TREE, drafted
from tests.support.tiny_models import make_target
from tests.workers.layers import test_fp4
from tests.workers.models.test_gpt_oss import mxfp4
from tests.workers.models.test_targets import check_greedy
from tests.workers.quantization import test_tensor_fp8

INTEGERS = {
    "awq": awq(),
    "gptq": gptq(),
    "gptq, desc_act": gptq(desc_act=True),
    "pack-quantized": pack_quantized(),
    "W8A16": pack_quantized(bits=8, group=None),
    "W8A8": int_quantized(),
}
MAKERS: dict[str, Callable[[Path, Path, str], Path]] = {
    **dict.fromkeys(INTEGERS, lambda source, folder, name: quantise(source, folder, INTEGERS[name])),
    **dict.fromkeys(test_tensor_fp8.CONFIGS, test_tensor_fp8.quantised),
    **dict.fromkeys(test_fp4.CONFIGS, test_fp4.quantised),
    "gpt-oss": lambda source, folder, name: mxfp4(source, folder),  # experts alone, stacked and transposed
}
ON_FOUR_RANKS = ("gptq, desc_act", "gpt-oss")  # beside each draft: an order of inputs, and experts of three blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "draft"),
    [
        (name, ranks, draft)
        for i, name in enumerate(MAKERS)
        for ranks, draft in ((1, "tree"), (2, ("chain", "tree")[i % 2]), (4, "suffix"))
    ]
    + [(name, 4, draft) for name in ON_FOUR_RANKS for draft in ("chain", "tree")],
)
def test_ranks_and_drafts_change_no_token(tmp_path: Path, name: str, ranks: int, draft: str) -> None:
    family = {"architecture": "GptOss"} if name == "gpt-oss" else {"intermediate_size": 128}
    source = make_target(tmp_path / "t", num_hidden_layers=3, num_key_value_heads=4, **family)
    folder = MAKERS[name](source, tmp_path / "q", name)
    speculative = SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8)
    if draft != "suffix":
        speculative = drafted(folder, tmp_path / "head", CHAIN if draft == "chain" else TREE)
    check_greedy(folder, ranks, speculative, like=folder / "plain")
