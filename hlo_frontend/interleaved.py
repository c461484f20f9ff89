"""The reports on interleaved loops and on schedules: what `explain`, warnings and dumps print of them.

The package `pipelines`, which interleaves, is optional; this record is not.
"""

from __future__ import annotations

from dataclasses import dataclass

# The reason of a program that sends, but in none of its loops: its report has no name.
NO_LOOP = (
    "none of its loops sends what a stage gives to the next one. Write the pipeline as a lax.scan over "
    "iterations, and do not unroll it"
)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")  # as in `runtime.options`


def _where(name: str, source: str) -> str:
    """What a report is on, the program where it has no name."""
    return f"loop %{name}{' at ' + source if source else ''}" if name else "the program"


def _all_held(held: int) -> str:
    """What is said of bytes of microbatches that each device holds besides."""
    if not held:
        return ""
    return f"; each device holds all microbatches, {held} bytes more than as written"


_UNMASKED = (
    "; what it computes on padding has no masks as written, and is left out here: where that gives NaN or "
    "infinities, gradients are NaN as written, and are not here"
)


@dataclass(frozen=True)
class Interleaved:
    """What became of a loop that moves data in each of its iterations.

    ``chunks`` of layers a device has, and ``stages``, ``microbatches``, ``layers`` of a device. ``before``
    and ``after``: its iterations; one of the latter does 1/chunks of the work. ``moved``: bytes of weights
    that all devices together send before the loop, in every run; ``back``: bytes of their gradients that
    they send after it; ``taken``: arrays of weights that need not be moved. ``held``: bytes of microbatches
    that each device holds around the loops, and other ones in the written program, which hands them on in its
    loops. ``why``: why the loop is left as it is written, or an empty string.
    """

    name: str
    source: str
    chunks: int = 0
    stages: int = 0
    microbatches: int = 0
    layers: int = 0
    before: int = 0
    after: int = 0
    moved: int = 0
    back: int = 0
    taken: int = 0
    held: int = 0
    why: str = ""

    def describe(self) -> str:
        """A sentence for people."""
        where = _where(self.name, self.source)
        if self.why:
            return f"{where} is not interleaved: {self.why}"
        bubble = (self.stages - 1) / self.before
        left = 1 - self.microbatches * self.chunks / self.after
        gradients = f", {self.back} bytes of their gradients after it" if self.back else ""
        return (
            f"{where} is interleaved: {self.stages} stages x {self.chunks} chunks of "
            f"{self.layers // self.chunks} layers, {self.microbatches} microbatches, {self.before} "
            f"iterations became {self.after} of 1/{self.chunks} of the work each, bubble {bubble:.0%} "
            f"became {left:.0%}; {self.moved} bytes of weights are moved before it{gradients}, in each run"
            f"{_all_held(self.held)}"
        )


@dataclass(frozen=True)
class Scheduled:
    """What became of a step of training, or of a loop that moves data in each of its iterations and stays.

    ``name``: its loop of the forward pass, ``backward`` that of the backward pass, and ``loop`` the new one
    in their place. ``before``: the iterations of both written loops together; ``after``: those of the new
    one, in some of which a device makes no run; ``longest``: how many runs one after the other it takes.
    ``alive``: for each stage, the most microbatches that wait for their backward run at a time, each as
    often as there are chunks of layers in which it waits. ``kept``: bytes that layers of a device keep of one
    microbatch for the backward pass, in ``rows_before`` rows of the written loops; ``row``: those that the
    layers of one of its ``chunks`` keep, in ``rows`` rows of the new one. ``left``: bytes that backward runs
    leave for runs of weights. ``moved``, ``back`` and ``taken``: as in `Interleaved`. ``runs``: for each
    device, a letter for each iteration of the new loop: F runs forwards, B backwards, W weights, and a dot
    does not; ``numbers`` and ``own_chunks``: of which of the program's microbatches and through which of the
    device's chunks, -1 where it does not. ``held``: as in `Interleaved`. ``rounds``: why results are equal to
    those of the written step only up to rounding, or an empty string. ``unmasked``: whether it computes on
    padding as written, without masks that prove that this adds nothing. ``meetings``: how many collectives
    the stages make for each microbatch in a head that they divide. ``why``: why it is left as it is written.
    """

    name: str
    source: str
    schedule: str
    backward: str = ""
    loop: str = ""
    stages: int = 0
    microbatches: int = 0
    before: int = 0
    after: int = 0
    longest: int = 0
    alive: tuple[int, ...] = ()
    kept: int = 0
    rows_before: int = 0
    rows: int = 0
    left: int = 0
    runs: tuple[str, ...] = ()
    rounds: str = ""
    why: str = ""
    chunks: int = 1
    row: int = 0
    moved: int = 0
    back: int = 0
    taken: int = 0
    numbers: tuple[tuple[int, ...], ...] = ()
    own_chunks: tuple[tuple[int, ...], ...] = ()
    held: int = 0
    unmasked: bool = False
    meetings: int = 0

    def describe(self) -> str:
        """A sentence for people."""
        where = _where(self.name, self.source)
        if self.why:
            return f"{where} is not run as {self.schedule}: {self.why}"
        written = (self.stages - 1) / (self.microbatches + self.stages - 1)
        bubble = 1 - max(self.after - row.count(".") for row in self.runs) / self.longest
        alive = ", ".join(map(str, self.alive))
        rounds = ""
        if self.rounds:
            rounds = f"; {self.rounds}: results are those of the written step up to rounding"
        meets = ""
        if self.meetings:
            meets = (
                f"; all stages compute a head together, with {self.meetings} collectives for each "
                "microbatch"
            )
        left = f", and {self.left} for runs of weights" if self.left else ""
        stages, moved, each = f"{self.stages} stages", "", "microbatches"
        if self.chunks > 1:
            stages += f" x {self.chunks} chunks"
            each = "chunks of microbatches"
            moved = (
                f"; {self.moved} bytes of weights are moved before it, and {self.back} of their gradients "
                "after it, in each run"
            )
        return (
            f"{where} and its gradient, loop %{self.backward}, are one loop, run as {self.schedule}: "
            f"{stages}, {self.microbatches} microbatches, {self.before} iterations became "
            f"{self.after} of one run each, bubble {bubble:.0%}, as written {written:.0%}; {each} "
            f"alive on each stage: {alive}, as written {self.microbatches * self.chunks}; their layers keep "
            f"{self.rows * self.row} bytes on a device{left}, as written {self.rows_before * self.kept}"
            f"{moved}{meets}{_all_held(self.held)}{_UNMASKED if self.unmasked else ''}{rounds}"
        )
