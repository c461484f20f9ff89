"""Regions of a program that compiled code runs whole: their collectives are custom calls of one module.

`native` finds the loops, branches, stretches and whole programs that have little to hide: each of their
collectives is small, hidden by no plan, and can be called by compiled code (`collectives.native`). Such a
region becomes one segment whose collectives are its ``sites``, with a module of its own (`region_module`).
Its loops and branches may call back into Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stretto.collectives.native import (
    ALWAYS,
    NEVER,
    PROMPT_ON_HOST,
    as_called,
    is_prompt,
    refusal,
)
from stretto.collectives.ops import PROMPT, Collective, Kind
from stretto.runtime.program import (
    Block,
    Branch,
    Copy,
    Free,
    Instruction,
    LogicalId,
    Loop,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    Wait,
    blocks,
    calls_back,
    instructions,
)

from . import stablehlo
from .region_module import region_module, stretches
from .used_segments import own_slots, with_body
from .work import calls_of, work_of

# Bytes of a collective that is never called by compiled code: there each device has a result of its own.
_LARGE = 16 << 20

# Stretches of a loop's iterations in which other pairs of a permute move data than before, at most.
_STRETCHES = 4

# How often a loop of unknown length is taken to run.
_SOME = 10

# More than a program has.
_NEVER = 1 << 62
# Collectives in a row, outside of loops, from which on compiled code is faster than any walk.
MANY = 8
# Bytes that may be donated to a program that the caller's thread may run: it does not reuse their memory.
_DONATED = 16 << 20


@dataclass(frozen=True)
class Native:
    """``program`` with its regions as segments with sites, and why other control flow has none, by name."""

    program: Program
    regions: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class NativePolicy:
    """Where compiled code may call collectives. Each process has ``devices`` devices.

    ``small``: bytes of a collective, of its operands or its results, up to which the walk would take longer
    than moving them does. A block may have larger ones, up to ``large``, if the walk of the block would take
    longer by more than compiled code does for these: the walk takes ``step_s`` seconds for a start or a run
    of a segment and ``array_s`` for each array that a run takes or gives on a device, and a byte that goes to
    a device takes compiled code ``copied_s`` longer, since it gives each device a result of its own where
    the walk gives all devices of a process one. Parts of the data that differ from device to device, as
    reduce-scatter and all-to-all make, take ``parted_s``.
    ``few``: collectives in a row, outside of loops, from which on compiled code is not slower than the walk.
    ``prompt``: bytes of its largest array up to which a program whose loops are short is native however few
    collectives it has, if they are small too (`collectives.native.is_prompt`); 0: never. ``on_gpus``: code
    for GPUs calls them, over NCCL.
    """

    devices: int
    small: int
    few: int = MANY
    prompt: int = 0
    large: int = 0
    step_s: float = 0.0
    array_s: float = 0.0
    copied_s: float = 0.0
    parted_s: float = 0.0
    on_gpus: bool = False

    @classmethod
    def over_nccl(cls) -> NativePolicy:
        """For processes with a GPU each: loops and branches alone. The walk takes 0.15 ms for a
        collective and reads back what a loop ends by; without control flow it is ahead of the GPU
        anyway."""
        return cls(1, 1 << 20, few=_NEVER, on_gpus=True)

    @classmethod
    def of(cls, devices: int, processes: int, nodes: int) -> NativePolicy:
        """For processes on ``nodes`` hosts. The walk takes 0.1 to 0.3 ms more for a collective
        (benchmarks/loop_sizes.py), which is what 1 MiB takes in memory, and 256 KiB between processes of one
        host that have several devices each; where each has one, 2 MiB through memory take no longer. A
        network of 10 Gb/s moves 64 KiB in less. In steps of training on 4 x 2 devices it takes 1 ms more,
        where processes share cores. Where each process has one device, its caller's thread runs a small
        program.

        The walk runs each segment on one device after the other, with all of its arrays. Around one small
        collective it takes as long as compiled code does on 8 devices, around two, or with 20 arrays, 1.3 to
        2 times as long."""
        if processes == 1:
            return cls(
                devices, 1 << 20, few=1, large=_LARGE, step_s=2e-4, array_s=2e-6, copied_s=1e-10
            )
        if nodes == 1:
            alone = devices == 1
            small, prompt = (PROMPT_ON_HOST, PROMPT_ON_HOST) if alone else (1 << 18, 0)
            policy = cls(devices, small, few=1, prompt=prompt, large=_LARGE)
            return replace(policy, step_s=5e-4, array_s=2e-6, copied_s=5e-10, parted_s=2e-10)
        return cls(devices, 1 << 16, prompt=PROMPT if devices == 1 else 0)

    def longer(self, collective: Collective) -> float:
        """Seconds that compiled code takes longer than moving it does in the walk."""
        nbytes = collective.nbytes
        if nbytes <= self.small:
            return 0.0
        parted = collective.kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
        return nbytes * self.devices * (self.parted_s if parted else self.copied_s)


def native(program: Program, policy: NativePolicy, started: frozenset[str] = frozenset()) -> Native:
    """The program with its outermost regions as segments. ``started``: names of the collectives that the
    program itself starts and awaits."""
    program = _with_plain_bounds(program)
    state = _Rewriting(program, policy, started)
    why = state.refusal(program.body)
    if not why and (_is_worth_it(program.body.instructions, state.few) or state.is_prompt()):
        return state.finished(state.whole())
    if why:
        state.refused.append((program.name, why))
    body = state.block(program.body)
    return state.finished(body) if state.regions else Native(program, refused=tuple(state.refused))


def _with_plain_bounds(program: Program) -> Program:
    """The program with valid iterations said without trip counts, where a pair moves always or never."""
    plain = list(program.collectives)
    for instruction, iterations in _in_loops(program.body, 1):
        if isinstance(instruction, Start):
            collective = program.collectives[instruction.collective]
            bounds = tuple(_plain(b, iterations) for b in collective.valid_iterations)
            if all(b == ALWAYS for b in bounds):
                bounds = ()
            plain[instruction.collective] = replace(collective, valid_iterations=bounds)
    return replace(program, collectives=tuple(plain))


def _plain(bounds: tuple[int, ...], iterations: int | None) -> tuple[int, ...]:
    last = ALWAYS[1] if iterations is None else iterations - 1
    stretches = list(zip(bounds[::2], bounds[1::2], strict=True))
    if any(lo <= 0 and hi >= last for lo, hi in stretches):
        return ALWAYS
    if all(lo > min(hi, last) for lo, hi in stretches):
        return NEVER
    return bounds


class _Rewriting:
    """Puts runs of segments with sites in the place of instructions that communicate."""

    def __init__(self, program: Program, policy: NativePolicy, started: frozenset[str]) -> None:
        self.program = program
        self.policy = policy
        self.segments: list[Segment] = list(program.segments)
        self.regions: list[str] = []
        self.refused: list[tuple[str, str]] = []
        planned = program.predicted is not None
        if planned:
            self.hidden = _hidden(blocks(program.body))
        else:  # what the program itself starts and awaits: in loops the walk would take longer
            own = (i for i in program.body.instructions if isinstance(i, Start))
            events = {i.event for i in own if program.collectives[i.collective].name in started}
            self.hidden = _hidden((program.body,)) & events
        # A plan is kept as it is told, unless there is more to gain.
        self.few = max(MANY, policy.few) if planned else policy.few

    def whole(self) -> Block:
        body, program = self.program.body, self.program
        # The caller's thread may give its run up, and it is made anew then.
        consumed = () if self.is_prompt() else program.donated
        donated = tuple(body.parameters[i] for i in consumed)
        run = self.region(program.name, body.parameters, body.results, donated, body.instructions)
        slot_types = list(program.slot_types)
        results = own_slots(body, slot_types)
        self.program = replace(self.program, slot_types=tuple(slot_types))
        return Block(body.parameters, (replace(run, outputs=results),), results)

    def is_prompt(self) -> bool:
        """Whether the caller's thread may run all of it: its loops are short, and its arrays are small.
        Where that thread gives the run up, since other processes are late, it is made anew: it must not call
        code of the user's, and what is donated is there until it has ended, which must not be much."""
        program, body = self.program, self.program.body.instructions
        if any(s.once for s in program.segments):
            return False
        donated = (program.slot_types[program.body.parameters[i]] for i in program.donated)
        if sum(t.nbytes for t in donated) > _DONATED:
            return False
        made = list(calls_of(body))
        called = [as_called(program.collectives[start.collective]) for start, _ in made]
        largest = max(t.nbytes for t in program.slot_types)
        if not made or largest > self.policy.prompt:
            return False
        calls = [times for _, times in made]
        return is_prompt(called, calls, work_of(program, body).iterations, largest)

    def block(self, block: Block, crossing: frozenset[int] = frozenset()) -> Block:
        """The block with its longest stretches of instructions that can be native as regions.

        ``crossing``: events of starts that the next iteration awaits, which stay as they are.
        """
        last = {slot: i for i, each in enumerate(block.instructions) for slot in _mentioned(each)}
        last |= dict.fromkeys(block.results, len(block.instructions))
        found: list[Instruction] = []
        stretch: list[Instruction] = []
        started: set[int] = set()  # in the stretch
        called: set[int] = set()  # in regions, which leave nothing to be awaited

        def end(position: int) -> None:
            if _is_worth_it(stretch, self.few):
                found.extend(self.stretch(stretch, {s for s in last if last[s] >= position}))
                called.update(started)
            else:
                found.extend(map(self.instruction, stretch))
            stretch.clear()
            started.clear()

        for position, instruction in enumerate(block.instructions):
            if isinstance(instruction, Wait):
                if instruction.event in called:
                    continue
                fits = instruction.event in started
            else:
                event = instruction.event if isinstance(instruction, Start) else -1
                fits = event not in crossing and not self.refusal(Block((), (instruction,), ()))
                if fits and event >= 0:
                    started.add(event)
            if not fits:
                end(position)
                found.append(self.instruction(instruction))
            else:
                stretch.append(instruction)
        end(len(block.instructions))
        return replace(block, instructions=tuple(found))

    def stretch(self, body: Sequence[Instruction], later: set[Slot]) -> list[Instruction]:
        """A region for instructions in a row. ``later``: slots that are mentioned behind them."""
        written = [s for i in body for s in _written(i)]
        inside = set(written)
        freed = {s for i in body if isinstance(i, Free) for s in i.slots}
        read = dict.fromkeys(s for i in body if not isinstance(i, Free) for s in _mentioned(i))
        given = {s for i in body if isinstance(i, Run | Loop) for s in i.donated}
        run = self.region(
            f"{self.program.name} from {self._first(body)}",
            tuple(s for s in read if s not in inside),
            tuple(s for s in written if s in later),
            tuple(s for s in read if s in given - inside),
            body,
        )
        dropped = tuple(sorted(freed - inside))
        return [run, Free(dropped)] if dropped else [run]

    def _first(self, body: Sequence[Instruction]) -> str:
        """The name of a stretch's first collective, or of its first control flow that communicates."""
        for instruction in body:
            if isinstance(instruction, Start):
                return f"%{self.program.collectives[instruction.collective].name}"
            if isinstance(instruction, Loop | Branch) and _communicates(instruction):
                return instruction.name or type(instruction).__name__.lower()
        raise AssertionError("a stretch that does not communicate is none")

    def instruction(self, instruction: Instruction) -> Instruction:
        """An instruction that the walk keeps, with regions inside where it can have some."""
        if not isinstance(instruction, Loop | Branch) or not _communicates(instruction):
            return instruction
        name = instruction.name or type(instruction).__name__.lower()
        self.refused.append((name, self.refusal(Block((), (instruction,), ()))))
        # In a loop that devices leave one by one there may be some that do not take part.
        if isinstance(instruction, Branch) or instruction.trip_count is None:
            return instruction
        crossing = frozenset(c.event for c in instruction.carried)
        return replace(instruction, body=self.block(instruction.body, crossing))

    def refusal(self, block: Block) -> str:
        """Why a block cannot be part of a region, empty if it can."""
        program, policy = self.program, self.policy
        largest = 0, ""
        for instruction, iterations in _in_loops(block):
            if isinstance(instruction, Start):
                collective = program.collectives[instruction.collective]
                parts = [(0, collective)]
                if iterations is not None and _goes_round(collective):
                    parts = stretches(collective, iterations)
                why = refusal(parts[0][1], policy.on_gpus)
                if not why and len(parts) > _STRETCHES:
                    why = f"what it skips changes {len(parts) - 1} times"
                nbytes = collective.nbytes
                if not why and nbytes > policy.small:
                    if nbytes > policy.large:
                        why = (
                            f"it moves {nbytes} bytes, more than {max(policy.small, policy.large)}"
                        )
                    elif nbytes > largest[0]:
                        largest = nbytes, f"{collective.kind} %{collective.name}"
                if not why and instruction.event in self.hidden:
                    why = "something is computed beside it"
                if why:
                    return f"{collective.kind} %{collective.name}: {why}"
            elif isinstance(instruction, Run):
                segment = program.segments[instruction.segment]
                if instruction.valid:
                    return f"segment {segment.name} is left out in some iterations"
                if calls_back(segment.module):
                    inside = all(instruction is not i for i in block.instructions)
                    # On GPUs what is called might want to communicate, which waits for this region.
                    why = _call_refusal(segment, inside=inside and not policy.on_gpus)
                    if why:
                        return f"segment {segment.name} {why}"
            elif isinstance(instruction, Loop) and instruction.carried:
                return f"loop {instruction.name} carries collectives into its next iteration"
        if largest[0] and self._saved(block) < 0:
            nbytes, name = largest
            return f"{name}: it moves {nbytes} bytes, more than {policy.small}, for too little beside it"
        return ""

    def _saved(self, block: Block) -> float:
        """Seconds by which compiled code is faster than the walk of a block."""
        saved = 0.0
        for instruction in block.instructions:
            if isinstance(instruction, Start):
                collective = self.program.collectives[instruction.collective]
                saved += self.policy.step_s - self.policy.longer(collective)
            elif isinstance(instruction, Run):
                arrays = len(instruction.inputs) + len(instruction.outputs)
                saved += self.policy.step_s + self.policy.array_s * arrays * self.policy.devices
            elif isinstance(instruction, Loop):
                trips = _SOME if instruction.trip_count is None else instruction.trip_count
                saved += trips * sum(map(self._saved, _blocks(instruction)))
            elif isinstance(instruction, Branch):
                saved += min(map(self._saved, instruction.branches))
        return saved

    def region(
        self,
        name: str,
        inputs: tuple[Slot, ...],
        outputs: tuple[Slot, ...],
        donated: tuple[Slot, ...],
        body: Sequence[Instruction],
    ) -> Run:
        program, types = self.program, self.program.slot_types
        made = region_module(program, self.policy.devices == 1, inputs, outputs, donated, body)
        self.program = replace(program, collectives=made.collectives)
        segment = Segment(
            tuple(types[s] for s in inputs),
            tuple(types[s] for s in outputs),
            made.module,
            donated=tuple(sorted(inputs.index(s) for s in donated)),
            name=name,
            reproducible=any(program.segments[i].reproducible for i in made.segments),
            sites=made.sites,
            once=any(program.segments[i].once for i in made.segments),
            iterations=work_of(program, body).iterations,
            calls=made.calls,
        )
        self.regions.append(name)
        self.segments.append(segment)
        return Run(len(self.segments) - 1, inputs, outputs, donated)

    def finished(self, body: Block) -> Native:
        """The program with this body, and with the segments that it still needs."""
        made = with_body(self.program, self.segments, body)
        return Native(made, tuple(self.regions), tuple(self.refused))


def _communicates(instruction: Loop | Branch) -> bool:
    return any(isinstance(i, Start) for b in _blocks(instruction) for i in instructions(b))


def _goes_round(collective: Collective) -> bool:
    """Whether all pairs of a permute skip alike, and who sends also receives, as in a ring.

    Others are stages of a pipeline, say, of which results are promised to be those of other schedules bit for
    bit: its segments are compiled one by one in all of them.
    """
    sources, targets = ({pair[k] for pair in collective.pairs} for k in (0, 1))
    return len(set(collective.valid_iterations)) == 1 and sources == targets


def _in_loops(
    block: Block, iterations: int | None = None
) -> Iterator[tuple[Instruction, int | None]]:
    """As `instructions`, with the trip count of the innermost loop around each; None where there is none, or
    nobody knows how often it runs."""
    for instruction in block.instructions:
        yield instruction, iterations
        if isinstance(instruction, Loop):
            yield from _in_loops(instruction.condition)
            yield from _in_loops(instruction.body, instruction.trip_count)
        elif isinstance(instruction, Branch):
            for branch in instruction.branches:
                yield from _in_loops(branch, iterations)


def _call_refusal(segment: Segment, inside: bool) -> str:
    """Why a segment that calls back into Python cannot be part of a region; empty if it can: ``inside``
    of its control flow. Outside of that the walk of one more segment takes no time beside the call."""
    if not inside:
        return "calls back into Python"
    with stablehlo.parsed(segment.module) as module:
        if stablehlo.calls_in_order(module):
            return "calls back into Python, in an order"  # which compiled code does not keep among segments
    return ""


def _is_worth_it(body: Sequence[Instruction], few: int) -> bool:
    direct = sum(isinstance(i, Start) for i in body)
    flow = [i for i in body if isinstance(i, Loop | Branch)]
    return direct >= few or any(map(_communicates, flow))


def _blocks(instruction: Loop | Branch) -> tuple[Block, ...]:
    if isinstance(instruction, Loop):
        return instruction.condition, instruction.body
    return instruction.branches


def _hidden(searched: Iterable[Block]) -> frozenset[int]:
    """Events of starts that something is computed beside."""
    found: set[int] = set()
    for block in searched:
        under_way: set[int] = set()
        for instruction in block.instructions:
            if isinstance(instruction, Start):
                under_way.add(instruction.event)
            elif isinstance(instruction, Wait):
                under_way.discard(instruction.event)
            elif isinstance(instruction, Run | Loop | Branch):
                found |= under_way
    return frozenset(found)


def _written(instruction: Instruction) -> tuple[Slot, ...]:
    if isinstance(instruction, Copy | LogicalId):
        return (instruction.output,)
    return getattr(instruction, "outputs", ())


def _mentioned(instruction: Instruction) -> tuple[Slot, ...]:
    """Slots that it reads or drops."""
    match instruction:
        case Copy():
            return (instruction.input,)
        case Free():
            return instruction.slots
        case Branch():
            return (instruction.selector, *(s for taken in instruction.inputs for s in taken))
    return getattr(instruction, "inputs", ())
