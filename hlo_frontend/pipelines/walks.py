"""Walks from a value of a written loop's body back to what it needs, in the iterations of all microbatches.

A value that a run computes anew, on a stage, for a microbatch, may need

- what its own stage gave for the same microbatch,
- what is there before the loops,
- numbers that are known, such as the iteration's, and values that are known to be zeros there.

Then it can be computed in another loop, with tables of these numbers by device and microbatch. Predicates are
known, so a walk goes only through the branches that are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..builder import array_shape, resized
from ..graph import Instruction, leaf_count
from ..passes.valid.needs import selected
from ..passes.valid.trace import is_transfer
from ..values import Node, Value
from .chains import Execution, Followed
from .chunk import entry_of
from .connected import members
from .emit import Builder, slice_of
from .parts import Part
from .pieces import instructions_of
from .refusal import Refusal, depends_on_all
from .rewrite import shaped, without_sign_of_zero
from .rounding import rounds
from .sameness import NEVER_SAME, Class, Sameness, draws

SCALAR = "s32"

Run = tuple[int, int, Execution]  # microbatch, device, and where a value is read


@dataclass(frozen=True)
class Residual:
    """What a slice of a stack is, that the backward loop reads: ``value`` of the forward body, or, if that is
    None, ``begin`` of the entry computation, or a row of it if ``is_row``."""

    value: Value | None
    begin: Instruction | None
    is_row: bool = False


@dataclass(eq=False)
class Walk:
    """What values of one body need for each microbatch k: ``runs[k]`` has, by device, where they are read.

    That may be on another device, of the same stages; then what is there before the loops must be the same
    on both, by ``sameness``. ``ends``: whether what a stage's layers give may be read.

    By position in the loop's carry: ``held``, values of the entry computation that do not change; ``known``,
    numbers, s32[devices, microbatches]. What is read besides is zeros, or is not read. ``there``: the walk of
    the forward loop, for that of the backward loop; ``depends``: what depends on that loop. ``residuals``:
    slices of stacks that were made before, all that one read gives, and ``choices`` which of them; where a
    stack is of the entry computation, ``rows`` has their numbers, and ``pluses`` says whether zeros were
    added to them on their way.
    """

    followed: Followed
    part: Part
    runs: Sequence[Mapping[int, Execution]]
    there: Walk | None = None
    depends: set[Instruction] = field(default_factory=set)
    sameness: Sameness | None = None
    ends: bool = True
    held: dict[int, Instruction] = field(default_factory=dict)
    known: dict[int, np.ndarray] = field(default_factory=dict)
    residuals: dict[Instruction, tuple[Residual, ...]] = field(default_factory=dict)
    choices: dict[Instruction, np.ndarray] = field(default_factory=dict)
    rows: dict[Instruction, np.ndarray] = field(default_factory=dict)
    pluses: dict[Instruction, np.ndarray] = field(default_factory=dict)
    finished: set[tuple[Value, Execution, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.origins = self.followed.origins[self.part.loop]
        self.block = self.part.loop.blocks[1]
        self.position = {p: n for n, p in enumerate(self.block.parameters)}
        self.flat = [(k, d, at) for k, runs in enumerate(self.runs) for d, at in runs.items()]
        self.crosses = any(d != at.device for _, d, at in self.flat)
        self.group = {d: n for n, own in enumerate(self.part.groups) for d in own}
        self.members = members(n for n in self.block.nodes if not is_transfer(n))

    def needs(self, values: Iterable[Value]) -> None:
        """Walk from these values. Raises `Refusal`; then nothing is changed."""
        begin = [v.root for v in values]
        seen: set[tuple[Value, Execution, int]] = set()
        reads: dict[Value, list[Run]] = {}
        residuals = dict(self.residuals)
        choices, rows, pluses = (
            {read: table.copy() for read, table in tables.items()}
            for tables in (self.choices, self.rows, self.pluses)
        )
        for k, first, begins in self.flat:
            todo = [(v, begins, first) for v in begin]
            stack = [key for key in todo if key not in seen and key not in self.finished]
            seen |= set(stack)
            while stack:
                value, at, device = stack.pop()
                node = value.node
                if node is None:
                    reads.setdefault(value, []).append((k, device, at))
                    continue
                residual = self._residual(node, k, device, at)
                if residual is not None:
                    own, row, plus = residual
                    read = node.instruction
                    found = residuals.setdefault(read, (own,))
                    if own not in found:
                        found = residuals[read] = *found, own
                    choices.setdefault(read, self._table())[device, k] = found.index(own)
                    if row is not None:
                        rows.setdefault(read, self._table())[device, k] = row
                    pluses.setdefault(read, self._table())[device, k] = plus
                    continue
                for operand in self._operands(value, node, at):
                    for other, there in self._together(node, k, device, at):
                        key = operand.root, there, other
                        if key not in seen and key not in self.finished:
                            seen.add(key)
                            stack.append(key)
        held, known = self._classified(reads)
        wanted = [r.value for own in residuals.values() for r in own if r.value is not None]
        if wanted and self.there is not None:
            self.there.needs(wanted)
        self.held |= held
        self.known |= known
        self.residuals, self.choices, self.rows, self.pluses = residuals, choices, rows, pluses
        self.finished |= seen

    def _together(
        self, node: Node, k: int, device: int, at: Execution
    ) -> Iterable[tuple[int, Execution]]:
        """The runs of a microbatch on whose operands what a node gives depends: all of those that it
        communicates with, which are of the same stage (see `connected`)."""
        if node not in self.members:
            return [(device, at)]
        own = self.members[node].get(device, {device})
        if not own <= self.runs[k].keys():
            raise Refusal(f"{node.instruction.describe()} is not of one stage")
        return [(d, self.runs[k][d]) for d in own]

    def _operands(self, value: Value, node: Node, at: Execution) -> Sequence[Value]:
        opcode = node.instruction.opcode
        if node is self.part.stage:
            if self.ends and self.there is None and value.index in self.part.layers.passed:
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
        if not self.ends and (opcode in NEVER_SAME or any(map(draws, node.instruction.called))):
            raise Refusal(f"{node.instruction.describe()} is no function of its operands alone")
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
        self, reads: Mapping[Value, Sequence[Run]]
    ) -> tuple[dict[int, Instruction], dict[int, np.ndarray]]:
        held: dict[int, Instruction] = {}
        known: dict[int, np.ndarray] = {}
        for parameter, runs in reads.items():
            position = self.position[parameter]
            numbers: list[int | None] = [None]
            if parameter.type is not None and parameter.type.size == 1:
                numbers = [self.origins.number(parameter, at) for _, _, at in runs]
            if self.block.results[position].root is parameter:
                init = self.part.loop.instruction.operands[0].operands[position]
                own = all(self.has(device, init, at.device) for _, device, at in runs)
                if own or None in numbers:
                    self._check_before(init, own)
                    held[position] = init
                    continue
            if all(n is not None and -(2**31) <= n < 2**31 for n in numbers):
                old = self.known.get(position)
                table = self._table() if old is None else old.copy()
                for (k, device, _), number in zip(runs, numbers, strict=True):
                    table[device, k] = number
                known[position] = table
            elif not all(self.origins.is_zero(parameter, at) for _, _, at in runs):
                raise Refusal(
                    "what a microbatch begins with in the backward pass depends on the iterations before it, "
                    f"by {parameter.type} at position {position} of the carry of the loop "
                    f"%{self.part.name}"
                )
        return held, known

    def _check_before(self, init: Instruction, own: bool) -> None:
        """Check that a value of the entry computation is there before the loops. ``own``: whether devices
        have what they read of it themselves."""
        if init in self.depends:
            raise depends_on_all(init)
        if not own:
            raise Refusal(f"{init.describe()} is of the stage's own")

    def has(self, device: int, init: Instruction, other: int) -> bool:
        """Whether a device has the same value of the entry computation as another one."""
        if device == other:
            return True
        if self.sameness is None or self.group.get(device, -1) != self.group.get(other):
            return False
        return self.sameness.of(init) is Class.SAME

    def _table(self) -> np.ndarray:
        return np.zeros((self.followed.forward.num_devices, len(self.runs)), np.int32)

    def _residual(
        self, node: Node, k: int, device: int, at: Execution
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
            self._check_before(init, self.has(device, init, made.at.device))
            return Residual(None, init, made.slot is not None), made.slot, made.plus
        if source.loop is self.part.loop:
            if position is None:
                return None
            raise _other(node)
        if (
            made.slot is not None
            or source.loop is not self.there.part.loop
            or made.at != self.there.runs[k].get(device)
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
                env[cut] = self._device(b, k, device)
                continue
            position = cut.proto.tuple_index if body.parameters[0] in cut.operands else None
            if position in self.held:
                env[cut] = held[self.held[position]]
            elif position in self.known:
                at = [b.convert(device, array_shape(SCALAR)), k]
                number = b.convert(b.lookup(self.known[position], at), resized(cut.shape, []))
                env[cut] = shaped(b, number, cut.shape)
            else:
                env[cut] = b.zeros(cut.shape)
        return env

    def _device(self, b: Builder, k: Any, device: Any) -> Any:
        """The device on which a run's value is read."""
        if not self.crosses:
            return device
        table = self._table()
        for microbatch, own, at in self.flat:
            table[own, microbatch] = at.device
        found = b.lookup(table, [b.convert(device, array_shape(SCALAR)), k])
        return b.convert(found, device.shape)

    @property
    def reads(self) -> list[Instruction]:
        """What it reads that is there before both loops, the walk of the forward loop too."""
        begun = [r.begin for own in self.residuals.values() for r in own if r.begin is not None]
        there = [] if self.there is None else self.there.reads
        return list(dict.fromkeys([*there, *self.held.values(), *begun]))

    @property
    def rounds(self) -> bool:
        """Whether an engine may round what it computes otherwise than the written loops."""
        walked = {v.node for v, _, _ in self.finished}
        there = self.there is not None and self.there.rounds
        return there or rounds(n.instruction for n in walked if n is not None)

    @property
    def kept(self) -> list[Value]:
        """Values of the forward body that it reads."""
        return [r.value for own in self.residuals.values() for r in own if r.value is not None]

    def emit(
        self, b: Builder, k: Any, device: Any, ys: Mapping[int, Any], given: Mapping[Value, Any],
        held: Mapping[Instruction, Any], wanted: Sequence[Instruction],
    ) -> list[Any]:  # fmt: skip
        """Add ``wanted`` of the body for microbatch ``k``. ``ys``: by position in the carry of the layers,
        what the stage gave; ``given``: `kept`; ``held``: `reads`."""
        stage = self.part.stage.instruction
        env: dict[Instruction, Any] = {
            i: ys[i.proto.tuple_index]
            for i in self.part.loop.instruction.called[0].instructions
            if stage in i.operands and i.proto.tuple_index in ys
        }
        where = [b.convert(device, array_shape(SCALAR)), k]
        for read, residuals in self.residuals.items():
            first, *others = (self._part(b, read, r, given, held, where) for r in residuals)
            part = first
            for n, other in enumerate(others, 1):
                is_other = b.lookup((self.choices[read] == n).astype(np.int32), where)
                part = b.select(b.is_one(is_other), other, part)
            if self.pluses[read].any():
                plus = b.is_one(b.lookup(self.pluses[read], where))
                part = b.select(plus, without_sign_of_zero(b, part), part)
            env[read] = part
        b.clone(wanted, self.env(b, k, device, held, wanted, env))
        return [env[i] for i in wanted]

    def _part(
        self, b: Builder, read: Instruction, residual: Residual, given: Mapping[Value, Any],
        held: Mapping[Instruction, Any], where: Sequence[Any],
    ) -> Any:  # fmt: skip
        """A slice that ``read`` gives."""
        if residual.value is not None:
            return shaped(b, given[residual.value], read.shape)
        assert residual.begin is not None
        part = held[residual.begin]
        if residual.is_row:
            part = entry_of(b, part, [b.lookup(self.rows[read], where)])
        return shaped(b, part, read.shape)

    def emit_all(
        self, b: Builder, k: Any, device: Any, held: Mapping[Instruction, Any],
        wanted: Sequence[Instruction],
    ) -> list[Any]:  # fmt: skip
        """The same, with what it reads of the forward body computed there too, where no stage is read."""
        given: dict[Value, Any] = {}
        if self.there is not None and self.kept:
            values = list(dict.fromkeys(self.kept))
            own = [instructions_of(v)[0] for v in values]
            given = dict(zip(values, self.there.emit_all(b, k, device, held, own), strict=True))
        return self.emit(b, k, device, {}, given, held, wanted)


def _other(node: Node) -> Refusal:
    return Refusal(
        "what a microbatch begins with in the backward pass is neither, for each microbatch, one row of an "
        f"array that is computed before it, nor what the last stage has kept for it: see "
        f"{node.instruction.describe()}"
    )
