"""On which parameters the results of a called computation depend, leaf by leaf.

This is for calls, loops and conditionals without collectives, which stay whole inside a segment. For every
leaf of a result it gives the leaves of the parameters on which it may depend, through values or control flow.
"""

from __future__ import annotations

from ...graph import Computation, Instruction, leaf_count
from ...ops import op_of
from ...trips import annotated_trips

Leaves = list[frozenset[int]]  # for each leaf of a value: positions of parameter leaves


class Dependence:
    """Dependences in the computations of one module; each computation is analysed once."""

    def __init__(self) -> None:
        self._results: dict[Computation, Leaves] = {}
        self._controls: dict[Computation, frozenset[int]] = {}
        self._steering: dict[Instruction, frozenset[int]] = {}

    def of_call(self, instruction: Instruction) -> Leaves:
        """For each leaf of the instruction's result: its operand leaves that it depends on."""
        count = sum(leaf_count(o.shape) for o in instruction.operands)
        return self._apply(instruction, [frozenset({i}) for i in range(count)])

    def branch(self, computation: Computation) -> Leaves:
        """For each leaf of a computation's root: positions of its parameter leaves."""
        if computation not in self._results:
            self._results[computation] = self._computed(computation)
        return self._results[computation]

    def control(self, instruction: Instruction) -> frozenset[int]:
        """Operand leaves that decide how often loops inside run, if their text does not say it.

        These leaves are needed even if no result is: with other values a loop might never end.
        """
        if not instruction.called:
            return frozenset()
        if instruction not in self._steering:
            count = sum(leaf_count(o.shape) for o in instruction.operands)
            operands = [frozenset({i}) for i in range(count)]
            self._steering[instruction] = self._control(instruction, operands)
        return self._steering[instruction]

    def _inner_control(self, computation: Computation) -> frozenset[int]:
        """Parameter leaves that decide how often loops in a computation run."""
        if computation not in self._controls:
            self.branch(computation)
        return self._controls[computation]

    def _control(self, instruction: Instruction, operands: Leaves) -> frozenset[int]:
        opcode = instruction.opcode
        if opcode in ("call", "fusion"):
            return _union(operands, self._inner_control(instruction.called[0]))
        if opcode == "conditional":
            found, position = frozenset[int](), 1
            for argument, called in zip(instruction.operands[1:], instruction.called, strict=True):
                count = leaf_count(argument.shape)
                inner = self._inner_control(called)
                found |= _union(operands[position : position + count], inner)
                found |= operands[0] if inner else frozenset()
                position += count
            return found
        if opcode == "while":
            body, condition = instruction.called
            inner = self._inner_control(body) | self._inner_control(condition)
            if annotated_trips(instruction) is None:
                inner |= self.branch(condition)[0]
            return _union(self._loop(instruction, operands), inner) if inner else frozenset()
        return frozenset()

    def _computed(self, computation: Computation) -> Leaves:
        env: dict[Instruction, Leaves] = {}
        control = frozenset[int]()
        position = 0
        for parameter in computation.parameters:
            count = leaf_count(parameter.shape)
            env[parameter] = [frozenset({i}) for i in range(position, position + count)]
            position += count
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                continue
            if instruction.opcode == "get-tuple-element":
                (operand,) = instruction.operands
                parts = operand.shape.tuple_shapes
                index = instruction.proto.tuple_index
                first = sum(leaf_count(part) for part in parts[:index])
                env[instruction] = env[operand][first : first + leaf_count(parts[index])]
                continue
            operands = [leaf for o in instruction.operands for leaf in env[o]]
            env[instruction] = self._apply(instruction, operands)
            if instruction.called:
                control |= self._control(instruction, operands)
        self._controls[computation] = control
        return env[computation.root]

    def _apply(self, instruction: Instruction, operands: Leaves) -> Leaves:
        """Dependences of the leaves of an instruction's result. ``operands``: those of its operands'
        leaves."""
        opcode = instruction.opcode
        if op_of(opcode).hands_on:
            return operands
        if opcode in ("call", "fusion"):
            return _through(self.branch(instruction.called[0]), operands)
        if opcode == "while":
            return self._loop(instruction, operands)
        if opcode == "conditional":
            return self._conditional(instruction, operands)
        everything = frozenset().union(*operands)
        return [everything] * leaf_count(instruction.shape)

    def _loop(self, instruction: Instruction, operands: Leaves) -> Leaves:
        body, condition = instruction.called
        body_leaves, (stays,) = self.branch(body), self.branch(condition)
        carries = operands
        while True:
            control = frozenset().union(*(carries[i] for i in stays))
            again = _through(body_leaves, carries)
            grown = [c | a | control for c, a in zip(carries, again, strict=True)]
            # A carry that the body does not change does not depend on the number of iterations.
            for i, leaf in enumerate(body_leaves):
                if leaf == {i} and _handed_on(body, i):
                    grown[i] = carries[i]
            if grown == carries:
                return carries
            carries = grown

    def _conditional(self, instruction: Instruction, operands: Leaves) -> Leaves:
        selector, position = operands[0], 1
        results: Leaves = [selector] * leaf_count(instruction.shape)
        for argument, called in zip(instruction.operands[1:], instruction.called, strict=True):
            count = leaf_count(argument.shape)
            taken = _through(self.branch(called), operands[position : position + count])
            results = [r | t for r, t in zip(results, taken, strict=True)]
            position += count
        return results


def _through(leaves: Leaves, operands: Leaves) -> Leaves:
    return [frozenset().union(*(operands[i] for i in leaf)) for leaf in leaves]


def _union(leaves: Leaves, positions: frozenset[int]) -> frozenset[int]:
    return frozenset().union(*(leaves[i] for i in positions))


def _handed_on(body: Computation, index: int) -> bool:
    """Whether element ``index`` of a body's root is the same element of its only parameter."""
    if body.root.opcode != "tuple" or len(body.root.operands) <= index:
        return False
    part = body.root.operands[index]
    while part.opcode == "copy":
        (part,) = part.operands
    return (
        part.opcode == "get-tuple-element"
        and part.operands[0] is body.parameters[0]
        and part.proto.tuple_index == index
        and leaf_count(body.root.shape) == len(body.root.operands)
    )
