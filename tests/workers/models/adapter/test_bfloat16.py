"""Decoders of transformers in bfloat16, torch's default dtype as in a server's rank: each step runs and its logits are
finite. Other tests serve float32, in which a wrong dtype goes unseen.

    pytest -m slow tests/workers/models/adapter/test_bfloat16.py    # every kind
"""

from dataclasses import replace
from pathlib import Path

import pytest

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.models.loading import read_target_config
from tests.support.target_answers import TREE, head_for, served_answers
from tests.workers.models.adapter.test_every_decoder import EQUAL, NO_STREAMS, OUTCOMES, make
from tests.workers.models.test_targets import worker_of

QUICK = ("gemma",)  # it computes a part in float32


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # transformers' GPT-BigCode
@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(pytest.param(each, marks=pytest.mark.slow) for each in OUTCOMES[EQUAL].split() if each not in QUICK),
    ],
)
def test_a_decoder_is_served_in_bfloat16(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, and with trees of an EAGLE-3 head."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    make(tmp_path, kind)
    worker = worker_of(tmp_path)
    worker = replace(worker, model=replace(worker.model, dtype="bfloat16"))
    config = read_target_config(worker.model, 1)
    assert config.served_by is not None
    drafts: list[SpeculativeConfig | None] = [None]
    if kind not in NO_STREAMS:
        drafts.append(SpeculativeConfig(str(head_for(config, tmp_path)), "eagle3", *TREE))
    for speculative in drafts:
        for answer in served_answers(worker, speculative):
            assert len(answer.request.output) == 16 and answer.logprobs.isfinite().all()
