"""What each instruction of a module without loops needs directly, to judge schedules by.

Follows data through tuples, calls, fusions and barriers, by rules of its own. Barriers are taken as data
goes: what leaves one in a place needs what entered in that place, since gathers of weights may pass the
barrier of a recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.hlo_frontend.graph import Computation, Instruction, Module

Tree = frozenset[str] | list["Tree"]  # what an array needs; a list for a tuple
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass
class Expansion:
    """``needs``: for each listed instruction, those it reads directly or through unlisted ones."""

    listed: set[str]
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    collectives: list[str] = field(default_factory=list)

    def computation(self, computation: Computation, arguments: Sequence[Tree]) -> Tree:
        values: dict[str, Tree] = {}
        for instruction in computation.instructions:
            values[instruction.name] = self._instruction(instruction, values, arguments)
        return values[computation.root.name]

    def _instruction(
        self, instruction: Instruction, values: dict[str, Tree], arguments: Sequence[Tree]
    ) -> Tree:
        operands = [values[o.name] for o in instruction.operands]
        match instruction.opcode:
            case "parameter":
                return arguments[instruction.proto.parameter_number]
            case "tuple":
                return operands
            case "get-tuple-element":
                (whole,) = operands
                assert isinstance(whole, list)
                return whole[instruction.proto.tuple_index]
            case "opt-barrier":
                (through,) = operands
                return through
            case "call" | "fusion" if instruction.name not in self.listed:
                return self.computation(instruction.called[0], operands)
        assert instruction.opcode != "while"
        before = frozenset().union(
            *map(leaves, operands),
            *(leaves(values[c.name]) for c in instruction.control_predecessors),
        )
        if instruction.opcode in COLLECTIVES:
            self.collectives.append(instruction.name)
        if instruction.name in self.listed:
            self.needs[instruction.name] = before
            before = frozenset([instruction.name])
        return _like(instruction.shape, before)


def _like(shape: Any, leaf: frozenset[str]) -> Tree:
    return [_like(part, leaf) for part in shape.tuple_shapes] if shape.tuple_shapes else leaf


def leaves(tree: Tree) -> frozenset[str]:
    if isinstance(tree, list):
        return frozenset().union(*map(leaves, tree))
    return tree


def names(step: Mapping[str, Any]) -> list[str]:
    return step["instructions"] if step["kind"] == "compute" else step["members"]


def check_schedule(module: Module, steps: Sequence[Mapping[str, Any]]) -> None:
    """Every collective runs once, and nothing runs before what it needs has ended."""
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in names(step):
            if step["kind"] != "wait":
                assert name not in began, f"{name} runs twice"
                began[name] = position
            if step["kind"] != "start":
                ended[name] = position
    expansion = Expansion(set(began))
    arguments = [
        _like(i.shape, frozenset()) for i in module.entry.instructions if i.opcode == "parameter"
    ]
    expansion.computation(module.entry, arguments)
    started = [name for step in steps if step["kind"] == "start" for name in names(step)]
    assert sorted(started) == sorted(expansion.collectives)
    assert set(expansion.needs) == set(began)
    for name, needs in expansion.needs.items():
        for needed in needs:
            together = began[needed] == began[name] == ended[name]
            assert together or ended[needed] < began[name], f"{name} is before {needed}"
