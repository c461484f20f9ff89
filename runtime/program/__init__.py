"""`Program`: the instruction set of the executor.

A program is data: frozen, comparable, printable (``str(program)``), serializable (`program.codec`). It is
written for one logical device; the executor walks it once for all local devices, in lockstep.

Registers. Every value lives in a *slot*, an index into one flat register file that belongs to one run of
the program. A slot holds one array for each active local device. A slot is written by exactly one
instruction (or is a parameter of exactly one block) and is dead after the `Free` that names it, or once an
instruction has it in ``donated``. Instructions of a loop's blocks write their slots anew every iteration.

Invariants, checked by `program.check.check`:

- a slot is defined before it is read, on every path, and is not read after it was freed or donated;
- the outputs of a `Start` become defined at the `Wait` of its event; its inputs stay alive until then;
- every `Start` has exactly one `Wait`, in the same block: behind it, or before it where the loop carries
  it into its next iteration (`Carried`);
- outputs of a `Run` that some devices may leave out are never donated: who leaves it out shares them;
- types agree along every edge: segments, collectives, loop carries, branch results.

``str(program)`` is for reading, `to_text` says all that a program is:

    program "step" replicas 1 partitions 4 streams 1 donated (0)
    segment "half" (f32[8]) -> (f32[8]) donated (0) module text "…"
    collective all-reduce "psum.1" (f32[8]) -> (f32[8]) groups {{0,1,2,3}} reduction add
    body (%0:f32[8]) {
      run 0 (%0) -> (%1:f32[8]) donated (%0)
      start 0 (%1) -> (%2:f32[8]) event 0 stream 0
      wait 0
      free (%1)
      yield (%2)
    }

A slot's type stands where the slot is written; slots that nothing writes are listed as ``unused``.
Modules that are UTF-8 are written as text, others as base64; ``str(program)`` has their size and digest
instead. That the text says everything is tested with a parser, `tests/support/program_parser.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from stretto.collectives.ops import Collective, attributes, nested
from stretto.collectives.types import TensorType

Slot = int
ENDLESS = (1 << 63) - 1  # in valid iterations: the last one where there is no last one


# What a segment with sites takes first: the address of the table of its sites, the device's position among
# the local ones, its partition and its replica.
CONTEXT = TensorType("u64", (4,))
# What modules of segments that loop have in them. XLA may take a loop for cheap, and run it in the thread
# that calls, however long it takes.
WHILE = b"while"
# And of those that call something, be it a library.
CALLS = b"custom_call"
# Iterations that take no loop long: XLA runs one in the thread that calls only where an iteration has fewer
# than 1,000 operations.
FEW = 4096


def calls_back(module: bytes) -> bool:
    """Whether a serialized module calls Python functions, whose targets MLIR's bytecode has as they are."""
    return b"python_cpu_callback" in module or b"python_gpu_callback" in module


@dataclass(frozen=True)
class Segment:
    """A piece of compute for the engine: one StableHLO module with a public ``main``.

    ``module`` is StableHLO (MLIR bytecode or text). ``donated`` lists inputs that ``main`` marks as
    donated (``jax.buffer_donor`` or ``tf.aliasing_output``): a run consumes them. ``arithmetic`` counts
    the arithmetic HLO instructions one run executes (a loop inside of unknown length once), -1 if not known.
    ``reproducible``: a loop in it must give the same bits whatever its trip count and the sizes of what it
    carries. Segments of a pipeline's loop are: a chunk of a device's layers computes what all of them do.
    ``sites``: collectives of the program that the module calls itself, as custom calls (see
    `hlo_frontend.native`); ``main`` then takes a `CONTEXT` before its inputs, and all devices run it at once.
    ``once``: a run must not be made anew with the same inputs, since it calls code of the user's, which may
    have effects or a state.
    ``iterations``: how many its loops make in one run, those within others each time; -1 if not known.
    ``calls``: of each site, how often one run calls it at most; -1 if not known.
    Segments are equal when their modules and types are: names and source lines are stripped before.
    """

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    module: bytes
    donated: tuple[int, ...] = ()
    arithmetic: int = -1
    flops: float = -1.0
    name: str = field(default="", compare=False)
    reproducible: bool = False
    sites: tuple[int, ...] = ()
    once: bool = False
    iterations: int = -1
    calls: tuple[int, ...] = ()

    @property
    def ends_soon(self) -> bool:
        """Whether its loops, if it has any, are known to end, after few iterations."""
        return WHILE not in self.module or 0 <= self.iterations <= FEW


@dataclass(frozen=True)
class Run:
    """Run a segment. ``donated`` are the slots consumed (those at the segment's donated inputs).

    ``valid``, where it is not empty, has for each logical device the iterations of the innermost loop in
    which the segment is run there, as first and last of each stretch (outside of loops all is iteration
    0): in others its outputs are zeros, made by nobody, and what is donated is dropped.
    """

    segment: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donated: tuple[Slot, ...] = ()
    valid: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Start:
    """Start ``program.collectives[collective]`` on a stream; nothing of it may be awaited here."""

    collective: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    event: int
    stream: int = 0


@dataclass(frozen=True)
class Wait:
    """Make the outputs of the start with this event number available."""

    event: int


@dataclass(frozen=True)
class Carried:
    """A start of a loop's body that is awaited in the next iteration: its `Wait` stands before it.

    ``carries``: pairs (position of an output of the start, position of the carry that it becomes). The
    wait makes the body's parameters at these carries available: what the start of the iteration before
    gives, in the first iteration their initial values. What the last iteration starts, the loop awaits at
    its end; a loop that is not entered starts nothing.
    """

    event: int
    carries: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Loop:
    """HLO while. ``condition`` and ``body`` take the carries as block parameters.

    ``inputs`` are the initial carries, ``outputs`` the final ones. ``condition`` yields one ``pred[]``.
    ``trip_count`` is known on every device, or None: then the condition is evaluated each time, and
    devices whose condition is false leave the loop and keep their carries while the others go on.
    ``donated`` are the inputs consumed by the first iteration. ``carried`` are starts whose outputs cross
    into the next iteration while under way: body results at their carries are these outputs, and neither
    the condition nor anything before the wait reads the parameters.
    """

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    condition: Block
    body: Block
    trip_count: int | None = None
    donated: tuple[Slot, ...] = ()
    name: str = ""
    source: str = ""
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True)
class Branch:
    """HLO conditional. ``selector`` is ``pred[]`` (true: branch 0) or ``s32[]``, clamped as in HLO.

    Branch i takes ``inputs[i]`` as its block's parameters. Devices may choose differently; branches are
    walked in ascending order, each with the devices that chose it.
    """

    selector: Slot
    inputs: tuple[tuple[Slot, ...], ...]
    outputs: tuple[Slot, ...]
    branches: tuple[Block, ...]
    name: str = ""
    source: str = ""


@dataclass(frozen=True)
class Copy:
    """A copy that shares no memory with its source."""

    input: Slot
    output: Slot


@dataclass(frozen=True)
class LogicalId:
    """The device's own ``partition`` or ``replica`` id, a ``u32[]``."""

    kind: str
    output: Slot


@dataclass(frozen=True)
class Free:
    """Drop the values of these slots."""

    slots: tuple[Slot, ...]


Instruction = Run | Start | Wait | Loop | Branch | Copy | LogicalId | Free


@dataclass(frozen=True)
class Block:
    """A straight line of instructions with parameters and results."""

    parameters: tuple[Slot, ...]
    instructions: tuple[Instruction, ...]
    results: tuple[Slot, ...]


@dataclass(frozen=True)
class Prediction:
    """What a run takes by the table of costs with which the program was compiled. Seconds.

    ``exposed``: in which collectives are awaited and nothing is computed; ``held``: by which those beside it
    make compute longer, because the same cores move the data. Both are part of ``seconds``.
    """

    seconds: float
    exposed: float
    held: float


@dataclass(frozen=True)
class Program:
    """A compiled program for ``num_replicas * num_partitions`` logical devices.

    ``slot_types[slot]`` is the type of every slot. ``body.parameters`` are the program's inputs,
    ``body.results`` its outputs. ``donated`` are the input positions that the caller gives up.
    ``predicted`` is no part of what the program does: programs that differ only in it are equal.
    """

    name: str
    num_replicas: int
    num_partitions: int
    slot_types: tuple[TensorType, ...]
    segments: tuple[Segment, ...]
    collectives: tuple[Collective, ...]
    body: Block
    donated: tuple[int, ...] = ()
    num_streams: int = 1
    predicted: Prediction | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """The program for reading, with the size and digest of each module."""
        return to_text(self, modules=False)

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.num_partitions

    @property
    def inputs(self) -> tuple[TensorType, ...]:
        return tuple(self.slot_types[s] for s in self.body.parameters)

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return tuple(self.slot_types[s] for s in self.body.results)

    @property
    def communicates(self) -> bool:
        """Whether it has collectives, started by the walk or called by segments."""
        return any(
            isinstance(i, Start) or (isinstance(i, Run) and self.segments[i.segment].sites)
            for i in instructions(self.body)
        )

    @property
    def single_run(self) -> Run | None:
        """The run, where the whole program is one run of a segment on the inputs as they come."""
        if len(self.body.instructions) != 1:
            return None
        (run,) = self.body.instructions
        if not isinstance(run, Run) or run.valid:
            return None
        whole = run.inputs == self.body.parameters and run.outputs == self.body.results
        return run if whole else None

    @cached_property
    def lasting_ids(self) -> dict[Slot, LogicalId]:
        """Logical ids that segments read and nothing else has: the same arrays serve all runs."""
        found = {i.output: i for i in instructions(self.body) if isinstance(i, LogicalId)}
        for instruction in instructions(self.body) if found else ():
            match instruction:
                case Run(donated=taken):
                    pass
                case Start(inputs=taken) | Loop(inputs=taken):
                    pass
                case Branch(selector=selector, inputs=inputs):
                    taken = (selector, *chain.from_iterable(inputs))
                case Copy(input=slot):
                    taken = (slot,)
                case _:
                    continue
            for slot in taken:
                found.pop(slot, None)
        for block in blocks(self.body) if found else ():
            for slot in block.results:
                found.pop(slot, None)
        return found

    @cached_property
    def arranged_run(self) -> Run | None:
        """The run, where the program is one run of a segment, on some of its inputs and `lasting_ids`, in any
        order."""
        runs = [i for i in self.body.instructions if isinstance(i, Run)]
        if len(runs) != 1 or not all(
            isinstance(i, Run | Free) or (isinstance(i, LogicalId) and i.output in self.lasting_ids)
            for i in self.body.instructions
        ):
            return None
        (run,) = runs
        if run.valid or run.outputs != self.body.results:
            return None
        given = {*self.body.parameters, *self.lasting_ids}
        return run if given.issuperset(run.inputs) else None

    @property
    def single_segment(self) -> Segment | None:
        """The segment of the `single_run`, where it calls no collectives."""
        run = self.single_run
        segment = None if run is None else self.segments[run.segment]
        return None if segment is None or segment.sites else segment


def blocks(block: Block) -> Iterator[Block]:
    """The block and every block nested in it, outermost first."""
    yield block
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            yield from blocks(instruction.condition)
            yield from blocks(instruction.body)
        elif isinstance(instruction, Branch):
            for branch in instruction.branches:
                yield from blocks(branch)


def with_blocks(instruction: Instruction, change: Callable[[Block], Block]) -> Instruction:
    """The instruction with what ``change`` makes of the blocks that are nested in it; others as they are."""
    if isinstance(instruction, Loop):
        condition, body = change(instruction.condition), change(instruction.body)
        return replace(instruction, condition=condition, body=body)
    if isinstance(instruction, Branch):
        return replace(instruction, branches=tuple(map(change, instruction.branches)))
    return instruction


def instructions(block: Block) -> Iterator[Instruction]:
    """Every instruction of the block and of the blocks nested in it."""
    for inner in blocks(block):
        yield from inner.instructions


def to_text(program: Program, *, modules: bool = True) -> str:
    """Print a program. Without ``modules`` each is only named by size and digest."""
    return "\n".join(_Printer(program, modules).lines()) + "\n"


class _Printer:
    def __init__(self, program: Program, modules: bool) -> None:
        self.program = program
        self.modules = modules

    def lines(self) -> Iterator[str]:
        program, p = self.program, self.program.predicted
        yield (
            f"program {_quote(program.name)} replicas {program.num_replicas} "
            f"partitions {program.num_partitions} streams {program.num_streams}"
            + _option("donated", program.donated, _numbers)
            + (f" predicted {p.seconds!r} {p.exposed!r} {p.held!r}" if p is not None else "")
        )
        for segment in program.segments:
            yield self.segment(segment)
        for collective in program.collectives:
            yield self.collective(collective)
        unused = sorted(set(range(len(program.slot_types))) - _written(program.body))
        if unused:
            yield f"unused {self.typed(unused)}"
        yield from self.block("body", program.body, "")

    def segment(self, segment: Segment) -> str:
        return (
            f"segment {_quote(segment.name)} {_signature(segment.inputs, segment.outputs)}"
            + _option("donated", segment.donated, _numbers)
            + (f" arithmetic {segment.arithmetic}" if segment.arithmetic != -1 else "")
            + (f" flops {segment.flops!r}" if segment.flops != -1.0 else "")
            + (" reproducible" if segment.reproducible else "")
            + _option("sites", segment.sites, _numbers)
            + (" once" if segment.once else "")
            + (f" iterations {segment.iterations}" if segment.iterations != -1 else "")
            + _option("calls", segment.calls, _numbers)
            + f" module {self.module(segment.module)}"
        )

    def module(self, module: bytes) -> str:
        if not self.modules:
            digest = hashlib.sha256(module).hexdigest()[:12]
            return f"omitted {_quote(f'{len(module)} bytes, sha256 {digest}')}"
        try:
            return f"text {_quote(module.decode())}"
        except UnicodeDecodeError:
            return f"base64 {_quote(base64.b64encode(module).decode())}"

    def collective(self, c: Collective) -> str:
        parts = [f"collective {c.kind} {_quote(c.name)} {_signature(c.operands, c.results)}"]
        parts += attributes(c)
        if c.source:
            parts.append(f"source {_quote(c.source)}")
        return " ".join(parts)

    def block(self, head: str, block: Block, indent: str) -> Iterator[str]:
        yield f"{indent}{head} {self.typed(block.parameters)} {{"
        for instruction in block.instructions:
            yield from self.instruction(instruction, indent + "  ")
        yield f"{indent}  yield {_slots(block.results)}"
        yield f"{indent}}}"

    def instruction(self, i: Instruction, indent: str) -> Iterator[str]:
        match i:
            case Run():
                yield (
                    f"{indent}run {i.segment} {_slots(i.inputs)} -> {self.typed(i.outputs)}"
                    + _option("donated", i.donated, _slots)
                    + _option("valid", i.valid, nested)
                )
            case Start():
                yield (
                    f"{indent}start {i.collective} {_slots(i.inputs)} -> {self.typed(i.outputs)} "
                    f"event {i.event} stream {i.stream}"
                )
            case Wait():
                yield f"{indent}wait {i.event}"
            case Copy():
                yield f"{indent}copy {_slots((i.input,))} -> {self.typed((i.output,))}"
            case LogicalId():
                yield f"{indent}id {_quote(i.kind)} -> {self.typed((i.output,))}"
            case Free():
                yield f"{indent}free {_slots(i.slots)}"
            case Loop():
                yield (
                    f"{indent}loop {_quote(i.name)} {_slots(i.inputs)} -> {self.typed(i.outputs)}"
                    + (f" trip_count {i.trip_count}" if i.trip_count is not None else "")
                    + _option("donated", i.donated, _slots)
                    + (f" source {_quote(i.source)}" if i.source else "")
                    + "".join(f" carried {c.event} {nested(c.carries)}" for c in i.carried)
                )
                yield from self.block("condition", i.condition, indent + "  ")
                yield from self.block("body", i.body, indent + "  ")
            case Branch():
                yield (
                    f"{indent}branch {_quote(i.name)} {_slots((i.selector,))} -> "
                    f"{self.typed(i.outputs)} of {len(i.branches)}"
                    + (f" source {_quote(i.source)}" if i.source else "")
                )
                for inputs, block in zip(i.inputs, i.branches, strict=True):
                    yield from self.block(f"case {_slots(inputs)} ->", block, indent + "  ")

    def typed(self, slots: Iterable[Slot]) -> str:
        return f"({', '.join(f'%{s}:{self.program.slot_types[s]}' for s in slots)})"


def _written(body: Block) -> set[Slot]:
    written: set[Slot] = set()
    for block in blocks(body):
        written.update(block.parameters)
        for instruction in block.instructions:
            written.update(getattr(instruction, "outputs", ()))
            if isinstance(instruction, Copy | LogicalId):
                written.add(instruction.output)
    return written


def _quote(text: str) -> str:
    return json.dumps(text)


def _numbers(numbers: Iterable[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _slots(slots: Iterable[Slot]) -> str:
    return f"({', '.join(f'%{slot}' for slot in slots)})"


def _option(name: str, value: Any, show: Callable[[Any], str]) -> str:
    return f" {name} {show(value)}" if value else ""


def _signature(inputs: Iterable[TensorType], outputs: Iterable[TensorType]) -> str:
    return f"({', '.join(map(str, inputs))}) -> ({', '.join(map(str, outputs))})"
