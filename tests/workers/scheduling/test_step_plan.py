"""The page on what travels between scheduler and ranks has every field."""

import inspect
import re

import pytest

from aerie.workers.scheduling.plan import StepPlan, StepResult


@pytest.mark.parametrize("message", [StepPlan, StepResult])
def test_every_field_is_told_of(message: type[StepPlan] | type[StepResult]) -> None:
    page = inspect.getdoc(message) or ""
    told = {name for line in re.findall(r"^([a-z_, ]+):", page, re.MULTILINE) for name in line.split(", ")}
    assert told == set(message.__struct_fields__)
