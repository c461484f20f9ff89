"""Verifies the loop of a step independently: each microbatch must go through all stages, there and back.

`check` follows the instructions of the new loop on every device and in every iteration, without the tables
that it was made from. What a run forwards takes is traced to the stage before, what one backwards takes to
the stage behind, for the same microbatch. What a backward run reads of a bank must have been put there for
its own microbatch, by the last run that put anything into that row. Sums must get the microbatches in the
order in which the written loop adds them up, and the loops that replay the written ones behind the new one
must read, in each iteration, what the last stage gave for the microbatch that leaves then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Module
from ..passes.valid.trace import Forward, LoopTrace
from ..values import BlockGraph, Node, Value
from .chains import Execution, Followed
from .connected import groups_of
from .merged import Names, Replay
from .parts import Pipeline
from .refusal import Refusal, about
from .training import Training

Run = tuple[int, int]  # microbatch, virtual stage

# Operands of a run: predicate, start, first slice, row, row of what is left, microbatch, then the values.
ROW, LEFT, MICROBATCH, FIRST = 3, 4, 5, 6


@dataclass(frozen=True)
class Drawn:
    """What each device does in each iteration of the new loop: ``runs``, ``numbers`` and ``own_chunks`` of
    `Scheduled`."""

    runs: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    own_chunks: tuple[tuple[int, ...], ...]


def check(module: bytes, names: Names, step: Training, num_devices: int) -> Drawn:
    """Prove that the new loop does what the written ones do; gives what each device does in each iteration.
    Raises `Refusal`."""
    parsed = Module.parse(module)
    entry = flatten(parsed.entry, CollectiveReader(1, num_devices))
    loop = next(n for n in entry.nodes if n.instruction.name == names.loop)
    forward = Forward(1, num_devices, follow_zeros=True)
    trace = forward.program(entry)
    inner = trace.inner[loop]
    assert isinstance(inner, LoopTrace)
    with about(step.backward.loop.name):
        if inner.summary is not None:
            raise Refusal(f"the loop is too long: {forward.not_followed.get(loop, '')}")
        followed = Followed(forward, trace, {loop: inner})
        checker = _Checker(followed, loop, step, names)
        for group in step.forward.groups:
            checker.group(group)
        checker.together()
        numbers = [step.order.index(m) for m in range(len(step.order))]
        reader = CollectiveReader(1, num_devices)
        for replay, pipeline, own in (
            (names.replays[0], step.forward, numbers),
            (names.replays[1], step.backward, list(range(len(numbers)))),
        ):
            if replay is not None:
                instruction = next(i for i in parsed.entry.instructions if i.name == replay.loop)
                block = flatten(instruction.called[0], reader, in_loop=True)
                _check_replay(forward, block, replay, pipeline, own)
        return checker.drawn()


@dataclass(eq=False)
class _Checker:
    followed: Followed
    loop: Node
    step: Training
    names: Names
    # By run, forwards, backwards, and of weights.
    runs: dict[Execution, Run] = field(default_factory=dict)
    runs_back: dict[Execution, Run] = field(default_factory=dict)
    runs_weights: dict[Execution, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.names
        self.origins = self.followed.origins[self.loop]
        self.block = self.loop.blocks[1]
        body = {n.instruction.name: n for n in self.block.nodes}
        self.takes_in, self.forward = body[names.takes_in], body[names.forward]
        self.turns, self.backward = body[names.turns], body[names.backward]
        self.head = body[names.head] if names.head else None
        self.count = self.step.forward.microbatches
        self.stages, self.chunks = self.step.forward.stages, names.chunks
        self.size = self.step.forward.layers.count // names.chunks
        self.values = len(self.step.forward.travels(names.chunks))
        self.values_back = len(self.step.backward.travels(names.chunks))
        self.ends = len(self.step.forward.results)
        self.ends_back = len(self.step.backward.results)
        self.weights = body[names.weights] if names.weights else None
        for node, first in ((self.forward, self.values), (self.backward, self.values_back)):
            self._kept(node, first)
        self._kept(self.turns, len(self.step.backward.sent), alone=names.turned)
        if self.weights is not None:
            self._kept(self.weights, 0)
            own = FIRST + names.held_back
            given = [
                *self.forward.results[self.values : self.values + names.banks],
                *self.backward.results[self.values_back + self.ends_back :],
            ]
            if [o.root for o in self.weights.operands[own : own + len(given)]] != given:
                raise self._wrong("a run of weights does not read what the other runs kept")

    def _kept(self, node: Node, first: int, alone: int | None = None) -> None:
        """Check that banks, sums and what the last stages and turns give are handed from iteration to
        iteration, and to nobody else but the backward run and the turn. ``alone``: how many results of a turn
        these are."""
        count = len(node.results) - first
        if alone is not None and count != alone:
            raise self._wrong("a turn gives something else")
        # A branch that rests is given no more; one that goes on without a turn is given what is received.
        before = len(node.operands) - 2 * count - (0 if alone is None else first)
        for n in range(count):
            result = node.results[first + n]
            carries = [i for i, r in enumerate(self.block.results) if r.root is result]
            if len(carries) != 1:
                raise self._wrong("what a run keeps is not handed from iteration to iteration")
            parameter = self.block.parameters[carries[0]]
            given = [node.operands[i + n].root for i in (before, len(node.operands) - count)]
            if given != [parameter, parameter]:
                raise self._wrong("a run does not go on with what was kept")
        kept = list(node.results[first:])
        if node is self.forward:
            banks = self.names.banks
            own = FIRST + self.values_back + self.names.held_back
            taken = [o.root for o in self.backward.operands[own : own + banks]]
            if taken != kept[:banks]:
                raise self._wrong("a backward run does not read what forward runs kept")
            heads = [] if self.head is None else list(self.head.results)
            after = 3 + len(heads)
            if [o.root for o in self.turns.operands[3:after]] != heads:
                raise self._wrong("the last stage does not turn with what all have computed")
            ends = [[o.root for o in self.turns.operands[after : after + self.ends]]]
            if self.head is not None:
                ends.append([o.root for o in self.head.operands[3 : 3 + self.ends]])
            if any(own != kept[banks:] for own in ends):
                raise self._wrong("the last stage does not turn with what it gave")

    def group(self, group: tuple[int, ...]) -> None:
        """Trace the runs of one of the pipelines that run side by side."""
        for stage, device in enumerate(group):
            self.runs |= self._numbered(self.forward, device, stage)
            self.runs_back |= self._numbered(self.backward, device, stage)
            if self.weights is not None:
                self.runs_weights |= self._numbered(self.weights, device, stage)
        every = list(range(self.count))
        for stage, device in enumerate(group):
            self._banks(device)
            last = self.runs_back if self.weights is None else self.runs_weights
            for v in range(stage, self.stages * self.chunks, self.stages):
                if self._met(last, device, v) != every:
                    raise self._wrong("gradients of microbatches are added in another order")
                for runs in (self.runs, self.runs_back):
                    if sorted(self._met(runs, device, v)) != every:
                        raise self._wrong("a stage does not run each microbatch once")
            for at in [a for a in self.runs if a.device == device]:
                self._takes(at, group[stage - 1])
            for at in [a for a in self.runs_back if a.device == device]:
                self._takes_back(at, group[(stage + 1) % self.stages])
        if self.names.turned and self._met(self.runs_back, group[-1], self.last) != every:
            raise self._wrong("microbatches turn in another order")

    @property
    def last(self) -> int:
        """The virtual stage on which microbatches turn."""
        return self.stages * self.chunks - 1

    @staticmethod
    def _met(runs: dict[Execution, Run], device: int, stage: int) -> list[int]:
        """The microbatches that a device runs through a virtual stage, in their order."""
        return [m for at, (m, v) in sorted(runs.items()) if (at.device, v) == (device, stage)]

    def drawn(self) -> Drawn:
        """For each device, what it does in each iteration."""
        size = self.followed.forward.num_devices, len(self.origins.iterations)
        letters = [["."] * size[1] for _ in range(size[0])]
        microbatches, chunks = np.full(size, -1), np.full(size, -1)
        for runs, letter in ((self.runs, "F"), (self.runs_back, "B"), (self.runs_weights, "W")):
            for at, (m, v) in runs.items():
                letters[at.device][at.iteration] = letter
                microbatches[at.device, at.iteration] = self.step.order[m]
                chunks[at.device, at.iteration] = v // self.stages
        numbers, own = (tuple(map(tuple, t.tolist())) for t in (microbatches, chunks))
        return Drawn(tuple("".join(row) for row in letters), numbers, own)

    def _numbered(self, node: Node, device: int, stage: int) -> dict[Execution, Run]:
        """The runs of a device, each with its microbatch and virtual stage."""
        pipeline = self.step.forward if node is self.forward else self.step.backward
        found = {}
        for t in range(len(self.origins.iterations)):
            at = Execution(t, device)
            if self._taken(node, at):
                start, first = self._number(node, 1, at), self._number(node, 2, at)
                chunk = start // self.size
                if start % self.size or not 0 <= chunk < self.chunks:
                    raise self._wrong("a run does not begin with the first layer of a chunk")
                if first != pipeline.layers.first_slice(start, self.size):
                    raise self._wrong("a run takes other slices for its own")
                if node is not self.forward:
                    chunk = self.chunks - 1 - chunk
                found[at] = self._number(node, MICROBATCH, at), chunk * self.stages + stage
        return found

    def _takes(self, at: Execution, before: int) -> None:
        """Check what a run forwards takes: from device ``before``, or, on the first virtual stage, a new
        microbatch."""
        pipeline = self.step.forward
        microbatch, v = self.runs[at]
        for leaf, i in enumerate(pipeline.travels(self.chunks)):
            value = self.forward.operands[FIRST + leaf]
            if i in pipeline.begun:
                if v % self.chunks:
                    self._traced(self.forward, leaf, value, at, before, (microbatch, v - 1), False)
                continue
            if not v:
                taken = pipeline.sent.index(i)
                if value.root.node is not self.takes_in or value.root.index != taken:
                    raise self._wrong("a microbatch does not begin where it is taken in")
                continue
            plus = i in pipeline.plus and v % self.chunks == 0
            self._traced(self.forward, leaf, value, at, before, (microbatch, v - 1), plus)
        if (not v) != self._taken(self.takes_in, at):
            raise self._wrong("a microbatch is not taken in where it should be")
        if not v:
            for n, position in enumerate(self.names.taken):
                known = self.step.known.get(position)
                given = self.takes_in.operands[1 + n]
                if known is None:
                    self._unchanged(given)
                elif self.origins.number(given, at) != known[at.device, microbatch]:
                    raise self._wrong("another microbatch is taken in")

    def _takes_back(self, at: Execution, behind: int) -> None:
        """Check what a run backwards takes: from device ``behind``, or, on the last virtual stage, where it
        turns."""
        pipeline = self.step.backward
        microbatch, v = self.runs_back[at]
        ends = v == self.last
        for leaf, i in enumerate(pipeline.travels(self.chunks)):
            value = self.backward.operands[FIRST + leaf]
            if i in pipeline.begun:
                if (self.last - v) % self.chunks:
                    self._traced(self.backward, leaf, value, at, behind, (microbatch, v + 1), False)
                continue
            if ends:
                begun = pipeline.sent.index(i)
                if value.root.node is not self.turns or value.root.index != begun:
                    raise self._wrong("a microbatch does not turn on the last stage")
                continue
            plus = i in pipeline.plus and (self.last - v) % self.chunks == 0
            self._traced(self.backward, leaf, value, at, behind, (microbatch, v + 1), plus)
        if ends != self._taken(self.turns, at):
            raise self._wrong("a microbatch does not turn where it should")
        if ends:
            given = [
                a for a, run in self.runs.items() if (a.device, run) == (at.device, (microbatch, v))
            ]
            if self._number(self.turns, 1, at) != microbatch or not given or given[0] > at:
                raise self._wrong("a microbatch turns before it has come, or as another one")

    def _traced(
        self, node: Node, leaf: int, value: Value, at: Execution, source: int,
        wanted: Run, plus: bool,
    ) -> None:  # fmt: skip
        runs = self.runs if node is self.forward else self.runs_back
        made = self.origins.of(value, at)
        if (made.node, made.leaf, made.at.device, made.slot) != (node, leaf, source, None):
            raise self._wrong("a stage does not take what its neighbour gave")
        if made.plus != plus:
            raise self._wrong("what a stage gives is changed on its way")
        if runs.get(made.at) != wanted:
            raise self._wrong("a stage takes what its neighbour gave for another microbatch")

    def _banks(self, device: int) -> None:
        """Check that each backward run reads what the forward run of its microbatch kept, and each run of
        weights that and what the backward run left."""
        rows: dict[int, Run] = {}
        left: dict[int, Run] = {}
        for t in range(len(self.origins.iterations)):
            at = Execution(t, device)
            if at in self.runs:
                rows[self._number(self.forward, ROW, at)] = self.runs[at]
            if at in self.runs_back:
                row = self._number(self.backward, ROW, at)
                if rows.get(row) != self.runs_back[at]:
                    raise self._wrong("a backward run reads what was kept for another microbatch")
                left[self._number(self.backward, LEFT, at)] = self.runs_back[at]
            if at in self.runs_weights and self.weights is not None:
                own = [rows.get(self._number(self.weights, ROW, at)),
                       left.get(self._number(self.weights, LEFT, at))]  # fmt: skip
                if own != [self.runs_weights[at]] * 2:
                    raise self._wrong("a run of weights reads what is of another microbatch")

    def together(self) -> None:
        """Check that devices whose layers or heads communicate run the same microbatch at the same time."""
        pairs = [(self.forward, self.runs), (self.backward, self.runs_back)]
        pairs += [(self.takes_in, self.runs), (self.turns, self.runs_back)]
        if self.weights is not None:
            pairs.append((self.weights, self.runs_weights))
        if self.head is not None:
            self._meet(self.head)
        for node, runs in pairs:
            for _, group in groups_of(node):
                for t in range(len(self.origins.iterations)):
                    every = [Execution(t, d) for d in group]
                    if len({runs.get(at) if self._taken(node, at) else None for at in every}) > 1:
                        raise self._wrong("devices that communicate run different microbatches")

    def _meet(self, head: Node) -> None:
        """Check that all stages compute the head of the microbatch that turns, when it does."""
        for group in self.step.forward.groups:
            for t in range(len(self.origins.iterations)):
                last = Execution(t, group[-1])
                turns = self._number(self.turns, 1, last) if self._taken(self.turns, last) else None
                for d in group:
                    at = Execution(t, d)
                    own = self._number(head, 1, at) if self._taken(head, at) else None
                    if own != turns:
                        raise self._wrong("not all stages compute the head that they divide")

    def _unchanged(self, value: Value) -> None:
        for parameter, result in zip(self.block.parameters, self.block.results, strict=True):
            if parameter is value.root and result.root is parameter:
                return
        raise self._wrong("what a microbatch begins with changes from iteration to iteration")

    def _number(self, node: Node, operand: int, at: Execution) -> int:
        found = self.origins.number(node.operands[operand], at)
        if found is None:
            raise self._wrong("which microbatch is run depends on data")
        return found

    def _taken(self, node: Node, at: Execution) -> bool:
        """Whether a conditional takes its first branch."""
        taken = self.origins.row(node.operands[0], at)
        if taken is None:
            raise self._wrong("what is run depends on data")
        return taken

    @staticmethod
    def _wrong(what: str) -> Refusal:
        return _wrong(what)


def _wrong(what: str) -> Refusal:
    return Refusal(f"the loop could not be verified: {what}")


def _check_replay(
    forward: Forward, block: BlockGraph, replay: Replay, pipeline: Pipeline, numbers: list[int]
) -> None:
    """Check the rows that a replayed loop reads, in each of its iterations.

    ``numbers``: of each microbatch of the written loop, the row.
    """
    nodes = {n.instruction.name: n for n in block.nodes}
    last = [group[-1] for group in pipeline.groups]
    runs = {
        run: numbers[m] for run, (m, _) in pipeline.places.items()
        if pipeline.elsewhere or run.device in last
    }  # fmt: skip
    known: list[np.ndarray | None] = [None] * len(block.parameters)
    known[1] = np.arange(forward.num_devices, dtype=np.uint32)
    for t in range(pipeline.trips):
        known[0] = np.array([t], np.int32)
        trace = forward.once(block, known)
        for row, taken in zip(replay.rows, replay.taken, strict=True):
            reads = forward.known(trace, _scalar(nodes[taken].operands[0]))
            taken_from = nodes[row].operands[0].root.node  # a reshape of a slice
            assert taken_from is not None
            place = forward.known(trace, taken_from.operands[1])
            for device in range(forward.num_devices):
                number = runs.get(Execution(t, device))
                wanted = number is not None
                if (
                    reads is None
                    or bool(reads.reshape(-1)[device if len(reads) > 1 else 0]) != wanted
                ):
                    raise _wrong("what the last stage gave is read at another time")
                if wanted and (place is None or int(place.reshape(-1)[device]) != number):
                    raise _wrong("what the last stage gave is read for another microbatch")


def _scalar(value: Value) -> Value:
    """The scalar that a predicate was broadcast from."""
    node = value.root.node
    while node is not None and node.instruction.opcode == "broadcast":
        value = node.operands[0]
        node = value.root.node
    return value
