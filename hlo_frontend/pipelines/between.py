"""Prepares a step of training whose two loops are to be one, without a change to what it computes.

- Numbers that the forward loop counts beside its pipeline, as the labels that are not ignored, are divided by
  behind it, and the backward pass begins with that. What such a number needs of the loop's body, without the
  stage and what is received, becomes a loop of its own before it (`_counted`); so do arrays that it collects,
  as the masks of microbatches that went through the stages, of which a head behind it computes.
- A head behind the loop may stand under `lax.cond`, which runs it on the last stage alone, and so does its
  gradient. A conditional between the loops becomes selects (`_opened`), so that rows of what it gives can be
  followed. Which branch counts is known on each device; the other one's values are read by nobody there.

A number or a head that is computed apart from what stood beside it may be rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..builder import array_shape, tuple_shape
from ..graph import LOGICAL_IDS, Computation, Instruction, Module, all_instructions
from ..schema import TOKEN, TUPLE
from .emit import Builder, Editor, needed_by, slice_of
from .inline import inline
from .rounding import rounds
from .sameness import NEVER_SAME, draws
from .training import dependents


def prepared(module: Module, names: Sequence[str]) -> tuple[Module, str]:
    """The module with such numbers and conditionals out of the way of its loops of these names, and why an
    engine may round their values otherwise, or an empty string."""
    module, apart = _counted(module, names)
    module, heads = _opened(module, names)
    if heads:
        return module, "a head under lax.cond is computed apart"
    return module, "what the loop counts is computed apart" if apart else ""


def _loops(module: Module, names: Sequence[str]) -> tuple[Instruction, Instruction]:
    by_name = {i.name: i for i in module.entry.instructions}
    return by_name[names[0]], by_name[names[1]]


def _between(module: Module, names: Sequence[str]) -> set[Instruction]:
    """What the second loop needs of what depends on the first one."""
    first, second = _loops(module, names)
    depends = dependents(first)
    found = set(slice_of([second], set())) & depends
    return found - {second}


# Conditionals between the loops.


def _opened(module: Module, names: Sequence[str]) -> tuple[Module, bool]:
    apart = False
    while True:
        between = _between(module, names)
        found = next((i for i in module.entry.instructions if i in between and _opens(i)), None)
        if found is None:
            return module, apart
        apart = apart or any(rounds(all_instructions(c)) for c in found.called)
        editor = Editor(module)
        inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


def _opens(instruction: Instruction) -> bool:
    """Whether it is a conditional that only computes, of arrays, and without loops."""
    return instruction.opcode == "conditional" and _is_plain(instruction)


def _is_plain(instruction: Instruction) -> bool:
    shape = instruction.shape
    parts = list(shape.tuple_shapes) if shape.element_type == TUPLE else [shape]
    return all(p.element_type not in (TUPLE, TOKEN) for p in parts) and all(
        map(_computes, instruction.called)
    )


def _computes(computation: Computation) -> bool:
    if computation.has_side_effect or draws(computation):
        return False
    return not any(
        i.opcode == "while" or i.opcode in LOGICAL_IDS for i in all_instructions(computation)
    )


# Numbers that the forward loop counts.


def _counted(module: Module, names: Sequence[str]) -> tuple[Module, bool]:
    between = _between(module, names)
    first, _ = _loops(module, names)
    reads = [
        i for i in first.computation.instructions
        if i in between and i.opcode == "get-tuple-element" and i.operands[0] is first
        and (not i.shape.dimensions or _is_computed_with(i, between))
    ]  # fmt: skip
    if not reads or first.operands[0].opcode != "tuple":
        return module, False
    flat = _flat(module, names[0])
    beside = _Beside(_loops(flat, names)[0])
    reads = [r for r in reads if beside.has(r.proto.tuple_index)]
    if not reads:
        return module, False
    editor = Editor(module)
    builder = editor.replace(reads[0])
    builder.metadata = first.proto.metadata
    wanted = [r.proto.tuple_index for r in reads]
    numbers = beside.emit(builder, first, wanted)
    for read, number in zip(reads, numbers, strict=True):
        builder.go_on_to(read)
        builder.stand_in(number)
    return Module.parse(editor.finish()), rounds(beside.computing(wanted))


def _is_computed_with(value: Instruction, between: set[Instruction]) -> bool:
    """Whether more is done with a value between the loops than that it is handed to the second one."""
    moved = [value]
    for instruction in value.computation.instructions:
        if instruction in between and any(o in moved for o in needed_by(instruction)):
            if instruction.opcode not in (
                "bitcast",
                "copy",
                "get-tuple-element",
                "reshape",
                "tuple",
            ):
                return True
            moved.append(instruction)
    return False


def _flat(module: Module, name: str) -> Module:
    """The module, with conditionals in the body of this loop inlined that only compute."""
    while True:
        (loop,) = (i for i in module.entry.instructions if i.name == name)
        found = next((i for i in loop.called[0].instructions if _opens(i)), None)
        if found is None:
            return module
        editor = Editor(module)
        inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


class _Beside:
    """What a loop carries beside its pipeline. ``loop``: without conditionals in its body that could be
    inlined."""

    def __init__(self, loop: Instruction) -> None:
        self.loop = loop
        self.body, self.condition = loop.called
        self.results = self.body.root.operands if self.body.root.opcode == "tuple" else ()
        self.reads = self._reads(self.body)

    @staticmethod
    def _reads(computation: Computation) -> dict[Instruction, int]:
        (parameter,) = computation.parameters
        return {
            i: i.proto.tuple_index for i in computation.instructions
            if i.opcode == "get-tuple-element" and i.operands[0] is parameter
        }  # fmt: skip

    def has(self, position: int) -> bool:
        """Whether a carry, and how long the loop runs, depend on nothing that is sent, or a loop over
        layers."""
        return bool(self.results) and self._closure([position]) is not None

    def _closure(self, positions: Iterable[int]) -> list[int] | None:
        """The positions of the carry that these need, and the condition; None if one of them needs more."""
        if self.condition.needs_runtime or self.condition.has_side_effect:
            return None
        read = self._reads(self.condition)
        if any(
            self.condition.parameters[0] in i.operands and i not in read
            for i in self.condition.instructions
        ):
            return None
        stack = [*positions, *read.values()]
        found: set[int] = set()
        while stack:
            n = stack.pop()
            if n in found:
                continue
            found.add(n)
            inner = slice_of([self.results[n]], set(self.reads))
            if any(not self._is_plain(i) for i in inner):
                return None
            used = {o for i in inner for o in needed_by(i)} | {self.results[n]}
            stack += [p for r, p in self.reads.items() if r in used]
        return sorted(found)

    def _is_plain(self, instruction: Instruction) -> bool:
        if instruction.opcode == "partition-id":
            return True
        if instruction.opcode in NEVER_SAME | LOGICAL_IDS.keys() | {"parameter", "while"}:
            return False
        return not instruction.has_side_effect and all(map(_computes, instruction.called))

    def computing(self, positions: Sequence[int]) -> list[Instruction]:
        """The instructions that compute these carries."""
        closed = self._closure(positions)
        assert closed is not None
        return slice_of([self.results[n] for n in closed], set(self.reads))

    def emit(self, b: Builder, written: Instruction, positions: Sequence[int]) -> list[Any]:
        """Add a loop that makes these carries alone, to the entry computation. ``written``: the same loop
        there."""
        closed = self._closure(positions)
        assert closed is not None
        whole = self.loop.shape.tuple_shapes
        ids = [i for i in self.computing(positions) if i.opcode == "partition-id"]
        init = [written.operands[0].operands[n].proto for n in closed]
        if ids:
            init.append(b.add("partition-id", array_shape("u32")))
        carried = tuple_shape([v.shape for v in init])
        inner = b.editor.computation("schedule.counts")
        parts = inner.elements(inner.parameter(carried))
        own = dict(zip(closed, parts, strict=False))
        env: dict[Instruction, Any] = {r: own[n] for r, n in self.reads.items() if n in own}
        env |= dict.fromkeys(ids, parts[-1])
        results = [self.results[n] for n in closed]
        inner.clone(results, env)
        inner.finish(inner.tuple([*(env[r] for r in results), *(parts[-1:] if ids else [])]))
        condition = b.editor.computation("schedule.counts_on")
        parts = condition.elements(condition.parameter(carried))
        own = dict(zip(closed, parts, strict=False))
        env = {r: own[n] for r, n in self._reads(self.condition).items()}
        condition.clone([self.condition.root], env)
        condition.finish(env[self.condition.root])
        assert all(own[n].shape == whole[n] for n in positions)
        made = b.add(
            "while", carried, [b.tuple(init)], called_computation_ids=[inner.id, condition.id],
            backend_config=written.proto.backend_config,
        )  # fmt: skip
        return [b.element(made, closed.index(n)) for n in positions]
