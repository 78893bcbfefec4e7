"""The example of docs/add-an-attention-backend.md, as it is written there."""

import re
import sys
import types

import pytest
import torch

from aerie.attention.registry import BACKENDS, BackendFacts, Choice, check_choices
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode
from tests.attention.backends.test_backend_conformance import CPU_SHAPES, Conformance
from tests.support import DOCS
from tests.support.kernels.attention_cases import WORKS, Shape, use_of

PAGE = DOCS / "add-an-attention-backend.md"
PREFILL = next(work for work in WORKS if work.mode is Mode.PREFILL)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> BackendFacts:
    """The page's backend, as a row of the table."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    module = types.ModuleType("aerie.attention.backends.sdpa_backend")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(found[1], str(PAGE), "exec"), vars(module))
    facts: BackendFacts = module.ROW
    monkeypatch.setitem(BACKENDS, "sdpa", facts)
    return facts


@pytest.mark.parametrize("shape", CPU_SHAPES[:2], ids=lambda shape: shape.name)
def test_the_example_is_right(row: BackendFacts, shape: Shape) -> None:
    Conformance("sdpa", PREFILL, shape, torch.device("cpu")).check()


def test_the_example_is_chosen_by_name_and_refused_with_a_reason(row: BackendFacts) -> None:
    use = use_of(PREFILL, Shape(), "cpu")
    assert use.device == Capability("cpu")
    assert check_choices([Choice("attention.prefill", "sdpa", use)])[0][1] == "sdpa"
    wide = use_of(PREFILL, Shape(512), "cpu")
    with pytest.raises(ValueError, match=r"^attention.prefill=sdpa: sdpa cannot serve prefill: head_dim=512: must be"):
        check_choices([Choice("attention.prefill", "sdpa", wide)])
