"""The table of backends: what the README says of it, and what it never imports."""

import subprocess
import sys
from pathlib import Path

from attention.backend import BACKENDS, TAIL_MODES
from attention.metadata import Mode
from tests.attention.matrix import matrix

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_has_the_matrix() -> None:
    assert matrix() in (ROOT / "README.md").read_text(), "paste what `python -m tests.attention.matrix` prints"


def test_prompt_chunks_never_cost_a_round_its_graph() -> None:
    assert all(Mode.PREFILL not in facts.cpu_seq_lens_modes for facts in BACKENDS.values())
    assert {name for name, facts in BACKENDS.items() if facts.cpu_seq_lens_modes} == {"flashinfer"}
    assert BACKENDS["flashinfer"].cpu_seq_lens_modes == TAIL_MODES


def test_a_cpu_imports_no_kernel_library() -> None:
    """The whole engine's modules, as a CPU start imports them, and every refusal."""
    program = ("import sys, speculative.build, tests.attention.matrix as m; m.matrix(); "
               "print(sorted({'triton', 'flashinfer', 'tvm_ffi'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
