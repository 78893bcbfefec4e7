"""Imports a module of the product from changed source, for tests that add one declaration to it. The process must not
have imported it before."""

import importlib
import importlib.util
import sys


def import_changed(name: str, *changes: tuple[str, str]) -> None:
    """Import the module `name` with each text of `changes` replaced by its second; it occurs once."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None and name not in sys.modules
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    setattr(importlib.import_module(package), last, module)
    exec(compile(source, spec.origin, "exec"), module.__dict__)
