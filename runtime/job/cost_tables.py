"""Where the table of costs comes from, by which programs are scheduled: a file that is named, or the cache.

A table is JSON text here; what is in it is the front end's business (``hlo_frontend/overlap/costs.py``).
Rank 0's text is everybody's, so that all ranks decide alike. Measured tables lie in the user's cache
directory, one file for each *machine set*: the hosts of the ranks in their order, the devices of each, and
the engine. Beside each lies what segments of programs were measured to take there (`docs/overlap.md`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import WorldError


@dataclass(frozen=True)
class CostText:
    """A table as JSON text; empty if there is none. ``origin``: the file it came from.

    ``named``: whether the user named the file, instead of its having been measured and kept.
    """

    text: str = ""
    origin: str = ""
    named: bool = False


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/stretto``, or ``~/.cache/stretto``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "stretto"


def measured_path(hosts: Sequence[str], local_devices: int, engine: str) -> Path:
    """The file of what was measured for this machine set. ``hosts[rank]`` is where a rank runs."""
    key = hashlib.sha256(json.dumps([list(hosts), local_devices, engine]).encode()).hexdigest()
    return cache_directory() / "costs" / f"{key[:24]}.json"


def times_path(hosts: Sequence[str], local_devices: int, engine: str) -> Path:
    """The file of what segments were measured to take on this machine set."""
    return measured_path(hosts, local_devices, engine).with_suffix(".times.json")


def find_times(hosts: Sequence[str], local_devices: int, engine: str) -> CostText:
    """What segments were measured to take on the machine set; none where no file can be read, or there is no
    home to look in: then rank 0 says why when it comes to keeping them. Whoever parses the text finds what is
    damaged, bytes that are no text included."""
    try:
        path = times_path(hosts, local_devices, engine)
        return CostText(path.read_text(errors="replace"), str(path))
    except (OSError, RuntimeError):
        return CostText()


def keep(path: Path, text: str) -> None:
    """Write a file that other jobs may read at any time, whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While other processes that do the same wait. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find(named: str, hosts: Sequence[str], local_devices: int, engine: str) -> CostText:
    """The named file's text, or else what was measured for the machine set, or else none.

    Raises `WorldError` where a named file cannot be read.
    """
    if named:
        try:
            return CostText(Path(named).read_text(), named, named=True)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise WorldError(
                f"the table of costs cannot be read (STRETTO_COSTS): {named}: {reason}"
            ) from None
    try:
        path = measured_path(hosts, local_devices, engine)
        return CostText(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, RuntimeError):  # RuntimeError: nobody's home directory
        return CostText()
