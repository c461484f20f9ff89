"""stretto: a collective runtime for JAX that does not care what computes underneath.

Programs need nothing of this module: ``JAX_PLATFORMS=stretto`` is enough. It gives the options, the
errors and the statistics. Everything is imported at its first use, so that ``import stretto`` costs
next to nothing; `stretto.lax` holds collectives that are chained by tokens, `stretto.nn` layers that are
divided over the vocabulary.
"""

from __future__ import annotations

import os.path
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.explanation import Explanation, explain
    from stretto.pipelining import pipelined
    from stretto.runtime.errors import (
        CollectiveMismatch,
        CollectiveTimeout,
        CompileError,
        InvalidProgramError,
        RankFailed,
        StrettoError,
        UnsupportedError,
        WorldError,
    )
    from stretto.runtime.options import Options, OptionsError, configure
    from stretto.runtime.recording.statistics import Compilations, Counters, Profiled
    from stretto.selection import kth_largest

    __version__: str

__all__ = [
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Compilations",
    "CompileError",
    "Counters",
    "Explanation",
    "InvalidProgramError",
    "Options",
    "OptionsError",
    "Profiled",
    "RankFailed",
    "StrettoError",
    "UnsupportedError",
    "WorldError",
    "__version__",
    "compilations",
    "configure",
    "explain",
    "kth_largest",
    "pipelined",
    "profiles",
    "stats",
]

# Imported from the root of a source tree, where Python looks first, this folder lacks the layers, which
# lie beside it there: take them from the installed package.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "runtime")):
    from pkgutil import extend_path

    __path__ = extend_path(__path__, __name__)

_HOMES = {
    "Compilations": "stretto.runtime.recording.statistics",
    "Counters": "stretto.runtime.recording.statistics",
    "Explanation": "stretto.explanation",
    "Options": "stretto.runtime.options",
    "OptionsError": "stretto.runtime.options",
    "Profiled": "stretto.runtime.recording.statistics",
    "configure": "stretto.runtime.options",
    "explain": "stretto.explanation",
    "kth_largest": "stretto.selection",
    "pipelined": "stretto.pipelining",
}


def stats() -> Counters:
    """What this process has communicated since it began; times are in seconds."""
    from stretto.runtime.recording.statistics import total

    return total()


def compilations() -> Compilations:
    """What this process has compiled since it began, and what it found compiled already."""
    from stretto.runtime.recording import statistics

    return statistics.compilations()


def profiles() -> tuple[Profiled, ...]:
    """The programs that were measured with ``STRETTO_PROFILE=1``, and what came of it."""
    from stretto.runtime.recording import statistics

    return statistics.profiles()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("stretto")
    elif name in ("lax", "nn", "testing"):
        value = import_module(f"stretto.{name}")
    elif name in __all__:
        value = getattr(import_module(_HOMES.get(name, "stretto.runtime.errors")), name)
    else:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "lax", "nn", "testing"})
