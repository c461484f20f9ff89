"""Heads within the loops: what the last stage does to a microbatch between its way there and its way back.

A loss may be computed by the scan itself, on the last stage, for the microbatch that leaves it. The backward
loop then begins each microbatch's way back in its body: with what the head of the forward body has kept. In
the one loop of a schedule this is done at once, when the last stage *turns* a microbatch: the written
computation of both bodies, for the numbers that their carries have in the iterations in which that microbatch
leaves and comes back. Nothing is kept for it. `found` proves that a turn needs nothing else: it walks from
what the layers begin with in the backward pass back to

- what the last stage gave for the same microbatch,
- what is there before the loops,
- numbers that are known, such as the iteration's, and values that are known to be zeros there.

Predicates are known, so the walk goes only through the branches that are taken. Sums of the head's gradients,
which get zeros in all other iterations, are added up by the turns too, in the written order. So are results
of the forward loop that are no larger than what a stage gives, losses above all, left by the turns for the
loop behind that puts them where they belong (`Turn.gives`); larger ones are computed again there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..builder import array_shape, tuple_shape
from ..graph import Instruction, leaf_count
from ..passes.valid.needs import selected
from ..passes.valid.trace import is_transfer
from ..values import Node, Value
from .chains import Execution, Followed
from .chunk import entry_of
from .constants import behind
from .emit import Builder, fenced, slice_of
from .gradients import adds_up
from .parts import Part
from .pieces import instructions_of
from .refusal import Refusal, about, depends_on_all
from .rewrite import shaped, without_sign_of_zero
from .rows import rounds

SCALAR = "s32"


@dataclass(frozen=True)
class Residual:
    """What a slice of a stack is, that the backward loop reads: ``value`` of the forward body, or, if that is
    None, ``begin`` of the entry computation."""

    value: Value | None
    begin: Instruction | None


@dataclass(eq=False)
class _Walk:
    """What values of one body need, in the iteration ``runs[k]`` of each microbatch k, a run on the last
    stage of each pipeline.

    By position in the loop's carry: ``held``, values of the entry computation that do not change; ``known``,
    numbers, s32[devices, microbatches]. What is read besides is zeros, or is not read. ``there``: the walk of
    the forward loop, for that of the backward loop. ``residuals``: slices of stacks that were made before;
    where a stack is of the entry computation, ``rows`` has their numbers, and ``pluses`` says whether zeros
    were added to them on their way.
    """

    followed: Followed
    part: Part
    runs: Sequence[Sequence[Execution]]
    there: _Walk | None = None
    depends: set[Instruction] = field(default_factory=set)
    held: dict[int, Instruction] = field(default_factory=dict)
    known: dict[int, np.ndarray] = field(default_factory=dict)
    residuals: dict[Instruction, Residual] = field(default_factory=dict)
    rows: dict[Instruction, np.ndarray] = field(default_factory=dict)
    pluses: dict[Instruction, np.ndarray] = field(default_factory=dict)
    finished: set[tuple[Value, Execution]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.origins = self.followed.origins[self.part.loop]
        self.block = self.part.loop.blocks[1]
        self.position = {p: n for n, p in enumerate(self.block.parameters)}
        self.flat = [(k, at) for k, runs in enumerate(self.runs) for at in runs]

    def needs(self, values: Iterable[Value]) -> None:
        """Walk from these values. Raises `Refusal`; then nothing is changed."""
        begin = [v.root for v in values]
        seen: set[tuple[Value, Execution]] = set()
        reads: dict[Value, list[tuple[int, Execution]]] = {}
        residuals: dict[Instruction, Residual] = {}
        rows: dict[Instruction, np.ndarray] = {}
        pluses: dict[Instruction, np.ndarray] = {}
        for k, at in self.flat:
            stack = [v for v in begin if (v, at) not in self.finished]
            seen |= {(v, at) for v in stack}
            while stack:
                value = stack.pop()
                node = value.node
                if node is None:
                    reads.setdefault(value, []).append((k, at))
                    continue
                residual = self._residual(node, k, at)
                if residual is not None:
                    own, row, plus = residual
                    if residuals.setdefault(node.instruction, own) != own:
                        raise _other(node)
                    if row is not None:
                        rows.setdefault(node.instruction, self._table())[at.device, k] = row
                    pluses.setdefault(node.instruction, self._table())[at.device, k] = plus
                    continue
                for operand in self._operands(value, node, at):
                    key = operand.root, at
                    if key not in seen and key not in self.finished:
                        seen.add(key)
                        stack.append(operand.root)
        held, known = self._classified(reads)
        wanted = [r.value for r in residuals.values() if r.value is not None]
        if wanted and self.there is not None:
            self.there.needs(wanted)
        self.held |= held
        self.known |= known
        self.residuals |= residuals
        self.rows |= rows
        self.pluses |= pluses
        self.finished |= seen

    def _operands(self, value: Value, node: Node, at: Execution) -> Sequence[Value]:
        opcode = node.instruction.opcode
        if node is self.part.stage:
            if self.there is None and value.index in self.part.layers.passed:
                return ()
            raise Refusal(
                "what a microbatch begins with in the backward pass depends on more than what the last stage "
                f"gave for it, by {node.instruction.describe()}"
            )
        if is_transfer(node):
            if self.origins.is_zero(value, at):
                return ()
            raise Refusal(
                "what a microbatch begins with in the backward pass depends on what another stage sent, at "
                f"{node.instruction.describe()}"
            )
        operands = self.selected(node, at)
        if opcode == "conditional":
            known = self.followed.forward.known(self.origins.iterations[at.iteration], operands[0])
            if known is not None:
                chosen = selected(known, len(node.instruction.called))
                branch = int(chosen[at.device if len(chosen) > 1 else 0])
                counts = [leaf_count(a.shape) for a in node.instruction.operands[1:]]
                first = 1 + sum(counts[:branch])
                return (operands[0], *operands[first : first + counts[branch]])
        return operands

    def selected(self, node: Node, at: Execution) -> Sequence[Value]:
        """The operands of a node, of a select with a known predicate those that it takes."""
        operands = node.operands
        if node.instruction.opcode != "select":
            return operands
        taken = self.origins.row(operands[0], at)
        return operands if taken is None else (operands[0], operands[1 if taken else 2])

    def _classified(
        self, reads: Mapping[Value, Sequence[tuple[int, Execution]]]
    ) -> tuple[dict[int, Instruction], dict[int, np.ndarray]]:
        held: dict[int, Instruction] = {}
        known: dict[int, np.ndarray] = {}
        for parameter, runs in reads.items():
            position = self.position[parameter]
            if self.block.results[position].root is parameter:
                init = self.part.loop.instruction.operands[0].operands[position]
                if init in self.depends:
                    raise depends_on_all(init)
                held[position] = init
                continue
            numbers: list[int | None] = [None]
            if parameter.type is not None and not parameter.type.shape:
                numbers = [self.origins.number(parameter, at) for _, at in runs]
            if all(n is not None and -(2**31) <= n < 2**31 for n in numbers):
                old = self.known.get(position)
                table = self._table() if old is None else old.copy()
                for (k, at), number in zip(runs, numbers, strict=True):
                    table[at.device, k] = number
                known[position] = table
            elif not all(self.origins.is_zero(parameter, at) for _, at in runs):
                raise Refusal(
                    "what a microbatch begins with in the backward pass depends on the iterations before it, "
                    f"by {parameter.type} at position {position} of the carry of the loop "
                    f"%{self.part.name}"
                )
        return held, known

    def _table(self) -> np.ndarray:
        return np.zeros((self.followed.forward.num_devices, len(self.runs)), np.int32)

    def _residual(
        self, node: Node, k: int, at: Execution
    ) -> tuple[Residual, int | None, bool] | None:
        """What a slice of a stack is that was made before, in the forward loop or ahead of it, the number of
        the row ahead of it, and whether zeros were added to it on its way; None for another node."""
        if self.there is None or node.instruction.opcode != "dynamic-slice":
            return None
        position = self.position.get(node.operands[0].root)
        inits = self.part.loop.instruction.operands[0].operands
        if (
            position is not None
            and self.block.results[position].root.node is None
            and inits[position] not in self.depends
        ):
            return None
        source = self.followed.of(self.part.loop, node.results[0], at)
        made = source.made
        if made.node is None:
            init = source.loop.instruction.operands[0].operands[made.leaf]
            if init in self.depends:
                raise depends_on_all(init)
            return Residual(None, init), made.slot, made.plus
        if source.loop is self.part.loop:
            if position is None:
                return None
            raise _other(node)
        if (
            made.slot is not None
            or source.loop is not self.there.part.loop
            or made.at not in self.there.runs[k]
            or made.at.device != at.device
            or made.node.instruction.computation is not self.there.part.loop.instruction.called[0]
        ):
            raise _other(node)
        return Residual(made.node.results[made.leaf], None), None, made.plus

    def env(
        self, b: Builder, k: Any, device: Any, held: Mapping[Instruction, Any], wanted: Sequence[Instruction],
        env: dict[Instruction, Any],
    ) -> dict[Instruction, Any]:  # fmt: skip
        """``env`` with all that ``wanted`` read of the carry, and of permutes."""
        body = self.part.loop.instruction.called[0]
        stage = self.part.stage.instruction
        cuts = {
            i for i in body.instructions
            if i.opcode in ("collective-permute", "partition-id")
            or body.parameters[0] in i.operands or stage in i.operands
        }  # fmt: skip
        inner = slice_of(wanted, {*cuts, *env})
        for cut in cuts & ({o for i in inner for o in i.operands} | set(wanted)) - set(env):
            if cut.opcode == "partition-id":
                env[cut] = device
                continue
            position = cut.proto.tuple_index if body.parameters[0] in cut.operands else None
            if position in self.held:
                env[cut] = held[self.held[position]]
            elif position in self.known:
                at = [b.convert(device, array_shape(SCALAR)), k]
                env[cut] = b.convert(b.lookup(self.known[position], at), cut.shape)
            else:
                env[cut] = b.zeros(cut.shape)
        return env


def _other(node: Node) -> Refusal:
    return Refusal(
        "what a microbatch begins with in the backward pass is neither, for each microbatch, one row of an "
        f"array that is computed before it, nor what the last stage has kept for it: see "
        f"{node.instruction.describe()}"
    )


@dataclass(eq=False)
class Turn:
    """``begins``: by position in the carry of the layers of the backward pass, what a microbatch begins with
    there, in the backward loop's body. ``sums``: by position in that loop's carry, what its sums get."""

    there: _Walk
    back: _Walk
    begins: dict[int, Instruction]
    sums: dict[int, Instruction]

    @property
    def held(self) -> list[Instruction]:
        """What it reads that is there before both loops."""
        begun = [r.begin for r in self.back.residuals.values() if r.begin is not None]
        return list(dict.fromkeys([*self.there.held.values(), *self.back.held.values(), *begun]))

    @property
    def rounds(self) -> bool:
        """Whether an engine may round a turn otherwise than the written loops: what stands in their bodies
        may be one kernel with what stands beside it there. What is in a branch of a conditional stands
        apart in both."""
        walked = {v.node for walk in (self.there, self.back) for v, _ in walk.finished}
        return rounds(n.instruction for n in walked if n is not None)

    def gives(self, needed: Iterable[int]) -> list[Value]:
        """Values of the forward body that turns leave for the loop behind, of which positions ``needed`` of
        the carry are wanted there: the largest parts of them that are no larger than what the last stage
        gives, and that are read for its microbatches alone."""
        walk = self.there
        part, block = walk.part, walk.block
        largest = sum(
            t.nbytes for i in part.layers.passed if (t := part.stage.results[i].type) is not None
        )
        wanted = [block.results[n].root for n in needed if block.results[n].root.node is not None]
        depends = self._depend_on_the_stage()
        found: dict[Value, None] = {}
        seen = set(wanted)
        stack = [v for v in wanted if v in depends]
        reached: dict[Execution, set[Value]] = {}
        while stack:
            value = stack.pop()
            node = value.node
            if node is None or node is part.stage or value not in depends or is_transfer(node):
                continue
            if (
                value.type is not None
                and value.type.nbytes <= largest
                and node.instruction.computation is part.loop.instruction.called[0]
                and self._is_read_by_turns_alone(value, wanted, reached)
            ):
                try:
                    with about(part.name):
                        walk.needs([value])
                except Refusal:
                    pass
                else:
                    found[value] = None
                    continue
            fresh = [o.root for o in node.operands if o.root not in seen]
            seen |= set(fresh)
            stack += fresh
        return list(found)

    def _depend_on_the_stage(self) -> set[Value]:
        part = self.there.part
        found = set(part.stage.results)
        for node in self.there.block.nodes:
            if not is_transfer(node) and any(o.root in found for o in node.operands):
                found |= set(node.results)
        return found - set(part.stage.results)

    def _is_read_by_turns_alone(
        self, value: Value, wanted: Sequence[Value], reached: dict[Execution, set[Value]]
    ) -> bool:
        """Whether a value is zeros, or not read, but where a microbatch leaves the last stage."""
        walk = self.there
        own = {at for _, at in walk.flat}
        for t in range(len(walk.origins.iterations)):
            for d in range(walk.followed.forward.num_devices):
                at = Execution(t, d)
                if at in own or walk.origins.is_zero(value, at):
                    continue
                if at not in reached:
                    reached[at] = self._reached(wanted, at)
                if value in reached[at]:
                    return False
        return True

    def _reached(self, wanted: Sequence[Value], at: Execution) -> set[Value]:
        walk = self.there
        stack = list(wanted)
        seen = set(stack)
        while stack:
            value = stack.pop()
            node = value.node
            if node is None or node is walk.part.stage or is_transfer(node):
                continue
            fresh = {o.root for o in walk.selected(node, at)} - seen
            seen |= fresh
            stack += fresh
        return seen

    def emit(
        self, b: Builder, k: Any, device: Any, ys: Mapping[int, Any], held: Mapping[Instruction, Any],
        gives: Sequence[Value],
    ) -> tuple[dict[int, Any], dict[int, Any], list[Any]]:  # fmt: skip
        """Add the turn of microbatch ``k``, of which the last stage gave ``ys``: what the backward pass
        begins with, what its sums get, and ``gives``.

        What is done there and back are two computations, since a compiler may make one operation of a product
        in the one and a sum in the other, which are rounded apart as the loops are written.
        """
        kept = [r.value for r in self.back.residuals.values() if r.value is not None]
        values = list(dict.fromkeys([*kept, *gives]))
        shapes = [instructions_of(v)[0].shape for v in values]
        arguments = [k, device, *ys.values(), *held.values()]
        inner = b.editor.computation("schedule.head")
        own = inner.elements(inner.parameter(tuple_shape([a.shape for a in arguments])))
        here = dict(zip(ys, own[2:], strict=False))
        before = dict(zip(held, own[2 + len(ys) :], strict=True))
        inner.finish(inner.tuple(self._there(inner, own[0], own[1], here, before, values)))
        made = dict(zip(values, fenced(b, inner, k, arguments, shapes), strict=True))
        wanted = [*self.begins.values(), *self.sums.values()]
        arguments = [k, device, *(made[v] for v in values), *held.values()]
        inner = b.editor.computation("schedule.gradient")
        own = inner.elements(inner.parameter(tuple_shape([a.shape for a in arguments])))
        given = dict(zip(values, own[2:], strict=False))
        before = dict(zip(held, own[2 + len(values) :], strict=True))
        inner.finish(inner.tuple(self._back(inner, own[0], own[1], given, before, wanted)))
        found = fenced(b, inner, k, arguments, [i.shape for i in wanted])
        begins = dict(zip(self.begins, found, strict=False))
        sums = dict(zip(self.sums, found[len(begins) :], strict=True))
        return begins, sums, [made[v] for v in gives]

    def _there(
        self, b: Builder, k: Any, device: Any, ys: Mapping[int, Any], held: Mapping[Instruction, Any],
        values: Sequence[Value],
    ) -> list[Any]:  # fmt: skip
        """Values of the forward body."""
        part = self.there.part
        stage = part.stage.instruction
        env: dict[Instruction, Any] = {
            i: ys[i.proto.tuple_index]
            for i in part.loop.instruction.called[0].instructions
            if stage in i.operands and i.proto.tuple_index in ys
        }
        wanted = [instructions_of(v)[0] for v in values]
        b.clone(wanted, self.there.env(b, k, device, held, wanted, env))
        return [env[i] for i in wanted]

    def _back(
        self, b: Builder, k: Any, device: Any, given: Mapping[Value, Any],
        held: Mapping[Instruction, Any], wanted: Sequence[Instruction],
    ) -> list[Any]:  # fmt: skip
        """Values of the backward body."""
        back: dict[Instruction, Any] = {}
        where = [b.convert(device, array_shape(SCALAR)), k]
        for read, residual in self.back.residuals.items():
            if residual.value is not None:
                part = given[residual.value]
            else:
                assert residual.begin is not None
                part = held[residual.begin]
                if read in self.back.rows:
                    part = entry_of(b, part, [b.lookup(self.back.rows[read], where)])
            part = shaped(b, part, read.shape)
            if self.back.pluses[read].any():
                plus = b.is_one(b.lookup(self.back.pluses[read], where))
                part = b.select(plus, without_sign_of_zero(b, part), part)
            back[read] = part
        b.clone(wanted, self.back.env(b, k, device, held, wanted, back))
        return [back[i] for i in wanted]


def found(
    followed: Followed, forward: Part, backward: Part, positions: Sequence[int],
    order: Sequence[int], depends: set[Instruction],
) -> Turn:  # fmt: skip
    """The turn of a step. ``positions``: those in the carry of the layers of the backward pass for which a
    microbatch begins within the loop. ``order``: for each microbatch of the backward pass, its number in the
    forward pass. ``depends``: what depends on the forward loop. Raises `Refusal`."""
    ways = [group[-1] for group in forward.groups]
    there_runs = [[Execution(forward.leaves[m], d) for d in ways] for m in order]
    back_runs = [[Execution(backward.enters[k], d) for d in ways] for k in range(len(order))]
    there = _Walk(followed, forward, there_runs)
    back = _Walk(followed, backward, back_runs, there, depends)
    given = backward.layers.loop.operands[0].operands
    back.needs([backward.stage.operands[i] for i in positions])
    sums: dict[int, Instruction] = {}
    body = backward.loop.instruction.called[0]
    taken = set(backward.sums.values())
    for carry, result in enumerate(backward.loop.blocks[1].results):
        node = result.root.node
        added = None if carry in taken else adds_up(backward, carry)
        if (
            added is None
            or node is None
            or node.instruction is not behind(body.root.operands[carry])
        ):
            continue
        if not _is_zero_but_at_turns(
            followed, backward, added, back
        ) or not followed.begins_with_zeros(backward.loop, carry, followed.forward.num_devices):
            continue
        try:
            back.needs([added])
        except Refusal:
            continue
        place = [o.root for o in node.operands].index(added.root)
        sums[carry] = node.instruction.operands[place]
    return Turn(there, back, {i: given[i] for i in positions}, sums)


def _is_zero_but_at_turns(followed: Followed, part: Part, added: Value, walk: _Walk) -> bool:
    """Whether a value is known to be zeros but where a microbatch turns."""
    own = {at for _, at in walk.flat}
    return all(
        Execution(t, d) in own or walk.origins.is_zero(added, Execution(t, d))
        for t in range(part.trips)
        for d in range(followed.forward.num_devices)
    )
