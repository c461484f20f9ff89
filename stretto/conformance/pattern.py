"""How cases are chosen by their names."""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(name: str, only: str) -> bool:
    """Whether a case is asked for: ``only`` is a pattern as of file names, or the beginning of a name."""
    return fnmatchcase(name, only) or name.startswith(only)
