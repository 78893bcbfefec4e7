"""`tests.house`: what counts, and what does not."""

import ast

import pytest

from tests.house import device_tests, inner_imports


@pytest.mark.parametrize(
    "code",
    [
        "x = t.is_cuda",
        "if device.type == 'cpu': pass",
        "y = 1 if config.model.device != 'cuda' else 2",
        "z = 'meta' == device.type",
        "torch.cuda.is_available()",
    ],
)
def test_a_question_for_the_device_is_found(code: str) -> None:
    assert list(device_tests(ast.parse(code))) == [1]


def test_a_question_for_what_it_can_do_is_not() -> None:
    code = "if Capability.of(x.device).has_streams: pass\nother = torch.device('cuda')\nlimit = LIMITS[device.type]"
    assert not list(device_tests(ast.parse(code)))


def test_imports_of_ours_inside_functions_are_found() -> None:
    code = """
import aerie.kernels.kv.batches
def f():
    import torch
    from aerie.workers.config import ModelSource
    def g():
        import aerie.cluster.config
"""
    assert sorted(set(inner_imports(ast.parse(code)))) == [5, 7]
