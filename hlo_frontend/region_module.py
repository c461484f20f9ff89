"""The module of a region of a program that compiled code runs whole (`native`).

It takes a `CONTEXT` and what the region reads; the segments that the region ran before are functions in it.
The collectives are custom calls, which hand on a chain, so that XLA keeps them in the program's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxlib.mlir import ir

from stretto.collectives.native import ALWAYS, NEVER, TARGET, as_called
from stretto.collectives.ops import Collective
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
    instructions,
)

from . import one_kernel, stablehlo
from .work import calls_of

_END = -1

_MLIR = {name: text for text, name in stablehlo.MLIR_TYPES.items()}


@dataclass(frozen=True)
class RegionModule:
    """``module`` is StableHLO bytecode. ``sites``: the collectives that it calls, by their numbers in
    ``collectives``, in the order of its sites: the program's, and behind them what they are in stretches of
    iterations (`stretches`). ``calls``: how often, at most, as of `Segment`. ``segments``: those of the
    program that are functions in it."""

    module: bytes
    sites: tuple[int, ...]
    calls: tuple[int, ...]
    segments: tuple[int, ...]
    collectives: tuple[Collective, ...]


def plain_module(
    program: Program,
    ids: Mapping[str, Slot],
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    donated: Sequence[Slot],
    body: Sequence[Instruction],
) -> bytes:
    """The module of ``body``, which starts no collectives, as of any segment. ``ids``: kinds of logical ids,
    and the inputs that have them."""
    emitter = _Emitter(program, alone=True, ids=ids)
    text = emitter.main(inputs, outputs, donated, body)
    numbers = tuple(emitter.segments)
    return _merged(text, [program.segments[i] for i in numbers], numbers, emitter.repeated)


def stretches(collective: Collective, trip_count: int) -> list[tuple[int, Collective]]:
    """The stretches of a loop's iterations in which a permute, whose pairs all skip alike, moves data and in
    which it does not: the first iteration of each, and the collective there."""
    (bounds,) = set(collective.valid_iterations)
    moving = list(zip(bounds[::2], bounds[1::2], strict=True))
    ends = sorted({0, *bounds[::2], *(last + 1 for _, last in moving)})
    found: list[tuple[int, Collective]] = []
    for begin in (e for e in ends if e == 0 or 0 < e < trip_count):
        moves = any(first <= begin <= last for first, last in moving)
        skips = () if moves else (NEVER,) * len(collective.pairs)
        there = replace(collective, valid_iterations=skips)
        if not found or found[-1][1] != there:
            found.append((begin, there))
    return found


def region_module(
    program: Program,
    alone: bool,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    donated: Sequence[Slot],
    body: Sequence[Instruction],
) -> RegionModule:
    """The module that does what ``body`` does. ``alone``: it runs on one device of a process."""
    emitter = _Emitter(program, alone)
    text = emitter.main(inputs, outputs, donated, body)
    numbers = tuple(emitter.segments)
    module = _merged(text, [program.segments[i] for i in numbers], numbers, emitter.repeated)
    sites, calls = tuple(emitter.sites), tuple(emitter.calls)
    return RegionModule(module, sites, calls, numbers, tuple(emitter.collectives))


def _tensor(type_: TensorType) -> str:
    return f"tensor<{''.join(f'{d}x' for d in type_.shape)}{_MLIR[type_.dtype]}>"


def _layout(type_: TensorType) -> str:
    order = list(range(len(type_.shape)))[::-1]
    return f"dense<{order or ''}> : tensor<{len(order)}xindex>"


_CHAIN, _COUNTER, _PRED = (TensorType(dtype, ()) for dtype in ("s32", "s64", "pred"))


class _Emitter:
    """Writes a region as the text of a StableHLO function that calls the segments."""

    def __init__(
        self, program: Program, alone: bool, ids: Mapping[str, Slot] | None = None
    ) -> None:
        """``ids``: where logical ids are, for a module that takes no context and calls no collectives."""
        self.program = program
        self.alone = alone
        self.ids = ids
        self.segments: dict[int, None] = {}
        self.repeated: set[int] = set()  # segments that loops run, or that have some
        self.loops = 0  # around what is written
        self.sites: list[int] = []
        self.calls: list[int] = []
        self.entered: dict[Start, int] = {}  # how often each start is made
        self.collectives = list(program.collectives)
        self.counter = "", 0  # of the loop around, and its trip count
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
        calls = self.ids is None
        parameters = [f"{self.context}: {_tensor(CONTEXT)}"] if calls else []
        for slot in inputs:
            name = self.names[slot] = self._new()
            alias = f" {{tf.aliasing_output = {aliases[slot]} : i32}}" if slot in aliases else ""
            if slot in donated and slot not in aliases:
                alias = " {jax.buffer_donor = true}"
            parameters.append(f"{name}: {_tensor(types[slot])}{alias}")
        if calls:
            self.entered |= calls_of(body)
            self._begin()
        for instruction in body:
            self._instruction(instruction)
        if calls:
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
            case LogicalId() if self.ids is not None:
                self.names[instruction.output] = self.names[self.ids[instruction.kind]]
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
        if self.loops or WHILE in segment.module:
            self.repeated.add(run.segment)
        name, count = self._new(), len(segment.outputs)
        taken, given = (", ".join(map(_tensor, t)) for t in (segment.inputs, segment.outputs))
        operands = ", ".join(self.names[s] for s in run.inputs)
        left = f"{name}:{count} = " if count > 1 else f"{name} = " if count else ""
        self._add(
            f"{left}func.call @{_prefix(run.segment)}main({operands}) : ({taken}) -> ({given})"
        )
        self._results(run.outputs, name)

    def _collective(self, start: Start) -> None:
        """A call of the next site, or of one for each stretch of iterations in which the same pairs move."""
        collective = self.collectives[start.collective]
        called = as_called(collective)
        operands = [
            self._converted(self.names[slot], *types)
            for slot, *types in zip(start.inputs, collective.operands, called.operands, strict=True)
        ]
        counter, trip_count = self.counter
        times = self.entered[start]
        calls = partial(self._call, inputs=operands, taken=called.operands, given=called.results)
        if all(bounds in (NEVER, ALWAYS) for bounds in collective.valid_iterations):
            results = calls(self._site(start.collective, times))
        else:
            found = stretches(collective, trip_count)
            results = self._by_stretch(
                counter, found, [partial(calls, self._site(self._kept(c), times)) for _, c in found],
                [_CHAIN, *called.results],
            )  # fmt: skip
        for slot, result, *types in zip(
            start.outputs, results, called.results, collective.results, strict=True
        ):
            self.names[slot] = self._converted(result, *types)

    def _site(self, collective: int, times: int) -> int:
        self.sites.append(collective)
        self.calls.append(times)
        return len(self.sites) - 1

    def _kept(self, collective: Collective) -> int:
        """The number of a collective, which is added where there is none like it."""
        if collective not in self.collectives:
            self.collectives.append(collective)
        return self.collectives.index(collective)

    def _by_stretch(
        self,
        counter: str,
        stretches: Sequence[tuple[int, Collective]],
        calls: Sequence[Callable[[], list[str]]],
        types: Sequence[TensorType],
    ) -> list[str]:
        """One of several calls, by the loop's counter. They give ``types``, the chain first."""
        kind = _tensor(_COUNTER)
        index = self._constant("0", "tensor<i32>")
        for first, _ in stretches[1:]:
            limit = self._constant(str(first), kind)
            behind = self._value(
                f"stablehlo.compare GE, {counter}, {limit} : ({kind}, {kind}) -> tensor<i1>"
            )
            one = self._value(f"stablehlo.convert {behind} : (tensor<i1>) -> tensor<i32>")
            index = self._value(f"stablehlo.add {index}, {one} : tensor<i32>")
        listed = ", ".join(map(_tensor, types))
        name, chain = self._new(), self.chain
        left = f"{name}:{len(types)}" if len(types) > 1 else name
        self._add(f'{left} = "stablehlo.case"({index}) ({{')
        for number, call in enumerate(calls):
            if number:
                self._add("}, {")
            self.chain = chain
            results = call()
            self._add(f"stablehlo.return {', '.join([self.chain, *results])} : {listed}")
        self._add(f"}}) : (tensor<i32>) -> ({listed})")
        self.chain = f"{name}#0" if len(types) > 1 else name
        return [f"{name}#{k}" for k in range(1, len(types))]

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

    def _handed_on(self) -> tuple[list[TensorType], list[str]]:
        """What loops carry beside what is theirs: types and names of context and chain, if there are any."""
        calls = self.ids is None
        return ([CONTEXT, _CHAIN], [self.context, self.chain]) if calls else ([], [])

    def _take(self, carried: Sequence[str]) -> None:
        if self.ids is None:
            self.context, self.chain = carried[:2]

    def _loop(self, loop: Loop) -> None:
        """Carries are context, chain, what tells whether to go on, and the loop's own.

        That is a counter where the trip count is known. Where the condition communicates it is its value,
        which the body computes: what a ``while``'s own condition does to the chain would be lost.
        """
        types = self.program.slot_types
        kinds, initial = self._handed_on()
        base = len(kinds)
        counts = loop.trip_count is not None
        communicates = any(isinstance(i, Start) for i in instructions(loop.condition))
        if counts:
            kinds.append(_COUNTER)
            initial.append(self._constant("0", _tensor(_COUNTER)))
        elif communicates:
            kinds.append(_PRED)
            (stays,) = self._block(loop.condition, [self.names[s] for s in loop.inputs])
            initial = [*self._handed_on()[1], stays]
        fixed = len(initial)
        kinds += [types[s] for s in loop.inputs]
        initial += [self.names[s] for s in loop.inputs]
        listed = ", ".join(map(_tensor, kinds))
        name, outer = self._new(), self.context
        carried = [self._new() for _ in kinds]
        pairs = ", ".join(f"{c} = {i}" for c, i in zip(carried, initial, strict=True))
        self._add(f"{name}:{len(kinds)} = stablehlo.while({pairs}) : {listed}")
        self.loops += 1
        self._add("cond {")
        self._take(carried)
        if counts:
            counter = _tensor(_COUNTER)
            limit = self._constant(str(loop.trip_count), counter)
            stays = self._value(
                f"stablehlo.compare LT, {carried[base]}, {limit} : ({counter}, {counter}) -> tensor<i1>"
            )
        elif communicates:
            stays = carried[base]
        else:
            (stays,) = self._block(loop.condition, carried[fixed:])
        self._add(f"stablehlo.return {stays} : tensor<i1>")
        self._add("} do {")
        self._take(carried)
        around = self.counter
        self.counter = (carried[base], loop.trip_count) if loop.trip_count is not None else ("", 0)
        results = self._block(loop.body, carried[fixed:])
        self.counter = around
        more = []
        if counts:
            one = self._constant("1", counter)
            more.append(self._value(f"stablehlo.add {carried[base]}, {one} : {counter}"))
        elif communicates:
            more += self._block(loop.condition, results)
        self.loops -= 1
        last = ", ".join([*self._handed_on()[1], *more, *results])
        self._add(f"stablehlo.return {last} : {listed}")
        self._add("}")
        if self.ids is None:
            self.context, self.chain = outer, f"{name}#1"
        elif len(kinds) == 1:
            self.names[loop.outputs[0]] = name
            return
        self._results(loop.outputs, name, fixed, fixed)

    def _branch(self, branch: Branch) -> None:
        types = self.program.slot_types
        selector, is_pred = self.names[branch.selector], types[branch.selector].dtype == "pred"
        chained = [_CHAIN] if self.ids is None else []
        listed = ", ".join(map(_tensor, [*chained, *(types[s] for s in branch.outputs)]))
        name, chain = self._new(), self.chain
        count = len(chained) + len(branch.outputs)
        left = f"{name}:{count}" if count > 1 else name
        self._add(f'{left} = "stablehlo.{"if" if is_pred else "case"}"({selector}) ({{')
        for number, (block, slots) in enumerate(zip(branch.branches, branch.inputs, strict=True)):
            if number:
                self._add("}, {")
            self.chain = chain
            results = self._block(block, [self.names[s] for s in slots])
            if chained:
                results.insert(0, self.chain)
            self._add(f"stablehlo.return {', '.join(results)} : {listed}")
        chosen = _tensor(types[branch.selector])
        self._add(f"}}) : ({chosen}) -> ({listed})")
        if chained:
            self.chain = f"{name}#0" if count > 1 else name
        self._results(branch.outputs, name, len(chained), len(chained))


def _prefix(segment: int) -> str:
    return f"s{segment}_"


def _merged(
    text: str, segments: Sequence[Segment], numbers: Sequence[int], repeated: Collection[int]
) -> bytes:
    """The module of ``text`` with the functions of these segments, whose declarations it has.

    Of the ``repeated`` ones those that are small are one kernel each. For what runs once in a call a kernel
    less saves little, compiling a large one takes up to a second, and its last bits are others than XLA's.
    """
    with stablehlo.parsed(text) as module, module.context, ir.Location.unknown():
        for operation in list(module.body.operations):
            if "private" in str(operation.attributes.get("sym_visibility", "")):
                operation.operation.erase()
        small: dict[str, Any] = {}
        for number, segment in zip(numbers, segments, strict=True):
            part = stablehlo.parse(segment.module, module.context)
            if number in repeated and not segment.reproducible and one_kernel.prepare(part):
                small[f"{_prefix(number)}main"] = stablehlo.main(part)
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
        calls = [o for o in stablehlo.operations(module) if o.name == "func.call"] if small else []
        for call in calls:
            function = small.get(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)
            if function is not None:
                one_kernel.mark(call, function)
        return stablehlo.bytecode(module)
