"""Ranks are forked, not each imported anew."""

from tests.support.ranks import forked_ranks  # noqa: F401 - every test has it
