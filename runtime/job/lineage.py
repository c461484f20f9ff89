"""From which processes this one descends, where /proc can tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LONGEST_NAME = 15  # of the kernel, in /proc/<process>/comm


@dataclass(frozen=True)
class Process:
    """A process: number, name (15 bytes of it at most) and when it began, in ticks since the host did."""

    pid: int
    name: str
    began: str

    @property
    def identity(self) -> str:
        """Tells it from all others of the host, also from later ones of the same number."""
        return f"{self.pid} {self.began}"

    def is_called(self, name: str) -> bool:
        return self.name == name[:_LONGEST_NAME]


def this() -> Process | None:
    """This process, or None where /proc cannot tell."""
    try:
        return _process(os.getpid())
    except (OSError, IndexError):
        return None


def ancestors() -> Iterator[Process]:
    """The process that started this one, the one that started that, and so on; none without /proc."""
    number = os.getppid()
    while number > 1:
        try:
            yield _process(number)
            number = int(stat(number)[1])
        except (OSError, ValueError, IndexError):
            return


def stat(number: int) -> list[str]:
    """State, parent and what follows in /proc/<process>/stat; the name before may hold anything."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def _process(number: int) -> Process:
    name = Path(f"/proc/{number}/comm").read_text().rstrip("\n")
    return Process(number, name, stat(number)[19])
