"""The rounds of an engine whose drafts are copied from the requests' own text."""

from workers.config import PLAIN, RoundShape, RoundShapes


def suffix_shape(num_tokens: int) -> RoundShape:
    """Return the shape that verifies so many drafts in a chain. Drafting writes no KV."""
    return RoundShape(f"suffix/{num_tokens}", num_tokens + 1, num_tokens + 1, draft_tokens=0)


def suffix_shapes(num_tokens: int, adaptive: bool) -> RoundShapes:
    """Return plain decoding, chains of `num_tokens` drafts and, if adaptive, chains of a half and a quarter, which keep
    widths powers of two where num_tokens is one less than one."""
    fewer = {(num_tokens - 1) // 2, (num_tokens - 3) // 4} if adaptive else set()
    between = tuple(suffix_shape(number) for number in sorted(fewer) if number > 0)
    return RoundShapes(
        (PLAIN, *between, suffix_shape(num_tokens)),
        default=1 + len(between),
        adaptive=adaptive,
        keeps_tokens=True,
        model_free=True,
        drafted_by="suffix",
    )
