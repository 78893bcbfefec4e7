"""What compiles grammars is imported in a start, since later it would take Python's lock from rounds."""

import subprocess
import sys

PROGRAM = """
import sys, threading
from workers.structured_output.grammar_cache import import_compiler
assert "xgrammar" not in sys.modules, "only who asks for it has it"
import_compiler()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert "xgrammar" in sys.modules
"""


def test_it_is_imported_beside_the_start() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
