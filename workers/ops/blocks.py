"""Arithmetic of tile sizes."""


def cdiv(x: int, size: int) -> int:
    """Number of blocks of `size` that hold x."""
    return -(-x // size)


def next_power_of_2(x: int) -> int:
    """Smallest power of two that is not below x."""
    return 1 << (x - 1).bit_length() if x > 0 else 0
