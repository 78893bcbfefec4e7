"""Counts the kernels that a decode pass of a target would launch on a GPU, on a CPU: each operation of Aerie, each
product and each attention is one; of torch's operators all are that compute or copy."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes

from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.operation import Operation
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear_method import UnquantizedLinearMethod

_ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "lift_fresh", "_unsafe_view")


class _Launches(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        name = func._schema.name.removeprefix("aten::")
        if not views and name not in _ALLOCATE:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count, by name, what one pass within the context launches."""
    counts: Counter[str] = Counter()

    def count(owner: Any, method: str, named: Any) -> None:
        whole = getattr(owner, method)

        def once(self: Any, *args: Any, **options: Any) -> Any:
            if not _modes():  # within another that is counted as one
                return whole(self, *args, **options)
            counts[named(self)] += 1
            with _disable_current_modes():
                return whole(self, *args, **options)

        monkeypatch.setattr(owner, method, once)

    count(Operation, "__call__", lambda op: op.name.rpartition(".")[2])
    for method in ("multiply", "multiply_gated"):
        count(UnquantizedLinearMethod, method, lambda layer, name=method: name)
    count(ForwardContext, "attend_to_cached", lambda context: "attention")
    for method in ("store", "rotate"):
        count(KVPool, method, lambda pool, name=method: name)
    with monkeypatch.context(), _Launches(counts):
        yield counts
