"""HLO files as the commands take them: read, compiled under guard, errors with exit code 2."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache

from stretto.collectives.order import CommonOrder, Schedule
from stretto.hlo_frontend.compile import CompiledModule, compile_hlo
from stretto.hlo_frontend.interleaved import Interleaved, Scheduled
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.passes.bytes import Rewrite
from stretto.hlo_frontend.passes.valid import ValidPolicy, ValidReport
from stretto.hlo_frontend.source import HloSource, in_fork, read_hlo
from stretto.runtime import options
from stretto.runtime.dump import Dumps, begin
from stretto.runtime.errors import InvalidProgramError, StrettoError
from stretto.runtime.program import Program

BAD_INPUT = 2


@dataclass(frozen=True)
class CompiledFile:
    """A file's program. ``tokens``: by name of each collective, those that tokens put before it.

    ``policy``: how valid iterations were found, and ``valid`` what was. ``rewrites``: what became of
    collectives, where that was asked for; ``rewritten`` is its digest. ``interleave``: chunks of layers that
    pipelines were to have, ``pipeline_schedule`` their schedule, and ``interleaved`` what became of them.
    """

    source: HloSource
    program: Program
    schedule: Schedule
    tokens: dict[str, tuple[str, ...]]
    pseudo_tokens: bool
    policy: ValidPolicy
    valid: ValidReport
    rewrites: tuple[Rewrite, ...] = ()
    rewritten: bytes = b""
    interleave: int = 1
    pipeline_schedule: str = "gpipe"
    interleaved: tuple[Interleaved | Scheduled, ...] = ()

    def with_order(self, order: CommonOrder) -> Program:
        """The program with its collectives in another order; see `CompiledModule`."""
        return self._compiled(bool(self.rewrites)).with_order(order)

    def as_written(self) -> CompiledModule:
        """The module without rewrites."""
        return self._compiled(False)

    def _compiled(self, rewrites: bool) -> CompiledModule:
        return compile_hlo(
            self.source.module,
            self.program.num_replicas,
            self.program.num_partitions,
            pseudo_tokens=self.pseudo_tokens,
            rewrites=rewrites,
            valid=self.policy,
            interleave=self.interleave,
            schedule=self.pipeline_schedule,
        )


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="HLO module: text or serialized proto, gzipped or not; - is standard input",
    )
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="let collectives become others that send less, as for JAX programs "
        "(default: run them as they are written)",
    )


def read_file(name: str) -> bytes:
    """Content of the file. Raises `InvalidProgramError`."""
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        with open(name, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidProgramError(error.strerror or str(error)) from error


def compile_file(
    data: bytes,
    num_devices: int,
    *,
    guarded: bool = True,
    policy: ValidPolicy | None = None,
    rewrites: bool = False,
    overlap: OverlapPolicy | None = None,
    rank: int = 0,
) -> CompiledFile:
    """Compile the content of a file, for ``num_devices`` where it names no number of its own.

    ``overlap``: how its collectives are scheduled, if they are. ``rank``: this process's, for what is dumped.
    ``guarded``: in a forked process, so that input which crashes XLA raises `InvalidProgramError`.
    """
    pseudo_tokens = options.in_force().pseudo_tokens
    chunks, schedule = options.in_force().interleave, options.in_force().schedule
    how = policy or ValidPolicy.of(options.in_force())
    dumps = _dumps(options.in_force().dump, rank)
    dump = None if dumps is None else dumps.program()

    def work() -> CompiledFile:
        source = read_hlo(data)
        counts = source.counts(num_devices)
        compiled = compile_hlo(
            source.module,
            *counts,
            pseudo_tokens=pseudo_tokens,
            rewrites=rewrites,
            valid=how,
            interleave=chunks,
            schedule=schedule,
            overlap=overlap,
            dump=dump,
        )
        tokens = compiled.tokens()
        return CompiledFile(
            source,
            compiled.program,
            compiled.schedule,
            tokens,
            pseudo_tokens,
            how,
            compiled.valid,
            compiled.rewrites,
            compiled.rewritten,
            chunks,
            schedule,
            compiled.interleaved,
        )

    def both() -> tuple[CompiledFile, str]:
        made = work()
        return made, "" if dumps is None else dumps.problem

    # What a fork writes to standard error is lost.
    made, problem = in_fork(both, data) if guarded else both()
    if dumps is not None:
        dumps.end(problem)
    return made


@cache
def _dumps(folder: str, rank: int) -> Dumps | None:
    """That of this process: its programs are numbered."""
    return begin(folder, rank)


def complain(command: str, name: str, error: StrettoError) -> int:
    """Say what is wrong with the input; the exit code for it."""
    print(
        f"stretto {command}: {'standard input' if name == '-' else name}: {error}", file=sys.stderr
    )
    return BAD_INPUT


def complain_of_output(command: str, name: str, error: OSError) -> int:
    """Say why a file cannot be written; the exit code where it was all that was asked for."""
    return complain(command, name, StrettoError(f"cannot be written: {error.strerror or error}"))
