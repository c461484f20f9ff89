"""Why a loop is left as it is."""

from __future__ import annotations


class Refusal(Exception):
    """The loop does not have the shape that can be interleaved. Caught by `apply`, which reports it."""
