"""Options of kernels' decorators: which arguments specialise a kernel."""

import importlib
import os
import pkgutil
from typing import Any

import pytest

import aerie.kernels

pytest.importorskip("triton", reason="kernels need triton, which is not installed here")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def kernels() -> dict[str, Any]:
    """Every Triton function of the repository that is compiled, by module and name."""
    from triton.runtime.jit import JITFunction

    found = {}
    for module in pkgutil.walk_packages(aerie.kernels.__path__, "aerie.kernels."):
        if module.name.endswith("_triton"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, JITFunction) and value.fn.__module__ == module.name:
                    found[f"{module.name}.{name}"] = value
    return found


def test_arguments_that_kernels_are_not_specialised_for_exist() -> None:
    """Triton passes over a name that is none: then the kernel is compiled anew for 1 and for multiples of 16."""
    found = kernels()
    assert len(found) > 100
    for name, kernel in found.items():
        unknown = set(kernel.do_not_specialize or ()) - set(kernel.arg_names)
        assert not unknown, f"{name}: {sorted(unknown)}"
