"""Skips GPU tests where there are too few GPUs, and says so."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item, mark in marked:
        wanted = mark.kwargs.get("n", mark.args[0] if mark.args else 1)
        if present < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPU(s), this machine has {present}"))
