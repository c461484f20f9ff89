"""A module written out: every instruction once for each time it runs, and what it needs directly.

Follows data through tuples, calls, fusions and loops, by rules of its own, to judge schedules by. How
often a loop runs is taken from the schedule, which lists an instruction of its body with every iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.hlo_frontend.graph import Computation, Instruction, Module

Instance = tuple[str, tuple[int, ...]]  # name, iterations of the loops around it
Tree = frozenset[Instance] | list["Tree"]  # what an array needs; a list for a tuple
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass
class Expansion:
    """``needs``: for each listed instance, those it reads directly or through unlisted ones."""

    listed: set[Instance]
    trips: Mapping[str, int]  # of loops, by a name in their body
    needs: dict[Instance, frozenset[Instance]] = field(default_factory=dict)
    collectives: list[Instance] = field(default_factory=list)

    def computation(
        self, computation: Computation, arguments: Sequence[Tree], at: tuple[int, ...]
    ) -> Tree:
        values: dict[str, Tree] = {}
        for instruction in computation.instructions:
            values[instruction.name] = self._instruction(instruction, values, arguments, at)
        return values[computation.root.name]

    def _instruction(
        self,
        instruction: Instruction,
        values: dict[str, Tree],
        arguments: Sequence[Tree],
        at: tuple[int, ...],
    ) -> Tree:
        operands = [values[o.name] for o in instruction.operands]
        here = instruction.name, at
        match instruction.opcode:
            case "parameter":
                return arguments[instruction.proto.parameter_number]
            case "tuple":
                return operands
            case "get-tuple-element":
                (whole,) = operands
                assert isinstance(whole, list)
                return whole[instruction.proto.tuple_index]
            case "call" | "fusion" if here not in self.listed:
                return self.computation(instruction.called[0], operands, at)
            case "while" if here not in self.listed:
                # proto order: the body, then the condition
                bodies = [c for c in instruction.called if c.root.opcode != "compare"]
                (body,) = [c for c in bodies if c.root.shape.tuple_shapes]
                (carried,) = operands
                trips = max(self.trips.get(i.name, 0) for i in _all_of(body))
                for step in range(trips):
                    carried = self.computation(body, [carried], (*at, step))
                return carried
        before = frozenset().union(
            *map(leaves, operands),
            *(leaves(values[c.name]) for c in instruction.control_predecessors),
        )
        if instruction.opcode in COLLECTIVES:
            self.collectives.append(here)
        if here in self.listed:
            self.needs[here] = before
            before = frozenset([here])
        return _like(instruction.shape, before)


def _all_of(computation: Computation) -> list[Instruction]:
    found = list(computation.instructions)
    for instruction in computation.instructions:
        if instruction.opcode in ("call", "fusion"):
            found += _all_of(instruction.called[0])
    return found


def _like(shape: Any, leaf: frozenset[Instance]) -> Tree:
    return [_like(part, leaf) for part in shape.tuple_shapes] if shape.tuple_shapes else leaf


def leaves(tree: Tree) -> frozenset[Instance]:
    if isinstance(tree, list):
        return frozenset().union(*map(leaves, tree))
    return tree


def instances(step: Mapping[str, Any]) -> list[Instance]:
    names = step["instructions"] if step["kind"] == "compute" else step["members"]
    return [(n, tuple(i)) for n, i in zip(names, step["iterations"], strict=True)]


def check_schedule(module: Module, steps: Sequence[Mapping[str, Any]]) -> None:
    """Every collective runs once each time it should, and nothing runs before what it needs has ended."""
    began: dict[Instance, int] = {}
    ended: dict[Instance, int] = {}
    for position, step in enumerate(steps):
        for instance in instances(step):
            if step["kind"] != "wait":
                assert instance not in began, f"{instance} runs twice"
                began[instance] = position
            if step["kind"] != "start":
                ended[instance] = position
    trips: Counter[str] = Counter()
    for name, at in began:
        if at:
            trips[name] = max(trips[name], at[-1] + 1)
    expansion = Expansion(set(began), trips)
    arguments = [
        _like(i.shape, frozenset()) for i in module.entry.instructions if i.opcode == "parameter"
    ]
    expansion.computation(module.entry, arguments, ())
    started = [i for step in steps if step["kind"] == "start" for i in instances(step)]
    assert sorted(started) == sorted(expansion.collectives)
    assert set(expansion.needs) == set(began)
    for instance, needs in expansion.needs.items():
        for needed in needs:
            together = began[needed] == began[instance] == ended[instance]
            assert together or ended[needed] < began[instance], f"{instance} is before {needed}"
