"""``STRETTO_DUMP=dir``: what each program was at every stage of its compilation, a file for each stage.

``rank-00000-4711.0003.jit_step.07.rotate.txt`` is of rank 0, process 4711, the fourth program that it
compiled, and the eighth file of that. No two processes write the same file, be they ranks or started by
one.

Invariants: nothing here raises into the program; a folder that cannot be made is an error at the start.
When a file cannot be written that is told once, and the process goes on without.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from pathlib import Path

from .errors import WorldError

MOST_LETTERS = 80  # of a program's name in a file's: file systems take 255 bytes in all
_log = logging.getLogger("stretto")


def begin(folder: str, rank: int = 0) -> Dumps | None:
    """The dump of this process into the folder that ``STRETTO_DUMP`` names; None where it names none.

    Raises `WorldError` where the folder cannot be made.
    """
    return Dumps(Path(folder), rank) if folder else None


class Dumps:
    """The programs that a process compiles, numbered."""

    def __init__(self, folder: Path, rank: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorldError(f"the dump cannot be written (STRETTO_DUMP): {error}") from error
        self._start = str(folder / f"rank-{rank:05}-{os.getpid()}")
        self._numbers = itertools.count()
        self.problem = ""  # why the dump has ended

    def program(self) -> ProgramDump:
        """Where the next program is written to."""
        return ProgramDump(self, f"{self._start}.{next(self._numbers):04}")

    def write(self, path: str, text: str) -> None:
        """Write a file, unless the dump has ended; the first that cannot be written ends it."""
        if self.problem:
            return
        try:
            Path(path).write_text(text, "utf-8")
        except OSError as error:
            self.end(str(error))

    def end(self, problem: str) -> None:
        """Write nothing any more, and tell why, once. For those whose child process has found out, too."""
        if problem and not self.problem:
            self.problem = problem
            _log.warning("the dump ends here (STRETTO_DUMP): %s", problem)


class ProgramDump:
    """Takes the stages of one program, in their order: a `hlo_frontend.pipeline.Dump`."""

    def __init__(self, dumps: Dumps, start: str) -> None:
        self._dumps, self._start = dumps, start
        self._stages = itertools.count()

    def __call__(self, program: str, stage: str, text: str) -> None:
        """``program``: its name, ``stage``: what it has come through."""
        name = re.sub(r"[^\w.-]", "_", program, flags=re.ASCII)[:MOST_LETTERS]
        self._dumps.write(f"{self._start}.{name}.{next(self._stages):02}.{stage}.txt", text)
