"""Block plans to a `Program`: slots, starts and waits, ownership, donation, copies and frees.

Ownership. A block *owns* an array if no other slot, device or caller can see its memory. It owns outputs of
segments that all devices run, copies, and donated inputs of the program. It does not own results of
collectives (communicators may give one array to several devices), nor values that occur twice in its result.
Only owned arrays are donated, and only if no other value that may be the same array is still in use: the
result of a loop with no iterations, or of a body or branch that returns a parameter unchanged, is the array
that it was given. If a result of the program would thereby be an array that the caller keeps, or the same as
another result, it is copied. Whether a loop owns a carry follows from its body: the body must own the carry's
next value. A body that donates a carry needs its initial value owned, which is copied if it is not. No copy
is made in every iteration.

A `Wait` stands at the `Await` in the block's order, or else right before the first use of the start's
results. For starts that cross into the next iteration, that is in the next iteration. The wait for a send
stands at the end of the block, since a peer may have to post its own send first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stretto.collectives.ops import Collective
from stretto.collectives.types import TensorType
from stretto.runtime.program import (
    Block,
    Branch,
    Carried,
    Copy,
    Free,
    Instruction,
    LogicalId,
    Loop,
    Program,
    Run,
    Slot,
    Start,
    Wait,
    instructions,
    with_blocks,
)

from .aliases import find_aliases
from .carve import AwaitStep, BlockPlan, RuntimeStep, SegmentPlan
from .graph import LOGICAL_IDS, Computation
from .likeness import Likeness
from .offsets import share
from .passes.rotate import STREAMS
from .reproducible import marked
from .segments import SegmentPool
from .streams import Streams
from .trips import trip_count
from .values import Node, NodeKind, Value


def lower(
    plan: BlockPlan,
    name: str,
    num_replicas: int,
    num_partitions: int,
    donated: Sequence[int] = (),
    *,
    streams: bool = False,
    homes: dict[SegmentPlan, int] | None = None,
) -> Program:
    """The program of an entry block. ``donated``: positions of parameters that the caller gives up.

    ``streams``: whether collectives run on several streams (see `streams`), instead of on one. ``homes``: set
    to the number of the program's segment for each segment plan. Segments that differ only in offsets get
    these as inputs (see `offsets`).
    """
    likeness = Likeness()
    share(plan, likeness)
    owned = {plan.parameters[i] for i in donated}
    state = _State(Streams() if streams else None)
    emitted = _emit(state, plan, owned, is_entry=True)
    pool = SegmentPool(likeness)
    finisher = _Finisher(state, pool, {} if homes is None else homes)
    body = finisher.block(emitted.block)
    program = Program(
        name=name,
        num_replicas=num_replicas,
        num_partitions=num_partitions,
        slot_types=tuple(state.slot_types),
        segments=tuple(pool.segments),
        collectives=tuple(finisher.collectives),
        body=body,
        donated=tuple(sorted(donated)),
        num_streams=1 + max(_streams(body)),
    )
    return marked(program)


def _streams(body: Block) -> set[int]:
    return {0} | {i.stream for i in instructions(body) if isinstance(i, Start)}


@dataclass
class _State:
    """State that all blocks of a program share. Lists grow, and are cut back when an attempt is given up.

    ``ownable``: the carries that each body of a loop owns. A body may be emitted several times, for different
    sets of owned carries; loops inside it use the set that was found the first time.
    """

    streams: Streams | None = None
    slot_types: list[TensorType] = field(default_factory=list)
    runs: list[tuple[SegmentPlan, dict[int, int]]] = field(default_factory=list)
    starts: list[Node] = field(default_factory=list)
    events: int = 0
    ownable: dict[BlockPlan, set[int]] = field(default_factory=dict)

    def slot(self, value: Value) -> Slot:
        assert value.type is not None
        self.slot_types.append(value.type)
        return len(self.slot_types) - 1

    def mark(self) -> tuple[int, int, int]:
        return len(self.slot_types), len(self.runs), len(self.starts)

    def cut(self, mark: tuple[int, int, int]) -> None:
        del self.slot_types[mark[0] :]
        del self.runs[mark[1] :]
        del self.starts[mark[2] :]


@dataclass
class _Emitted:
    """A block, with the parameters that it overwrites, and whether it owns its results.

    ``consumed``: parameters whose memory is overwritten. ``result_sources``: for each result, the owned
    parameters that it may be, unchanged; ``passed``: the positions of all parameters that it may be.
    """

    block: Block
    consumed: set[Value]
    owned_results: list[bool]
    result_sources: list[set[Value]]
    passed: list[set[int]]
    carried: tuple[Carried, ...] = ()


_NEVER = 1 << 60
_EMPTY = Block((), (), ())


class _Emitter:
    """Emits one block. `Run` and `Start` carry indexes into the state's lists until `_Finisher`."""

    def __init__(self, state: _State, plan: BlockPlan, owned: Iterable[Value], is_entry: bool):
        self.state = state
        self.plan = plan
        self.is_entry = is_entry
        self.owned = set(owned)
        self.parameters = set(plan.parameters)
        self.consumed: set[Value] = set()
        self.out: list[Instruction] = []
        self.slots: dict[Value, Slot] = {}
        self.pending: dict[Value, int] = {}  # value -> event of its start
        self.events: dict[int, Node] = {}  # events not waited for -> their starts' nodes
        self.reading: dict[Value, set[int]] = {}  # value -> events whose starts read it
        self.crossing: dict[Node, int] = {}  # starts awaited in the next iteration -> their events
        self.arriving: dict[int, list[Value]] = {}  # event -> parameters that its wait will give
        self.held: set[Value] = set()  # values that starts still read in the next iteration
        self.dead: set[Value] = set()  # values to be freed once nothing reads them any more
        self.derived: dict[Value, set[Value]] = {}  # loop result -> parameters it may be
        self.same: dict[Value, set[Value]] = {}  # value -> others that may be the same array
        self.last_use: dict[Value, int] = {}
        for index, step in enumerate(plan.steps):
            for value in step.inputs:
                self.last_use[value] = index
        for value in plan.results:
            self.last_use[value] = _NEVER

    def emit(self) -> _Emitted:
        plan = self.plan
        for parameter in plan.parameters:
            self.slots[parameter] = self.state.slot(parameter)
        parameters = tuple(self.slots[p] for p in plan.parameters)
        for node, carries in plan.crossing.items():
            self.cross(node, carries)
        arriving = set(self.pending)
        if not self.is_entry:
            unused = [p for p in plan.parameters if p not in self.last_use]
            self.free([p for p in unused if p not in arriving])
        for index, step in enumerate(plan.steps):
            if isinstance(step, SegmentPlan):
                self.segment(index, step)
            elif isinstance(step, AwaitStep):
                self.await_(self.arriving.get(self.crossing.get(step.node, -1), step.node.results))
            else:
                _EMIT[step.node.kind](self, index, step)
        return self.finish(parameters)

    # Registers.

    def define(self, value: Value, *, owned: bool) -> Slot:
        slot = self.state.slot(value)
        self.slots[value] = slot
        if owned:
            self.owned.add(value)
        return slot

    def await_(self, values: Iterable[Value]) -> None:
        for value in values:
            if value in self.pending:
                self.wait(self.pending[value])

    def cross(self, node: Node, carries: Iterable[tuple[int, int]]) -> None:
        """Await this node's start in the next iteration, and that of the last iteration in this one."""
        event = self.crossing[node] = self.state.events
        self.state.events += 1
        self.arriving[event] = [self.plan.parameters[k] for _, k in carries]
        for parameter in self.arriving[event]:
            self.pending[parameter] = event

    def wait(self, event: int) -> None:
        self.out.append(Wait(event))
        if event in self.arriving:
            parameters = self.arriving.pop(event)
            for value in parameters:
                del self.pending[value]
            self.free([v for v in parameters if v not in self.last_use])
            return
        node = self.events.pop(event)
        for value in node.results:
            del self.pending[value]
        released: list[Value] = [v for v in node.results if v not in self.last_use]
        for value, events in list(self.reading.items()):
            events.discard(event)
            if not events:
                del self.reading[value]
                if value in self.dead:
                    released.append(value)
        self.free(released)

    def free(self, values: Iterable[Value]) -> None:
        """Free values after their last use; if a start still reads one, its wait does so."""
        now: list[Slot] = []
        for value in values:
            if self.is_entry and value in self.parameters and value not in self.owned:
                continue  # the caller keeps them anyway
            if value in self.reading:
                self.dead.add(value)
            else:
                now.append(self.slots[value])
        if now:
            self.out.append(Free(tuple(now)))

    def dying(self, index: int, values: Iterable[Value]) -> list[Value]:
        return [v for v in dict.fromkeys(values) if self.last_use[v] == index]

    def consume(self, value: Value) -> None:
        """A step overwrites ``value``."""
        if value in self.parameters:
            self.consumed.add(value)
        self.consumed |= self.derived.get(value, set())

    def exclusive(self, value: Value, index: int) -> bool:
        """Whether no other value that may be the same array is used at this step or a later one."""
        return not any(
            self.last_use.get(other, -1) >= index or other in self.held or other in self.reading
            for other in self.same.get(value, ())
        )

    def hand_through(self, results: Sequence[Value], given: Sequence[set[Value]]) -> None:
        """Note that each result may be the same array as one of the given values."""
        behind = [set().union(values, *(self.same.get(v, ()) for v in values)) for values in given]
        for i, result in enumerate(results):
            others = set(behind[i])
            for j, other in enumerate(results):
                unique = result in self.owned and other in self.owned
                if i != j and not unique and behind[i] & behind[j]:
                    others.add(other)
            for other in others:
                self.same.setdefault(result, set()).add(other)
                self.same.setdefault(other, set()).add(result)

    # Steps.

    def segment(self, index: int, plan: SegmentPlan) -> None:
        self.await_(plan.inputs)
        dying = self.dying(index, plan.inputs)
        busy = self.held.union(self.reading)
        may = [v for v in dying if v in self.owned and v not in busy and self.exclusive(v, index)]
        aliases = find_aliases(plan, may, self.parameters if self.is_entry else ())
        given = {plan.inputs[i] for i in aliases}
        for value in given:
            self.consume(value)
        inputs = tuple(self.slots[v] for v in plan.inputs)
        donated = tuple(inputs[i] for i in sorted(aliases))
        # On devices that skip the segment, its outputs are arrays that others have too.
        outputs = tuple(self.define(v, owned=not plan.valid) for v in plan.outputs)
        self.state.runs.append((plan, aliases))
        self.out.append(Run(len(self.state.runs) - 1, inputs, outputs, donated, plan.valid))
        self.free([v for v in dying if v not in given])

    def logical_id(self, index: int, step: RuntimeStep) -> None:
        (value,) = step.node.results
        if value in self.last_use:
            slot = self.define(value, owned=False)
            self.out.append(LogicalId(LOGICAL_IDS[step.node.instruction.opcode], slot))

    def collective(self, index: int, step: RuntimeStep) -> None:
        node = step.node
        self.await_(step.inputs)
        if node in self.crossing:
            self.start_crossing(index, step)
            return
        event = self.state.events
        self.state.events += 1
        inputs = tuple(self.slots[v] for v in step.inputs)
        outputs = tuple(self.define(v, owned=False) for v in node.results)
        self.state.starts.append(node)
        self.out.append(Start(len(self.state.starts) - 1, inputs, outputs, event))
        self.events[event] = node
        for value in node.results:
            self.pending[value] = event
        for value in step.inputs:
            self.reading.setdefault(value, set()).add(event)
        self.free(self.dying(index, step.inputs))

    def start_crossing(self, index: int, step: RuntimeStep) -> None:
        node, event = step.node, self.crossing[step.node]
        if event in self.arriving:  # nobody reads it, but it must end before it starts again
            self.wait(event)
        inputs = tuple(self.slots[v] for v in step.inputs)
        outputs = tuple(self.define(v, owned=False) for v in node.results)
        stream = 0
        if self.plan.pipelined:
            stream = 1 + list(self.crossing).index(node) % STREAMS
        self.state.starts.append(node)
        self.out.append(Start(len(self.state.starts) - 1, inputs, outputs, event, stream))
        self.held.update(step.inputs)
        self.free(self.dying(index, step.inputs))

    def loop(self, index: int, step: RuntimeStep) -> None:
        node = step.node
        self.await_(step.inputs)
        condition_plan, body_plan = self.plan.blocks[node]
        count = trip_count(node)
        # With a known trip count nobody evaluates the condition.
        condition = _EMPTY if count is not None else _emit(self.state, condition_plan, ()).block
        body, ownable, consumed = _loop_body(self.state, body_plan)
        dying = set(self.dying(index, step.inputs))
        uses = Counter(step.inputs)
        taken: set[Value] = set()
        inputs: list[Slot] = []
        donated: list[Slot] = []
        init_owned: list[bool] = []
        copied: set[int] = set()
        for i, value in enumerate(step.inputs):
            slot = self.slots[value]
            mine = value in self.owned and value in dying and uses[value] == 1
            mine = mine and value not in self.reading and value not in self.held
            mine = mine and self.exclusive(value, index)
            # If this loop consumes a carry of the loop around it, that loop must own the carry.
            if mine and (i in consumed or not self._parameters_behind([value])):
                donated.append(slot)
                taken.add(value)
                self.consume(value)
            elif i in consumed:
                copy = self.state.slot(value)
                self.out.append(Copy(slot, copy))
                slot = copy
                donated.append(copy)
                copied.add(i)
            inputs.append(slot)
            init_owned.append(mine or i in consumed)
        outputs = []
        sources = _handed(body.passed, at_least_once=bool(count))
        for i, result in enumerate(node.results):
            owned = i in ownable and all(init_owned[j] for j in {i, *sources[i]})
            outputs.append(self.define(result, owned=owned))
            if owned and i not in consumed:
                # The body may return the initial value: overwriting the result overwrites that.
                self.derived[result] = self._parameters_behind(step.inputs)
        given = [{step.inputs[j] for j in found - copied} for found in sources]
        self.hand_through(node.results, given)
        self.out.append(
            Loop(
                tuple(inputs),
                tuple(outputs),
                condition,
                body.block,
                trip_count=count,
                donated=tuple(donated),
                name=node.instruction.name,
                source=node.instruction.source,
                carried=body.carried,
            )
        )
        self.free([v for v in self.dying(index, step.inputs) if v not in taken])
        self.free([v for v in node.results if v not in self.last_use])

    def _parameters_behind(self, values: Iterable[Value]) -> set[Value]:
        behind: set[Value] = set()
        for value in values:
            if value in self.parameters:
                behind.add(value)
            behind |= self.derived.get(value, set())
        return behind

    def branch(self, index: int, step: RuntimeStep) -> None:
        node = step.node
        self.await_(step.inputs)
        plans = self.plan.blocks[node]
        selector, *rest = step.inputs
        groups: list[tuple[Slot, ...]] = []
        operands: list[Sequence[Value]] = []
        for plan in plans:
            count = len(plan.parameters)
            operands.append(rest[:count])
            groups.append(tuple(self.slots[v] for v in rest[:count]))
            rest = rest[count:]
        emitted = [_emit(self.state, plan, ()) for plan in plans]
        outputs = tuple(
            self.define(v, owned=all(e.owned_results[i] for e in emitted))
            for i, v in enumerate(node.results)
        )
        given = [
            {own[j] for own, e in zip(operands, emitted, strict=True) for j in e.passed[i]}
            for i in range(len(node.results))
        ]
        self.hand_through(node.results, given)
        self.out.append(
            Branch(
                self.slots[selector],
                tuple(groups),
                outputs,
                tuple(e.block for e in emitted),
                name=node.instruction.name,
                source=node.instruction.source,
            )
        )
        self.free(self.dying(index, step.inputs))
        self.free([v for v in node.results if v not in self.last_use])

    def finish(self, parameters: tuple[Slot, ...]) -> _Emitted:
        self.await_(self.plan.results)
        for event in sorted(self.arriving):
            self.wait(event)
        for event in sorted(self.events):
            self.wait(event)
        uses = Counter(self.plan.results)
        results: list[Slot] = []
        given: set[Value] = set()
        for value in self.plan.results:
            slot = self.slots[value]
            may_be = {value, *self.same.get(value, ())}
            lent = any(v in self.parameters and v not in self.owned for v in may_be)
            if self.is_entry and (lent or may_be & given):
                copy = self.state.slot(value)
                self.out.append(Copy(slot, copy))
                slot = copy
            else:
                given.add(value)
            results.append(slot)
        owned = [
            value in self.owned
            and uses[value] == 1
            and value not in self.held
            and self.exclusive(value, _NEVER)
            for value in self.plan.results
        ]
        passed = [
            {
                k
                for k, parameter in enumerate(self.plan.parameters)
                if parameter is value or parameter in self.same.get(value, ())
            }
            for value in self.plan.results
        ]
        sources = [self._parameters_behind([value]) for value in self.plan.results]
        block = Block(parameters, tuple(self.out), tuple(results))
        carried = tuple(
            Carried(event, self.plan.crossing[node]) for node, event in self.crossing.items()
        )
        return _Emitted(block, self.consumed, owned, sources, passed, carried)


_EMIT = {
    NodeKind.LOGICAL_ID: _Emitter.logical_id,
    NodeKind.COLLECTIVE: _Emitter.collective,
    NodeKind.LOOP: _Emitter.loop,
    NodeKind.BRANCH: _Emitter.branch,
}


def _emit(
    state: _State, plan: BlockPlan, owned: Iterable[Value], *, is_entry: bool = False
) -> _Emitted:
    return _Emitter(state, plan, owned, is_entry).emit()


def _loop_body(state: _State, plan: BlockPlan) -> tuple[_Emitted, set[int], set[int]]:
    """The body, the carries that it owns, and those whose initial values must be owned."""
    ownable = state.ownable.get(plan, set(range(len(plan.parameters))))
    while True:
        mark = state.mark()
        emitted = _emit(state, plan, [plan.parameters[i] for i in sorted(ownable)])
        kept = {i for i in ownable if emitted.owned_results[i]}
        if kept == ownable:
            break
        state.cut(mark)
        ownable = kept
    state.ownable[plan] = ownable
    consumed = set(emitted.consumed)
    grown = True
    while grown:
        # A parameter that is returned as a carry which is overwritten must be owned too.
        needed = [s for p, s in zip(plan.parameters, emitted.result_sources, strict=True)
                  if p in consumed]  # fmt: skip
        before = len(consumed)
        consumed.update(*needed)
        grown = len(consumed) > before
    return emitted, ownable, {i for i, p in enumerate(plan.parameters) if p in consumed}


def _handed(passed: Sequence[set[int]], *, at_least_once: bool) -> list[set[int]]:
    """For each carry of a loop, the carries whose initial values it may be behind the loop."""
    found = []
    for k, sources in enumerate(passed):
        reached, stack = set[int](), list(sources)
        while stack:
            at = stack.pop()
            if at not in reached:
                reached.add(at)
                stack += passed[at]
        found.append(reached if at_least_once else reached | {k})
    return found


class _Finisher:
    """Gives runs their segments and starts their collectives, in the order of the program."""

    def __init__(self, state: _State, pool: SegmentPool, homes: dict[SegmentPlan, int]) -> None:
        self.state = state
        self.pool = pool
        self.homes = homes
        self.streams = state.streams
        self.collectives: list[Collective] = []
        self._reducers: dict[tuple[Computation, tuple[TensorType, ...]], int] = {}

    def block(self, block: Block) -> Block:
        return replace(block, instructions=tuple(self.instruction(i) for i in block.instructions))

    def instruction(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, Run):
            plan, aliases = self.state.runs[instruction.segment]
            self.homes[plan] = self.pool.add(plan, aliases)
            return replace(instruction, segment=self.homes[plan])
        if isinstance(instruction, Start):
            collective = self.collective(self.state.starts[instruction.collective])
            stream = instruction.stream
            if self.streams:
                own = self.collectives[collective]
                stream = self.streams.crossing(stream) if stream else self.streams.number(own)
            return replace(instruction, collective=collective, stream=stream)
        return with_blocks(instruction, self.block)

    def collective(self, node: Node) -> int:
        collective = node.collective
        assert collective is not None
        if node.reducer is not None:
            key = (node.reducer, collective.operands)
            if key not in self._reducers:
                self._reducers[key] = self.pool.add_reducer(node.reducer, collective.operands)
            collective = replace(collective, reducer=self._reducers[key])
        if collective.pairs and collective.groups:
            collective = replace(collective, groups=())  # only costs go by them
        self.collectives.append(collective)
        return len(self.collectives) - 1
