"""The table of backends: what the documents say of it, and what it never imports."""

import subprocess
import sys

from aerie.attention.registry import BACKENDS
from tests.attention.backends.matrix import matrix
from tests.support import DOCS, ROOT


def test_the_page_has_the_matrix() -> None:
    page = (DOCS / "attention-backends.md").read_text()
    assert matrix() in page, "paste what `python -m tests.attention.backends.matrix` prints"


def test_no_backend_costs_a_round_its_graph() -> None:
    assert not any(facts.cpu_seq_lens_modes for facts in BACKENDS.values())


def test_a_cpu_imports_no_kernel_library() -> None:
    """The whole engine's modules, as a CPU start imports them, and every refusal."""
    program = (
        "import sys, aerie.speculative.build, tests.attention.backends.matrix as m; m.matrix(); m.refusals(); "
        "print(sorted({'triton', 'flashinfer', 'tvm_ffi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
