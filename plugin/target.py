"""What a compiled program depends on beside its source: versions, the engine, options, the devices.

Executables are loaded only where all of it is equal, and it is part of the key of JAX's compilation cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.runtime.engines.engine import Engine, RestoringEngine
from stretto.runtime.options import Options

# Options that change nothing in a compiled program, or are named apart from the others.
_ELSEWHERE = {
    "local_devices",
    "engine",
    "timeout",
    "grace",
    "launcher",
    "control_host",
    "costs",
    "profile",
    "dump",
    "shared_memory",
    "share_compiled",
}
_LAYERS = ("collectives", "runtime", "hlo_frontend", "plugin")


@cache
def source_digest() -> str:
    """A digest of stretto's own source: what an edited stretto compiled is not taken for this one's."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for layer in _LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def target(
    engine: Engine, options: Options, processes: int, overlap: OverlapPolicy | None = None
) -> dict[str, str]:
    """What programs depend on that are compiled for this engine, in words that an error can use.

    ``overlap``: how they are scheduled, and by which table of costs.
    """
    chosen = {f.name: getattr(options, f.name) for f in fields(options)}
    return {
        "stretto": f"{version('stretto')} ({source_digest()})",
        "jaxlib": version("jaxlib"),
        "engine": engine.name,
        "kind of device": engine.target if isinstance(engine, RestoringEngine) else "",
        "devices": f"{processes} processes with {engine.num_devices} devices each",
        # What was measured of some programs does not keep others from being loaded.
        "overlap": _digest(replace(overlap, measured={})) if overlap else "",
        "options": ", ".join(
            f"{k}={v!r}" for k, v in chosen.items() if k not in {*_ELSEWHERE, "origins"}
        ),
    }


def measured(overlap: OverlapPolicy | None) -> str:
    """A digest of what programs were measured to take, by which some are planned; empty if nothing."""
    return _digest(overlap.measured) if overlap is not None and overlap.measured else ""


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def difference(made: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first thing in which two targets differ, in words; empty where they are equal."""
    for what in here:
        if made.get(what) != here[what]:
            return f"{what}: {made.get(what, 'not known')!r}, here {here[what]!r}"
    return ""
