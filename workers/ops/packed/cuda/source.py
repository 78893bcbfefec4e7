"""Joins the sources of this folder's kernels: NVRTC compiles one string, and sources include no headers."""

from pathlib import Path


def joined(*names: str, generated: str = "") -> str:
    """Return `packed.cuh` and the files of these names, in this order.

    generated: further device functions, between `packed.cuh` and the rest.
    """
    folder = Path(__file__).parent
    return (folder / "packed.cuh").read_text() + generated + "".join((folder / name).read_text() for name in names)
