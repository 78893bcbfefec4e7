"""Per-request values that are declared in `SamplingParams`: docs/add-a-per-request-value.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.workers.request_values import Value
from aerie.workers.scheduling.plan import VALUES
from tests.cluster.http.requests import declared_value


def test_one_declaration_brings_a_value_from_a_body_to_its_slot() -> None:
    """The process sees the sources with one more line, which declares `warmth`."""
    root = Path(declared_value.__file__).parents[4]
    command = [sys.executable, "-m", declared_value.__name__]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["statuses"] == [200] * 6 and seen["values"] == [1.5] * 5 + [0.75], (
        "chats to /generate, then the default"
    )
    assert seen["bad"] == ["warmth", "Invalid value for warmth: input should be less than or equal to 3"]
    assert seen["bad at /generate"][0] == "sampling_params.heat"
    assert "greater than 0" in seen["bad at /generate"][1]
    assert seen["card"] == 0.75
    assert seen["device"] == {"row": [0.0, 1.5, 0.0, 0.0], "dtype": "torch.float32", "filtered": True}
    assert seen["python"]["body"] == 2.0 and "warmth" in seen["python"]["error"]
    assert seen["start"] == "default_warmth=9.0: must be above 0 and at most 3"


@pytest.mark.parametrize(
    ("value", "number", "rule"),
    [
        (Value(ge=0.0, le=1.0), 1.5, "at least 0 and at most 1"),
        (Value(ge=-1, lt=8), 8, "at least -1 and below 8"),
        (Value(gt=0.0), 0.0, "above 0"),
        (Value(le=2), 3, "at most 2"),
    ],
)
def test_bounds_are_checked_with_the_rule_in_the_error(value: Value, number: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^x={number}: must be {rule}$"):
        value.check("x", number)
    value.check("x", number / 2 + 0.25)


def test_defaults_are_within_their_bounds() -> None:
    for name, value in VALUES.items():
        value.check(name, value.default)
        assert value.of(value.default) == value.default and type(value.default) is value.kind, name
