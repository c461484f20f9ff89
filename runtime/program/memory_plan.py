"""How much memory one device needs for a run of a program: known before it runs.

`plan` walks the program as the executor does, with sizes instead of arrays: slots share buffers where they
share arrays, a donated buffer is taken over by a result of its size, a loop's body is walked twice (from
then on every iteration is like the second). What the caller does not give up stays. The engine's scratch
memory comes on top while a segment runs. Not counted: what collectives stage, and alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import Block, Branch, Copy, Free, LogicalId, Loop, Program, Run, Slot, Start


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device. ``reused``: of the arguments, taken over by results; ``peak``: at any time, with
    arguments and results; ``temporary``: of the peak, what is neither."""

    arguments: int
    results: int
    reused: int
    peak: int

    @property
    def temporary(self) -> int:
        return max(0, self.peak - (self.arguments + self.results - self.reused))


class _Buffer:
    __slots__ = ("nbytes", "users")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.users = nbytes, 0


class _Walk:
    """Which slot has which buffer, and what all of them take."""

    def __init__(self, program: Program, scratch: Sequence[int]) -> None:
        self._program = program
        self._scratch = scratch
        self.buffers: dict[Slot, _Buffer] = {}
        self._live = 0
        self.peak = 0

    def bind(self, slot: Slot, buffer: _Buffer) -> None:
        """Let the slot have the buffer, instead of the one it had."""
        if not buffer.users:
            self._live += buffer.nbytes
        buffer.users += 1
        self.free(slot)
        self.buffers[slot] = buffer
        self.reach(0)

    def free(self, slot: Slot) -> None:
        buffer = self.buffers.pop(slot, None)
        if buffer is not None:
            self.release(buffer)

    def release(self, buffer: _Buffer) -> None:
        buffer.users -= 1
        if not buffer.users:
            self._live -= buffer.nbytes

    def reach(self, extra: int) -> None:
        self.peak = max(self.peak, self._live + extra)

    def _new(self, slot: Slot) -> _Buffer:
        return _Buffer(self._program.slot_types[slot].nbytes)

    def hold(self, slots: Sequence[Slot]) -> list[_Buffer]:
        """The buffers of slots, each with a user more."""
        buffers = [self.buffers[slot] for slot in slots]
        for buffer in buffers:
            buffer.users += 1
        return buffers

    def block(self, block: Block, arguments: Sequence[_Buffer]) -> list[_Buffer]:
        """Walk a block, which takes over the hold on its arguments; gives its results, held."""
        for slot, buffer in zip(block.parameters, arguments, strict=True):
            self.bind(slot, buffer)
            self.release(buffer)
        owned = set(block.parameters)
        for instruction in block.instructions:
            self._step(instruction)
            owned.update(getattr(instruction, "outputs", ()))
        results = self.hold(block.results)
        for slot in (*block.parameters, *block.results):
            if slot in owned:
                self.free(slot)
        return results

    def _step(self, instruction: object) -> None:
        match instruction:
            case Run():
                self._run(instruction)
            case Start():
                for slot in instruction.outputs:
                    self.bind(slot, self._new(slot))
            case Copy() | LogicalId():
                self.bind(instruction.output, self._new(instruction.output))
            case Free():
                for slot in instruction.slots:
                    self.free(slot)
            case Loop():
                self._loop(instruction)
            case Branch():
                self._branch(instruction)

    def _run(self, run: Run) -> None:
        given = [self.buffers[slot] for slot in run.donated]
        taken = []
        for slot in run.outputs:
            new = self._new(slot)
            for buffer in given:
                if buffer.nbytes == new.nbytes:
                    given.remove(buffer)
                    new = buffer
                    break
            taken.append(new)
        for slot, buffer in zip(run.outputs, taken, strict=True):
            self.bind(slot, buffer)
        self.reach(self._scratch[run.segment])
        for slot in run.donated:
            self.free(slot)

    def _loop(self, loop: Loop) -> None:
        carries = self.hold(loop.inputs)
        for slot in loop.donated:
            self.free(slot)
        for _ in range(2 if loop.trip_count is None else min(2, loop.trip_count)):
            if loop.trip_count is None:
                for buffer in carries:
                    buffer.users += 1
                for buffer in self.block(loop.condition, carries):
                    self.release(buffer)
            carries = self.block(loop.body, carries)
        for slot, buffer in zip(loop.outputs, carries, strict=True):
            self.bind(slot, buffer)
            self.release(buffer)

    def _branch(self, branch: Branch) -> None:
        for inner, slots in zip(branch.branches, branch.inputs, strict=True):
            for buffer in self.block(inner, self.hold(slots)):
                self.release(buffer)
        for slot in branch.outputs:
            self.bind(slot, self._new(slot))


def plan(program: Program, scratch: Sequence[int] = ()) -> MemoryPlan:
    """What a run needs. ``scratch[i]``: bytes that a run of segment i needs beside operands and results."""
    walk = _Walk(program, scratch or [0] * len(program.segments))
    arguments = [_Buffer(type.nbytes) for type in program.inputs]
    callers = [-1 - index for index in range(len(arguments))]  # slots for the caller's hold on them
    for slot, buffer in zip(callers, arguments, strict=True):
        walk.bind(slot, buffer)
    walk.hold(callers)
    for index in program.donated:
        walk.free(callers[index])
    results = walk.block(program.body, arguments)
    copied = [program.outputs[index].nbytes for index in shared_results(program)]
    walk.reach(sum(copied))
    given = {id(arguments[index]) for index in program.donated}
    reused = {id(b): b.nbytes for b in results if id(b) in given}
    return MemoryPlan(
        arguments=sum(b.nbytes for b in arguments),
        results=sum(t.nbytes for t in program.outputs),
        reused=sum(reused.values()),
        peak=walk.peak,
    )


def shared_results(program: Program) -> tuple[int, ...]:
    """Positions of results that would share an array with an argument or with an earlier result.

    An output must be an array of its own: donating or deleting one must not take another with it.
    """
    donated = {program.body.parameters[index] for index in program.donated}
    taken = set(program.body.parameters) - donated
    shared = []
    for index, slot in enumerate(program.body.results):
        if slot in taken:
            shared.append(index)
        taken.add(slot)
    return tuple(shared)
