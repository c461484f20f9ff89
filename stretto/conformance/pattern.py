"""How cases are chosen by their names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase


def fits(name: str, only: str) -> bool:
    """Whether a case is asked for: ``only`` is a pattern as of file names, or the beginning of a name."""
    return fnmatchcase(name, only) or name.startswith(only)


def may_fit(group: str, only: str) -> bool:
    """Whether a case of this group may be asked for."""
    literal = re.split(r"[*?[]", only, maxsplit=1)[0]
    return f"{group}/".startswith(literal) or literal.startswith(f"{group}/")
