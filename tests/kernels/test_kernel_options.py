"""Options of kernels' decorators: which arguments specialise a kernel. Launches name arguments that kernels have."""

import ast
import importlib
import os
import pkgutil
from pathlib import Path
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


# Integers that are the same in every step of an engine, or of a shape of its rounds, and floats. Kernels may be
# specialised for them. Others, such as numbers of rows and requests, would compile a kernel in the middle of a step.
# fmt: off
FIXED = {
    "alpha", "capacity", "certain", "channels", "cubic", "end", "eps", "first", "first_bit", "first_column",
    "group_step", "groups", "head_step", "heads", "inverse_scale", "k", "k_inverse_scale", "level", "limit", "n",
    "num_candidates", "num_words", "padding_slot", "page_size", "part_step", "parts", "q_group_step", "q_row_step",
    "rank", "row_step", "scale", "scale_eps", "scale_log2", "share", "shift", "shortest", "size", "table_width",
    "v_inverse_scale", "v_scale", "value_scale", "vocab_size", "x_words",
}
# fmt: on


def test_kernels_are_not_specialised_for_numbers_that_change_between_steps() -> None:
    for name, kernel in kernels().items():
        source = Path(kernel.fn.__code__.co_filename).read_text()
        if f"{kernel.fn.__name__}[" not in source.replace(f"def {kernel.fn.__name__}", ""):
            continue  # a function of kernels, or launched elsewhere
        fixed = {p.name for p in kernel.params if p.is_constexpr} | set(kernel.do_not_specialize or ()) | FIXED
        unknown = [
            p for p in kernel.arg_names if p not in fixed and not p.endswith(("_ptr", "_desc")) and "stride" not in p
        ]
        assert not unknown, f"{name}: {unknown}: name it in do_not_specialize, or in FIXED if no step changes it"


LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion"}


def test_launches_give_every_argument_once() -> None:
    """On a CPU most launches never run, so a renamed argument would be found on a GPU."""
    from triton.runtime.jit import JITFunction

    num_launches = 0
    for found in pkgutil.walk_packages(aerie.kernels.__path__, "aerie.kernels."):
        module = importlib.import_module(found.name)
        for call in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Subscript):
                continue
            name = ast.unparse(call.func.value)
            kernel = vars(module).get(name)
            if not isinstance(kernel, JITFunction) or any(isinstance(x, ast.Starred) for x in call.args):
                continue
            num_launches += 1
            keywords = [keyword.arg for keyword in call.keywords if keyword.arg not in LAUNCH_OPTIONS]
            given = [*kernel.arg_names[: len(call.args)], *(k for k in keywords if k is not None)]
            place = f"{found.name}:{call.lineno}: {name}"
            assert len(call.args) <= len(kernel.arg_names) and len(set(given)) == len(given), f"{place}: given twice"
            # arguments that a mapping may give are not read
            needed = set() if None in keywords else {p.name for p in kernel.params if not p.has_default}
            assert needed <= set(given) <= set(kernel.arg_names), f"{place}: {sorted(needed ^ set(given))}"
    assert num_launches > 60
