"""Regions of a program that compiled code runs whole: their collectives are custom calls of one module.

`native` finds the loops, branches, stretches and whole programs that have little to hide: each of their
collectives is small, hidden by no plan, and can be called by compiled code (`collectives.native`). Such a
region becomes one segment whose collectives are its ``sites``. Its module takes a `CONTEXT` and what the
region reads; the segments that the region ran before are functions in it. Custom calls hand on a chain, so
that XLA keeps them in the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxlib.mlir import ir

from stretto.collectives.native import ALWAYS, NEVER, TARGET, as_called, refusal
from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType
from stretto.runtime.program import (
    CONTEXT,
    WHILE,
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

from . import one_kernel, stablehlo

# Bytes of a collective that is never called by compiled code: there each device has a result of its own.
_LARGE = 16 << 20

# How often a loop of unknown length is taken to run.
_SOME = 10

# Collectives in a row, outside of loops, from which on compiled code is faster than the walk.
MANY = 8
# Bytes of the largest array of a program that the caller's thread may run, as of `collectives.communicator`.
PROMPT = 1 << 16

_END = -1

_MLIR = {name: text for text, name in stablehlo.MLIR_TYPES.items()}


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
    of a segment, and a byte that goes to a device takes compiled code ``copied_s`` longer, since it gives
    each device a result of its own where the walk gives all devices of a process one. Parts of the data that
    differ from device to device, as reduce-scatter and all-to-all make, take ``parted_s``.
    ``prompt``: bytes of its largest array up to which a program without loops is native however few
    collectives it has; 0: never.
    """

    devices: int
    small: int
    prompt: int = 0
    large: int = 0
    step_s: float = 0.0
    copied_s: float = 0.0
    parted_s: float = 0.0

    @classmethod
    def of(cls, devices: int, processes: int, nodes: int) -> NativePolicy:
        """For processes on ``nodes`` hosts. The walk takes 0.1 to 0.3 ms more for a collective
        (benchmarks/loop_sizes.py), which is what 1 MiB takes in memory and 256 KiB through MPI on one host;
        a network of 10 Gb/s moves 64 KiB in less. In steps of training on 4 x 2 devices it takes 1 ms more,
        where processes share cores. Where each process has one device, its caller's thread runs a small
        program."""
        if processes == 1:
            return cls(devices, 1 << 20, 0, _LARGE, 2e-4, 1e-10)
        prompt = PROMPT if devices == 1 else 0
        if nodes == 1:
            return cls(devices, 1 << 18, prompt, _LARGE, 5e-4, 5e-10, 2e-10)
        return cls(devices, 1 << 16, prompt)

    def longer(self, collective: Collective) -> float:
        """Seconds that compiled code takes longer than moving it does in the walk."""
        nbytes = max(_nbytes(collective.operands), _nbytes(collective.results))
        if nbytes <= self.small:
            return 0.0
        parted = collective.kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
        return nbytes * self.devices * (self.parted_s if parted else self.copied_s)


def native(program: Program, policy: NativePolicy) -> Native:
    """The program with its outermost regions as segments."""
    program = _with_plain_bounds(program)
    state = _Rewriting(program, policy)
    why = state.refusal(program.body)
    if not why and (_is_worth_it(program.body.instructions) or state.is_prompt()):
        return state.finished(state.whole())
    if why:
        state.refused.append((program.name, why))
    body = state.block(program.body)
    return state.finished(body) if state.regions else Native(program, refused=tuple(state.refused))


def _with_plain_bounds(program: Program) -> Program:
    """The program with valid iterations said without trip counts, where a pair moves always or never."""
    plain = list(program.collectives)

    def visit(block: Block, iterations: int | None) -> None:
        for instruction in block.instructions:
            if isinstance(instruction, Start):
                collective = program.collectives[instruction.collective]
                bounds = tuple(_plain(b, iterations) for b in collective.valid_iterations)
                if all(b == ALWAYS for b in bounds):
                    bounds = ()
                plain[instruction.collective] = replace(collective, valid_iterations=bounds)
            elif isinstance(instruction, Loop):
                visit(instruction.condition, None)
                visit(instruction.body, instruction.trip_count)
            elif isinstance(instruction, Branch):
                for branch in instruction.branches:
                    visit(branch, iterations)

    visit(program.body, 1)
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

    def __init__(self, program: Program, policy: NativePolicy) -> None:
        self.program = program
        self.policy = policy
        self.segments: list[Segment] = list(program.segments)
        self.regions: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.hidden = _hidden(program.body) if program.predicted is not None else frozenset()

    def whole(self) -> Block:
        body, program = self.program.body, self.program
        donated = tuple(body.parameters[i] for i in program.donated)
        run = self.region(program.name, body.parameters, body.results, donated, body.instructions)
        return Block(body.parameters, (run,), body.results)

    def is_prompt(self) -> bool:
        """Whether the caller's thread may run all of it: it has no loop, and its arrays are small. What is
        donated would be gone if that thread gave the run up, since other processes are late."""
        program = self.program
        loops = any(isinstance(i, Loop) for i in instructions(program.body))
        if loops or program.donated or any(WHILE in s.module for s in program.segments):
            return False
        starts = any(isinstance(i, Start) for i in instructions(program.body))
        return starts and max(t.nbytes for t in program.slot_types) <= self.policy.prompt

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
            if _is_worth_it(stretch):
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
        for instruction in instructions(block):
            if isinstance(instruction, Start):
                collective = program.collectives[instruction.collective]
                why = refusal(collective)
                nbytes = max(_nbytes(collective.operands), _nbytes(collective.results))
                if not why and nbytes > policy.small:
                    if nbytes > policy.large:
                        why = (
                            f"it moves {nbytes} bytes, more than {max(policy.small, policy.large)}"
                        )
                    elif nbytes > largest[0]:
                        largest = nbytes, f"{collective.kind} %{collective.name}"
                if not why and instruction.event in self.hidden:
                    why = "the plan hides it"
                if why:
                    return f"{collective.kind} %{collective.name}: {why}"
            elif isinstance(instruction, Run):
                segment = program.segments[instruction.segment]
                if instruction.valid:
                    return f"segment {segment.name} is left out in some iterations"
                if calls_back(segment.module):
                    return f"segment {segment.name} calls back into Python"
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
                saved += self.policy.step_s
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
        emitter = _Emitter(program, self.policy.devices == 1)
        text = emitter.main(inputs, outputs, donated, body)
        parts = [program.segments[i] for i in emitter.segments]
        module = _merged(text, parts, list(emitter.segments))
        segment = Segment(
            tuple(types[s] for s in inputs),
            tuple(types[s] for s in outputs),
            module,
            donated=tuple(sorted(inputs.index(s) for s in donated)),
            name=name,
            reproducible=any(part.reproducible for part in parts),
            sites=tuple(emitter.sites),
        )
        self.regions.append(name)
        self.segments.append(segment)
        return Run(len(self.segments) - 1, inputs, outputs, donated)

    def finished(self, body: Block) -> Native:
        """The program with this body, and with the segments that it still needs."""
        program = self.program
        used = {i.segment for i in instructions(body) if isinstance(i, Run)}
        started = {i.collective for i in instructions(body) if isinstance(i, Start)}
        used |= {
            c.reducer
            for i, c in enumerate(program.collectives)
            if c.reducer is not None and i in started
        }
        number = {old: new for new, old in enumerate(sorted(used))}

        def renumbered(block: Block) -> Block:
            return replace(block, instructions=tuple(map(moved, block.instructions)))

        def moved(instruction: Instruction) -> Instruction:
            match instruction:
                case Run():
                    return replace(instruction, segment=number[instruction.segment])
                case Loop():
                    return replace(
                        instruction,
                        condition=renumbered(instruction.condition),
                        body=renumbered(instruction.body),
                    )
                case Branch():
                    return replace(
                        instruction, branches=tuple(map(renumbered, instruction.branches))
                    )
            return instruction

        made = replace(
            program,
            segments=tuple(self.segments[i] for i in sorted(used)),
            collectives=tuple(
                c if c.reducer is None else replace(c, reducer=number.get(c.reducer, c.reducer))
                for c in program.collectives
            ),
            body=renumbered(body),
        )
        return Native(made, tuple(self.regions), tuple(self.refused))


def _nbytes(types: Sequence[TensorType]) -> int:
    return sum(type_.nbytes for type_ in types)


def _communicates(instruction: Loop | Branch) -> bool:
    return any(isinstance(i, Start) for b in _blocks(instruction) for i in instructions(b))


def _is_worth_it(body: Sequence[Instruction]) -> bool:
    direct = sum(isinstance(i, Start) for i in body)
    flow = [i for i in body if isinstance(i, Loop | Branch)]
    return direct >= MANY or any(map(_communicates, flow))


def _blocks(instruction: Loop | Branch) -> tuple[Block, ...]:
    if isinstance(instruction, Loop):
        return instruction.condition, instruction.body
    return instruction.branches


def _hidden(body: Block) -> frozenset[int]:
    """Events of starts that something is computed beside."""
    found: set[int] = set()
    for block in blocks(body):
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


def _tensor(type_: TensorType) -> str:
    return f"tensor<{''.join(f'{d}x' for d in type_.shape)}{_MLIR[type_.dtype]}>"


def _layout(type_: TensorType) -> str:
    order = list(range(len(type_.shape)))[::-1]
    return f"dense<{order or ''}> : tensor<{len(order)}xindex>"


_CHAIN, _COUNTER, _PRED = (TensorType(dtype, ()) for dtype in ("s32", "s64", "pred"))


class _Emitter:
    """Writes a region as the text of a StableHLO function that calls the segments."""

    def __init__(self, program: Program, alone: bool) -> None:
        self.program = program
        self.alone = alone
        self.segments: dict[int, None] = {}
        self.sites: list[int] = []
        self.lines: list[str] = []
        self.names: dict[Slot, str] = {}
        self.count = 0
        self.context = "%context"
        self.chain = ""

    def main(
        self,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
        donated: Sequence[Slot],
        body: Sequence[Instruction],
    ) -> str:
        types = self.program.slot_types
        aliases = self._aliases(inputs, outputs, donated)
        parameters = [f"{self.context}: {_tensor(CONTEXT)}"]
        for slot in inputs:
            name = self.names[slot] = self._new()
            alias = f" {{tf.aliasing_output = {aliases[slot]} : i32}}" if slot in aliases else ""
            if slot in donated and slot not in aliases:
                alias = " {jax.buffer_donor = true}"
            parameters.append(f"{name}: {_tensor(types[slot])}{alias}")
        self._begin()
        for instruction in body:
            self._instruction(instruction)
        self._call(_END, ())
        results = ", ".join(self.names[s] for s in outputs)
        result_types = ", ".join(_tensor(types[s]) for s in outputs)
        self._add(f"return {results} : {result_types}" if outputs else "return")
        signature = f"({', '.join(parameters)}) -> ({result_types})"
        lines = [f"func.func public @main{signature} {{", *self.lines, "}"]
        for index in self.segments:
            segment = self.program.segments[index]
            taken, given = (", ".join(map(_tensor, t)) for t in (segment.inputs, segment.outputs))
            lines.append(f"func.func private @{_prefix(index)}main({taken}) -> ({given})")
        return "module {\n" + "\n".join(lines) + "\n}\n"

    def _aliases(
        self, inputs: Sequence[Slot], outputs: Sequence[Slot], donated: Sequence[Slot]
    ) -> dict[Slot, int]:
        """For each donated input the first output of its type that no other has; a loop's own carry first."""
        types, found = self.program.slot_types, dict[Slot, int]()
        for slot in donated:
            own = list(inputs).index(slot)
            order = [own, *range(len(outputs))] if own < len(outputs) else range(len(outputs))
            for k in order:
                if types[outputs[k]] == types[slot] and k not in found.values():
                    found[slot] = k
                    break
        return found

    # Lines.

    def _new(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def _add(self, line: str) -> None:
        self.lines.append(line)

    def _value(self, text: str) -> str:
        name = self._new()
        self._add(f"{name} = {text}")
        return name

    def _constant(self, value: str, type_: str) -> str:
        return self._value(f"stablehlo.constant dense<{value}> : {type_}")

    def _element(self, index: int) -> str:
        """A number of the context."""
        one = self._value(
            f"stablehlo.slice {self.context} [{index}:{index + 1}] : (tensor<4xui64>) -> tensor<1xui64>"
        )
        return self._value(f"stablehlo.reshape {one} : (tensor<1xui64>) -> tensor<ui64>")

    def _begin(self) -> None:
        """The chain's first value, made so that XLA hands the devices over to threads of its own.

        What XLA takes for cheap it runs while it starts the devices, and if one of them fails there it ends
        the process unless the others come to their end. Cheap is what it estimates at less than 1,000
        operations. It counts one for each element of an array of which one element is read here, by an
        index that it does not know: it fuses that, and computes no other. A device that is alone may as
        well run where it is.
        """
        if self.alone:
            self.chain = self._constant("0", "tensor<i32>")
            return
        scalar, array = "tensor<i32>", "tensor<2048xi32>"
        position = self._value(f"stablehlo.convert {self._element(1)} : (tensor<ui64>) -> {scalar}")
        spread = self._value(
            f"stablehlo.broadcast_in_dim {position}, dims = [] : ({scalar}) -> {array}"
        )
        places = self._value(f"stablehlo.iota dim = 0 : {array}")
        mixed = self._value(f"stablehlo.xor {spread}, {places} : {array}")
        one = self._value(
            f"stablehlo.dynamic_slice {mixed}, {position}, sizes = [1] : ({array}, {scalar}) -> tensor<1xi32>"
        )
        self.chain = self._value(f"stablehlo.reshape {one} : (tensor<1xi32>) -> {scalar}")

    # Instructions.

    def _instruction(self, instruction: Instruction) -> None:
        match instruction:
            case Run():
                self._run(instruction)
            case Start():
                self._collective(instruction)
            case Loop():
                self._loop(instruction)
            case Branch():
                self._branch(instruction)
            case Copy():
                self.names[instruction.output] = self.names[instruction.input]
            case LogicalId():
                number = self._element(2 if instruction.kind == "partition" else 3)
                self.names[instruction.output] = self._value(
                    f"stablehlo.convert {number} : (tensor<ui64>) -> tensor<ui32>"
                )
            case Wait() | Free():
                pass

    def _block(self, block: Block, given: Sequence[str]) -> list[str]:
        """Write a block whose parameters have these names; the names of its results."""
        self.names |= zip(block.parameters, given, strict=True)
        for instruction in block.instructions:
            self._instruction(instruction)
        return [self.names[slot] for slot in block.results]

    def _results(self, slots: Sequence[Slot], name: str, first: int = 0, more: int = 0) -> None:
        """Have an operation's results be these slots; it has ``more`` besides."""
        single = len(slots) + more == 1
        for index, slot in enumerate(slots):
            self.names[slot] = name if single else f"{name}#{first + index}"

    def _run(self, run: Run) -> None:
        self.segments[run.segment] = None
        segment = self.program.segments[run.segment]
        name, count = self._new(), len(segment.outputs)
        taken, given = (", ".join(map(_tensor, t)) for t in (segment.inputs, segment.outputs))
        operands = ", ".join(self.names[s] for s in run.inputs)
        left = f"{name}:{count} = " if count > 1 else f"{name} = " if count else ""
        self._add(
            f"{left}func.call @{_prefix(run.segment)}main({operands}) : ({taken}) -> ({given})"
        )
        self._results(run.outputs, name)

    def _collective(self, start: Start) -> None:
        """A call of the next site."""
        program = self.program
        collective = program.collectives[start.collective]
        called = as_called(collective)
        operands = [
            self._converted(self.names[slot], *types)
            for slot, *types in zip(start.inputs, collective.operands, called.operands, strict=True)
        ]
        self.sites.append(start.collective)
        results = self._call(len(self.sites) - 1, operands, called.operands, called.results)
        for slot, result, *types in zip(
            start.outputs, results, called.results, collective.results, strict=True
        ):
            self.names[slot] = self._converted(result, *types)

    def _converted(self, name: str, given: TensorType, wanted: TensorType) -> str:
        if given == wanted:
            return name
        return self._value(f"stablehlo.convert {name} : ({_tensor(given)}) -> {_tensor(wanted)}")

    def _call(
        self,
        site: int,
        inputs: Sequence[str],
        taken: Sequence[TensorType] = (),
        given: Sequence[TensorType] = (),
    ) -> list[str]:
        """Call the handler with operands of the types ``taken``; names of its results, ``given``."""
        operands = [CONTEXT, _CHAIN, *taken]
        results = [_CHAIN, *given]
        names = ", ".join([self.context, self.chain, *inputs])
        name = self._new()
        left = f"{name}:{len(results)}" if len(results) > 1 else name
        self._add(
            f"{left} = stablehlo.custom_call @{TARGET}({names}) {{api_version = 4 : i32, "
            f"has_side_effect = true, backend_config = {{site = {site} : i64}}, "
            f"operand_layouts = [{', '.join(map(_layout, operands))}], "
            f"result_layouts = [{', '.join(map(_layout, results))}]}} : "
            f"({', '.join(map(_tensor, operands))}) -> ({', '.join(map(_tensor, results))})"
        )
        self.chain = f"{name}#0" if len(results) > 1 else name
        return [f"{name}#{k}" for k in range(1, len(results))]

    def _loop(self, loop: Loop) -> None:
        """Carries are context, chain, what tells whether to go on, and the loop's own.

        That is a counter where the trip count is known. Where the condition communicates it is its value,
        which the body computes: what a ``while``'s own condition does to the chain would be lost.
        """
        types = self.program.slot_types
        kinds, initial = [CONTEXT, _CHAIN], [self.context, self.chain]
        counts = loop.trip_count is not None
        communicates = any(isinstance(i, Start) for i in instructions(loop.condition))
        if counts:
            kinds.append(_COUNTER)
            initial.append(self._constant("0", _tensor(_COUNTER)))
        elif communicates:
            kinds.append(_PRED)
            (stays,) = self._block(loop.condition, [self.names[s] for s in loop.inputs])
            initial = [self.context, self.chain, stays]
        fixed = len(initial)
        kinds += [types[s] for s in loop.inputs]
        initial += [self.names[s] for s in loop.inputs]
        listed = ", ".join(map(_tensor, kinds))
        name, outer = self._new(), self.context
        carried = [self._new() for _ in kinds]
        pairs = ", ".join(f"{c} = {i}" for c, i in zip(carried, initial, strict=True))
        self._add(f"{name}:{len(kinds)} = stablehlo.while({pairs}) : {listed}")
        self._add("cond {")
        self.context, self.chain = carried[:2]
        if counts:
            counter = _tensor(_COUNTER)
            limit = self._constant(str(loop.trip_count), counter)
            stays = self._value(
                f"stablehlo.compare LT, {carried[2]}, {limit} : ({counter}, {counter}) -> tensor<i1>"
            )
        elif communicates:
            stays = carried[2]
        else:
            (stays,) = self._block(loop.condition, carried[fixed:])
        self._add(f"stablehlo.return {stays} : tensor<i1>")
        self._add("} do {")
        self.context, self.chain = carried[:2]
        results = self._block(loop.body, carried[fixed:])
        more = []
        if counts:
            one = self._constant("1", counter)
            more.append(self._value(f"stablehlo.add {carried[2]}, {one} : {counter}"))
        elif communicates:
            more += self._block(loop.condition, results)
        last = ", ".join([self.context, self.chain, *more, *results])
        self._add(f"stablehlo.return {last} : {listed}")
        self._add("}")
        self.context, self.chain = outer, f"{name}#1"
        self._results(loop.outputs, name, fixed, fixed)

    def _branch(self, branch: Branch) -> None:
        types = self.program.slot_types
        selector, is_pred = self.names[branch.selector], types[branch.selector].dtype == "pred"
        listed = ", ".join(map(_tensor, [_CHAIN, *(types[s] for s in branch.outputs)]))
        name, chain = self._new(), self.chain
        count = 1 + len(branch.outputs)
        left = f"{name}:{count}" if count > 1 else name
        self._add(f'{left} = "stablehlo.{"if" if is_pred else "case"}"({selector}) ({{')
        for number, (block, slots) in enumerate(zip(branch.branches, branch.inputs, strict=True)):
            if number:
                self._add("}, {")
            self.chain = chain
            results = self._block(block, [self.names[s] for s in slots])
            self._add(f"stablehlo.return {', '.join([self.chain, *results])} : {listed}")
        chosen = _tensor(types[branch.selector])
        self._add(f"}}) : ({chosen}) -> ({listed})")
        self.chain = f"{name}#0" if count > 1 else name
        self._results(branch.outputs, name, 1, 1)


def _prefix(segment: int) -> str:
    return f"s{segment}_"


def _merged(text: str, segments: Sequence[Segment], numbers: Sequence[int]) -> bytes:
    """The module of ``text`` with the functions of these segments, whose declarations it has."""
    with stablehlo.parsed(text) as module, module.context, ir.Location.unknown():
        for operation in list(module.body.operations):
            if "private" in str(operation.attributes.get("sym_visibility", "")):
                operation.operation.erase()
        small = set[str]()
        for number, segment in zip(numbers, segments, strict=True):
            part = stablehlo.parse(segment.module, module.context)
            if not segment.reproducible and one_kernel.prepare(part):
                small.add(f"{_prefix(number)}main")
            functions = [o for o in part.body.operations if o.operation.name == "func.func"]
            for function in functions:
                old = ir.StringAttr(function.attributes["sym_name"]).value
                new = f"{_prefix(number)}{old}"
                ir.SymbolTable.replace_all_symbol_uses(old, new, part.operation)
                ir.SymbolTable.set_symbol_name(function, new)
                function.attributes["sym_visibility"] = ir.StringAttr.get("private")
                for key in ("arg_attrs", "res_attrs"):
                    if key in function.attributes:
                        del function.attributes[key]
            for function in functions:
                function.operation.detach_from_parent()
                module.body.append(function)
        for operation in stablehlo.operations(module):
            if operation.name == "func.call":
                callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                if callee in small:
                    one_kernel.mark(operation)
        return stablehlo.bytecode(module)
