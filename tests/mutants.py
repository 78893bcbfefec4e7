"""How many small faults the tests find: `python -m tests.mutants [NAME ...] [--count 40] [--seed 0]`.

A mutant is a module with one fault: a comparison turned, a number one greater, a sum for a difference, a condition
negated, a statement left out. A sample of a module's mutants is imported in its place, each in a forked process that
runs the tests of its room until one fails. Prints how many were found, and each that survived; some of those behave as
the module does. NAME: of `TARGETS`, all without one.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import ROOT

SCHEDULING = tuple(
    f"tests/workers/scheduling/test_{name}.py"
    for name in (
        "slot_pages",
        "scheduler",
        "scheduler_flush",
        "latency_budget",
        "prefill",
        "waiting_queue",
        "slot_admission",
        "scheduler_simulation",
        "grammar_queue",
        "late_masks",
        "lost_ranks",
        "slot_windows",
        "shared_prefixes",
    )
) + tuple(f"tests/workers/scheduling/commands/test_{name}.py" for name in ("capture_pacing", "command_queue"))
PAGES = (
    "tests/attention/kv_cache",
    *(f"tests/workers/scheduling/test_{n}.py" for n in ("slot_pages", "scheduler", "scheduler_simulation")),
)
WIRE = ("tests/cluster/transport", "tests/cluster/coordinator/test_coordinator.py")
TARGETS = {
    "workers/scheduling/scheduler.py": SCHEDULING,
    "workers/scheduling/slot_pages.py": SCHEDULING,
    "workers/scheduling/prefill.py": SCHEDULING,
    "attention/kv_cache/page_allocator.py": PAGES,
    "attention/kv_cache/prefix_cache.py": PAGES,
    "kernels/tree/acceptance.py": ("tests/speculative/tree", "tests/speculative/test_decoding.py"),
    "cluster/transport/messages.py": WIRE,
    "cluster/transport/encoding.py": WIRE,
    "cluster/transport/channel.py": WIRE,
}
IMPORTED_ONCE = ("numpy", "msgspec", "torch", "zmq")  # by this process, for all that it forks
SPARE_S = 10.0  # beside three times what the tests take without a fault: then a mutant counts as found
OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """code: of the whole module with its fault."""

    line: int
    fault: str
    code: Any


def mutants(path: str, count: int, seed: int) -> list[Mutant]:
    """A sample of a module's."""
    source = (ROOT / path).read_text()
    places = [(i, make) for i, node in enumerate(_nodes(ast.parse(source))) for make in _faults(node)]
    chosen = sorted(random.Random(seed).sample(range(len(places)), min(count, len(places))))
    return [_mutant(path, source, *places[i]) for i in chosen]


def _mutant(path: str, source: str, place: int, make: Callable[[Any], None]) -> Mutant:
    tree = ast.parse(source)
    node: Any = list(_nodes(tree))[place]
    before = _shown(node)
    make(node)
    code = compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec")
    return Mutant(node.lineno, f"{before} -> {_shown(node)}", code)


def _shown(node: ast.AST) -> str:
    shown = node.test if isinstance(node, ast.If | ast.While) else node
    return ast.unparse(shown).replace("\n", " ")[:90]


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All that run: neither types and classes' options, nor assertions of our own bugs, nor the texts of errors."""
    yield node
    for name, value in ast.iter_fields(node):
        is_option = isinstance(node, ast.ClassDef) and name == "keywords"
        if name not in ("annotation", "returns", "decorator_list") and not is_option:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and not isinstance(each, ast.Assert | ast.Raise):
                    yield from _nodes(each)


def _faults(node: ast.AST) -> Iterator[Callable[[Any], None]]:
    """Return what may be done to a node, in place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            yield lambda each: each.ops.__setitem__(0, OPPOSITE[type(op)]())
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPPOSITE:
            yield lambda each: setattr(each, "op", OPPOSITE[type(op)]())
        case ast.Constant(value=bool(value)):
            yield lambda each: setattr(each, "value", not value)
        case ast.Constant(value=int(value)):
            yield lambda each: setattr(each, "value", value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            yield lambda each: setattr(each, "test", ast.UnaryOp(ast.Not(), each.test))
        case ast.Expr(value=ast.Call()):
            yield lambda each: setattr(each, "value", ast.Constant(None))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield lambda each: setattr(each, "targets", [ast.Name("_", ast.Store())])


class _Finder(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Gives the mutant where its module is imported."""

    def __init__(self, path: str, mutant: Mutant) -> None:
        super().__init__(path.removesuffix(".py").replace("/", "."), str(ROOT / path))
        self._mutant = mutant

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> Any:
        return self._mutant.code


def is_found(path: str, tests: Sequence[str], mutant: Mutant | None, limit_s: float) -> bool:
    """Whether a test fails, or takes too long."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(path, mutant))
        options = ("-x", "-q", "-m", "not slow and not ray", "-p", "no:cacheprovider", "-p", "no:faulthandler")
        os._exit(int(pytest.main([*options, *tests]) != pytest.ExitCode.OK))
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--count", type=int, default=40, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    for path in given.names or TARGETS:
        started_s = time.monotonic()
        assert not is_found(path, TARGETS[path], None, 600.0), f"{path}: a test fails without a fault"
        limit_s = 3 * (time.monotonic() - started_s) + SPARE_S
        sample = mutants(path, given.count, given.seed)
        survivors = [mutant for mutant in sample if not is_found(path, TARGETS[path], mutant, limit_s)]
        print(f"{path}: {len(sample) - len(survivors)} of {len(sample)} found", flush=True)
        for mutant in survivors:
            print(f"    {path}:{mutant.line}: {mutant.fault}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
