"""Many inputs, in forked processes: one that crashes or hangs costs its input only."""

from __future__ import annotations

import os
import random
import resource
import select
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from stretto.hlo_frontend.schema import HloModuleProto
from stretto.hlo_frontend.text import parse_hlo_text

from .corpus import HANDMADE, Seed
from .judge import CRASH, DEFECT, HANG, judge
from .mutate import mutated

BATCH = 100
MEMORY = 16 << 30  # bytes of address space of a process
COMPILING, RUNNING = "compiling", "running"


@dataclass(frozen=True)
class Verdict:
    """What became of input ``index``; ``while_compiling``: a crash that users are guarded from."""

    index: int
    outcome: str
    detail: str = ""
    while_compiling: bool = False

    @property
    def bad(self) -> bool:
        return self.outcome in (DEFECT, HANG) or (
            self.outcome == CRASH and not self.while_compiling
        )


@dataclass
class Tally:
    """Counts of outcomes, and the first bad input of each kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    first: dict[str, Verdict] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> bool:
        """Count; whether it is the first of a kind of defect."""
        name = verdict.outcome
        if verdict.outcome == CRASH and verdict.while_compiling:
            name = "crash that the fork keeps from the user"
        self.outcomes[name] += 1
        if not verdict.bad:
            return False
        kind = f"{verdict.outcome}: {verdict.detail.partition(':')[0]}"
        if verdict.detail.count(":"):
            kind = f"{verdict.outcome}: {':'.join(verdict.detail.split(':')[:2])}"
        self.kinds[kind] += 1
        return self.first.setdefault(kind, verdict) is verdict


def input_of(seeds: Sequence[Seed], seed: int, index: int) -> bytes:
    """Input ``index`` of a campaign."""
    return mutated(seeds, random.Random(f"{seed} {index}"))


def piece(
    indices: Sequence[int], modules: Sequence[Seed], seed: int, limit: float
) -> list[Verdict]:
    """Some inputs of a campaign; ``limit`` is in seconds for each."""
    return list(run(indices, lambda index: input_of(modules, seed, index), limit))


def run(
    indices: Iterable[int],
    input_of_index: Callable[[int], bytes],
    limit: float,
) -> Iterator[Verdict]:
    """Judge inputs; ``limit`` is in seconds for each. The calling process must have no threads."""
    _warm_up()
    left = list(indices)
    while left:
        batch, left = left[:BATCH], left[BATCH:]
        done = 0
        for verdict in _batch(batch, input_of_index, limit):
            done += 1
            if verdict.outcome == HANG:  # or the machine is busy
                again = next(_batch([verdict.index], input_of_index, 10 * limit), verdict)
                yield again
            else:
                yield verdict
        left = batch[done:] + left


def _warm_up() -> None:
    """Have XLA fail once: it then reads its own symbols, for seconds, which forks inherit."""
    module = HloModuleProto.FromString(parse_hlo_text(HANDMADE[0]))
    module.computations[0].instructions[-1].operand_ids[0] = 1 << 20
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        judge(module.SerializeToString())
        os.dup2(stderr, 2)
    os.close(stderr)


def _batch(
    batch: Sequence[int], input_of_index: Callable[[int], bytes], limit: float
) -> Iterator[Verdict]:
    """Verdicts of a batch, up to the first input that ends or blocks the process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(batch, input_of_index, writing)
    os.close(writing)
    phase, index, buffer = COMPILING, batch[0], b""
    deadline = monotonic() + limit
    hung = False
    while True:
        ready, _, _ = select.select([reading], [], [], max(deadline - monotonic(), 0.0))
        if not ready:
            hung = True
            os.kill(child, signal.SIGKILL)
            break
        data = os.read(reading, 1 << 16)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            what, number, detail = line.decode(errors="replace").split("\t", 2)
            deadline = monotonic() + limit
            if what in (COMPILING, RUNNING):
                phase, index = what, int(number)
            else:
                yield Verdict(int(number), what, detail)
                index = -1
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if index < 0:
        return
    compiling = phase == COMPILING
    if hung:
        yield Verdict(index, HANG, f"{phase} takes more than {limit:g} s", compiling)
    else:
        how = (
            signal.Signals(os.WTERMSIG(status)).name
            if os.WIFSIGNALED(status)
            else f"exit code {os.WEXITSTATUS(status)}"
        )
        yield Verdict(index, CRASH, f"{how} while {phase}", compiling)


def _child(batch: Sequence[int], input_of_index: Callable[[int], bytes], writing: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)

    def say(what: str, index: int, detail: str = "") -> None:
        text = " ".join(detail.split())[:1000]
        os.write(writing, f"{what}\t{index}\t{text}\n".encode(errors="replace"))

    for index in batch:
        say(COMPILING, index)
        outcome, detail = judge(input_of_index(index), lambda index=index: say(RUNNING, index))
        say(outcome, index, detail)
    os._exit(0)
