"""Loops whose body is staged: each iteration runs parts of several iterations of the module's loop.

With stages 0 … S, iteration τ of the new loop, the *kernel*, runs stage s of the module's iteration τ - s.
(This is software pipelining; the code before and behind the loop is its prologue and epilogue.) Nodes of
iterations before the first or after the last do not exist: the first S iterations of the kernel are written
out before the loop, the last S behind it, each with the nodes that exist. So every node runs as often as in
the module, and each collective once in every iteration.

A value may be read j kernel iterations after it was made: one for each stage in between, and one for each
carry that it goes through. It lies in a *register* meanwhile, which is j carries of the new loop; each
iteration moves it from one to the next.

Invariants: the kernel's nodes stand in a topological order, the latest stage first and by position within a
stage. The module's loop and its body stay as they are. All copies of a node share its nested blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from ..edit import Editor
from ..graph import Instruction
from ..values import Barrier, BlockGraph, Node, NodeKind, Value, number
from .stages import MAIN, LoopBody, Stages

# A register: a carry of the module's loop or a value of its body, and its age in iterations of the kernel.
Register = tuple[int | Value, int]


@dataclass
class Skewed:
    """The replacement of a loop. ``nodes``: all new nodes in the block around it, with the new ``loop`` among
    them; ``results``: the values that replace the results of the module's loop.

    ``copies``: for each node of the module's body that has blocks, its copies in the block around the loop
    and in the kernel.
    """

    loop: Node
    nodes: list[Node]
    results: list[Value]
    copies: dict[Node, list[Node]]


def skew(loop: Node, loop_body: LoopBody, stages: Stages, trips: int) -> Skewed:
    """The loop with its body staged. ``trips`` iterations, more than there are stages to cross."""
    return _Skewer(loop, loop_body, stages, trips).skew()


def substitute(block: BlockGraph, at: Node, new: Skewed) -> None:
    """Put ``new`` in the place of a loop of this block."""
    editor = Editor(block)
    editor.put_behind(at, new.nodes)
    for old, result in zip(at.results, new.results, strict=True):
        editor.replace(old, result)
    editor.remove(at, instead=[node for node in new.nodes if node.is_runtime])
    editor.commit()


class _LogicalIds:
    """The nodes of a block that give the device's ids, one for each kind of id."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.ids: dict[str, Node] = {}

    def fixed(self, root: Value, node: Node) -> Value | None:
        """A constant or a device id as the block has it; None for other values."""
        if node.kind is NodeKind.CHEAP:
            return root
        return self._logical_id(node) if node.kind is NodeKind.LOGICAL_ID else None

    def _logical_id(self, node: Node) -> Value:
        opcode = node.instruction.opcode
        if opcode not in self.ids:
            copy = _like(node)
            self.ids[opcode] = copy
            self.nodes.insert(0, copy)
        return self.ids[opcode].results[0]


def _like(node: Node) -> Node:
    copy = Node(
        node.kind,
        node.instruction,
        node.position,
        collective=node.collective,
        reducer=node.reducer,
        blocks=node.blocks,
    )
    copy.results = [Value(v.type, copy, i) for i, v in enumerate(node.results)]
    return copy


class _Skewer:
    def __init__(self, loop: Node, loop_body: LoopBody, stages: Stages, trips: int) -> None:
        self.loop = loop
        self.body = loop_body.body
        self.loop_body = loop_body
        self.trips = trips
        self.first = stages.first
        self.span = stages.last - stages.first
        self.main = MAIN - self.first
        self.stage = {node: stages[node] - self.first for node in loop_body.nodes}
        self.by_stage = [
            [node for node in loop_body.nodes if self.stage[node] == s]
            for s in range(self.span, -1, -1)
        ]
        # Copies in the block around the loop, by iteration of the module's loop.
        self.around: dict[tuple[Value, int], Value] = {}
        self.copied: dict[tuple[Node, int], Node] = {}
        self.ended: dict[Register, Value] = {}  # registers as the kernel leaves them
        self.before: list[Node] = []
        self.ids = _LogicalIds(self.before)
        self.places: dict[int, _Around] = {}
        self.copies: dict[Node, list[Node]] = {}
        # The values that nodes of a stage read through a barrier.
        self.behind: dict[tuple[Barrier, int], set[Value]] = {}
        for node in loop_body.nodes:
            for value in node.operands:
                view: Value | None = value
                while view is not None and view.barrier is not None:
                    key = view.barrier, self.stage[node]
                    self.behind.setdefault(key, set()).add(value.root)
                    view = view.before_barrier

    def skew(self) -> Skewed:
        before, after = self.before, list[Node]()
        for step in range(self.span):
            self._peel(step, before)
        loop = self._kernel()
        for step in range(self.trips, self.trips + self.span):
            self._peel(step, after)
        results = [self._carry_at(k, self.trips) for k in range(len(self.body.parameters))]
        return Skewed(loop, [*before, loop, *after], results, self.copies)

    # The block around the loop.

    def _peel(self, step: int, into: list[Node]) -> None:
        """Write out iteration ``step`` of the kernel: the nodes whose iteration the module has."""
        for nodes in self.by_stage:
            for node in nodes:
                t = step - self.stage[node]
                if 0 <= t < self.trips:
                    copy = _like(node)
                    self.copied[node, t] = copy
                    if t not in self.places:
                        self.places[t] = _Around(self, t)
                    self._fill(copy, node, self.places[t], into)
                    if copy.is_runtime:
                        copy.order = tuple(dict.fromkeys((*self.loop.order, *copy.order)))
                    for mine, new in zip(node.results, copy.results, strict=True):
                        self.around[mine, t] = new

    def _fill(self, copy: Node, node: Node, place: _Around | _Kernel, into: list[Node]) -> None:
        place.stage = self.stage[node]
        copy.operands = [place.value(v) for v in node.operands]
        copy.order = place.order(node.order)
        if node.selector is not None:
            copy.selector = place.value(node.selector)
        if node.blocks:
            self.copies.setdefault(node, []).append(copy)
        into.append(copy)

    def value_at(self, root: Value, t: int) -> Value:
        """A value of the body as iteration ``t`` of the module made it, for the block around."""
        k = self.loop_body.number.get(root)
        if k is not None:
            return self._carry_at(k, t)
        node = root.node
        assert node is not None
        fixed = self.ids.fixed(root, node)
        if fixed is not None:
            return fixed
        found = self.around.get((root, t))
        if found is None:
            found = self.ended[root, self.trips - t - self.stage[node]]
        return found

    def _carry_at(self, k: int, t: int) -> Value:
        if t == 0 or self.loop_body.invariant(k):
            return self.loop.operands[k]
        made = t - 1 + self._source_stage(k)
        if self.span <= made < self.trips:
            return self.ended[k, self.trips - made]
        return self.value_at(self.body.results[k].root, t - 1)

    def _source_stage(self, k: int) -> int:
        """The stage in which a carry gets its next value: the main one if that is another carry's value."""
        source = self.loop_body.source[k]
        return self.stage[source] if isinstance(source, Node) else self.main

    # The loop.

    def _kernel(self) -> Node:
        kernel = _Kernel(self)
        nodes = kernel.ids.nodes
        for stage_nodes in self.by_stage:
            for node in stage_nodes:
                kernel.copied[node] = _like(node)
        for stage_nodes in self.by_stage:
            for node in stage_nodes:
                self._fill(kernel.copied[node], node, kernel, nodes)
        kernel.stage = self.main
        for k in range(len(self.body.parameters)):
            # The code behind the loop reads what the first stage made last, and carries that get the value of
            # another one.
            if self._source_stage(k) == 0 and not self.loop_body.invariant(k):
                kernel.register((k, 1))
            if isinstance(self.loop_body.source[k], int):
                kernel.newest(k)
        registers: list[Register] = []
        results: list[Value] = []
        while len(registers) < len(kernel.registers):  # looking one up may need another
            register = list(kernel.registers)[len(registers)]
            registers.append(register)
            results.append(kernel.next_of(register))
        initial = [self._initial(register) for register in registers]
        parameters = [kernel.registers[register] for register in registers]
        number(nodes)
        body = BlockGraph(parameters, nodes, results)
        loop = Node(
            NodeKind.LOOP,
            counted(self.loop.instruction, self.trips - self.span),
            self.loop.position,
            operands=initial,
            order=self.loop.order,
            blocks=(BlockGraph([], [], []), body),
        )
        loop.results = [Value(p.type, loop, i) for i, p in enumerate(parameters)]
        self.ended = dict(zip(registers, loop.results, strict=True))
        return loop

    def _initial(self, register: Register) -> Value:
        """What a register holds when the kernel begins, at step ``span``."""
        of, age = register
        if isinstance(of, int):
            if self.loop_body.invariant(of):
                return self.loop.operands[of]
            return self._carry_at(of, self.span - age - self._source_stage(of) + 1)
        assert of.node is not None
        return self.value_at(of, self.span - age - self.stage[of.node])


class _Place:
    """A block that gets copies of nodes: gives the values that a copy reads in the place of the original's.

    ``stage``: the stage of the node that is copied.
    """

    def __init__(self, skewer: _Skewer) -> None:
        self.skewer = skewer
        self.barriers: dict[tuple[Barrier, int], Barrier] = {}
        self.stage = 0

    def find(self, root: Value) -> Value:
        raise NotImplementedError

    def copy_of(self, node: Node) -> Node | None:
        raise NotImplementedError

    def value(self, old: Value) -> Value:
        if old.type is None:
            node = old.root.node
            copy = None if node is None else self.copy_of(node)
            return Value(None, copy, old.index, order=self.order(old.order))
        new = self.find(old.root)
        order = self.order(old.order)
        barrier = None if old.barrier is None else self.barrier(old.barrier)
        return new.view(order, barrier) if order or barrier is not None else new

    def barrier(self, old: Barrier) -> Barrier:
        """The copy of a barrier: over all its values if it is a fence, else over those read in this stage."""
        key = old, self.stage
        if key not in self.barriers:
            entering = old.operands
            if not old.is_fence:
                behind = self.skewer.behind.get(key, set())
                entering = tuple(v for v in entering if v.root in behind)
            self.barriers[key] = Barrier(tuple(self.value(v) for v in entering), old.is_fence)
        return self.barriers[key]

    def order(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        copies = (self.copy_of(node) for node in nodes)
        return tuple(dict.fromkeys(copy for copy in copies if copy is not None))


class _Around(_Place):
    """The block around the loop, for copies of nodes of iteration ``t``."""

    def __init__(self, skewer: _Skewer, t: int) -> None:
        super().__init__(skewer)
        self.t = t

    def find(self, root: Value) -> Value:
        return self.skewer.value_at(root, self.t)

    def copy_of(self, node: Node) -> Node | None:
        """None for a copy inside the loop, which has run before anything behind it."""
        return self.skewer.copied.get((node, self.t))


class _Kernel(_Place):
    """The new loop's body; ``stage`` is that of the node being copied."""

    def __init__(self, skewer: _Skewer) -> None:
        super().__init__(skewer)
        self.registers: dict[Register, Value] = {}
        self.copied: dict[Node, Node] = {}
        self.ids = _LogicalIds([])

    def find(self, root: Value) -> Value:
        skewer = self.skewer
        k = skewer.loop_body.number.get(root)
        if k is not None:
            if skewer.loop_body.invariant(k):
                return self.register((k, 1))
            age = self.stage + 1 - skewer._source_stage(k)
            return self.register((k, age)) if age else self.newest(k)
        node = root.node
        assert node is not None
        fixed = self.ids.fixed(root, node)
        if fixed is not None:
            return fixed
        age = self.stage - skewer.stage[node]
        return self.register((root, age)) if age else self._made(root)

    def copy_of(self, node: Node) -> Node | None:
        """None for a node of an earlier stage, which has run in an earlier iteration."""
        if node not in self.copied or self.skewer.stage[node] != self.stage:
            return None
        return self.copied[node]

    def register(self, register: Register) -> Value:
        of, age = register
        for younger in range(1, age):
            self._parameter((of, younger))
        return self._parameter(register)

    def _parameter(self, register: Register) -> Value:
        if register not in self.registers:
            of, _ = register
            like = self.skewer.body.parameters[of] if isinstance(of, int) else of
            self.registers[register] = Value(like.type)
        return self.registers[register]

    def next_of(self, register: Register) -> Value:
        """What a register holds in the next iteration."""
        of, age = register
        if isinstance(of, int) and self.skewer.loop_body.invariant(of):
            return self.registers[register]
        if age > 1:
            return self.registers[of, age - 1]
        return self.newest(of) if isinstance(of, int) else self._made(of)

    def newest(self, k: int) -> Value:
        """What this iteration makes of a carry."""
        source = self.skewer.loop_body.source[k]
        result = self.skewer.body.results[k].root
        if isinstance(source, Node):
            return self._made(result)
        stage, self.stage = self.stage, self.skewer.main
        found = self.find(result)
        self.stage = stage
        return found

    def _made(self, root: Value) -> Value:
        assert root.node is not None
        return self.copied[root.node].results[root.index]


def counted(instruction: Instruction, trips: int) -> Instruction:
    """A while instruction that is known to run so many iterations."""
    proto = type(instruction.proto)()
    proto.CopyFrom(instruction.proto)
    config = json.loads(proto.backend_config) if proto.backend_config.startswith(b"{") else {}
    config["known_trip_count"] = {"n": str(trips)}
    proto.backend_config = json.dumps(config).encode()
    made = Instruction(proto, instruction.computation)
    made.operands, made.called = instruction.operands, instruction.called
    made.control_predecessors = instruction.control_predecessors
    return made
