"""A slow walker of programs, to judge them by: segments on jaxlib's CPU client, collectives in numpy.

Written from the definitions in `runtime.program` and `collectives.ops`; shares nothing with the
executor or the communicators. Registers hold one array for each active device.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import jax
import numpy as np
from jaxlib import xla_client

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.runtime.program import (
    Block,
    Branch,
    Copy,
    Free,
    LogicalId,
    Loop,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    Wait,
)
from stretto.runtime.program.check import check

_COMBINE = {
    Reduction.SUM: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
}
_BITS = {
    Reduction.AND: (np.bitwise_and, np.logical_and),
    Reduction.OR: (np.bitwise_or, np.logical_or),
    Reduction.XOR: (np.bitwise_xor, np.logical_xor),
}

Arrays = dict[int, np.ndarray]


def compile_segment(segment: Segment):
    """The segment, compiled by jaxlib for the first CPU device."""
    return _compile(segment.module, segment.reproducible)


# A program as it is written and what a pass makes of it share most of their segments.
@lru_cache(maxsize=512)
def _compile(module: bytes, reproducible: bool):
    device = jax.devices("cpu")[0]
    options = xla_client.CompileOptions()
    if reproducible:
        # What makes loops with small carries otherwise than others.
        debug = options.executable_build_options.debug_options
        debug.xla_disable_hlo_passes = "small-while-loop-hoisting"
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    devices = xla_client.DeviceList((device,))
    return device.client.compile_and_load(module, devices, options)


@dataclass
class Interpreter:
    """Runs a checked program on all of its logical devices. ``iteration`` is that of the innermost loop.

    ``skipped``: what is received where a transfer is left out (see valid iterations), or None to make all
    of them. ``messages`` counts by pair of devices what permutes and receives move.
    """

    program: Program
    skipped: float | None = None
    messages: Counter = field(default_factory=Counter)
    iteration: int = 0
    counts: Counter = field(default_factory=Counter)
    _loaded: dict[int, object] = field(default_factory=dict)
    # By event that the loops under way carry: what its wait will give, by parameter.
    _arriving: dict[int, dict[Slot, Arrays]] = field(default_factory=dict)
    _carrying: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        check(self.program)

    def run(self, *inputs: list[np.ndarray]) -> list[list[np.ndarray]]:
        """``inputs[i][d]`` is input i of device d; results likewise."""
        with ThreadPoolExecutor(
            os.cpu_count()
        ) as pool:  # XLA compiles a small segment on one thread
            list(pool.map(compile_segment, self.program.segments))
        devices = range(self.program.num_devices)
        registers: dict[Slot, Arrays] = {}
        for slot, arrays in zip(self.program.body.parameters, inputs, strict=True):
            registers[slot] = {d: np.asarray(arrays[d]) for d in devices}
            for d in devices:
                expected = self.program.slot_types[slot]
                assert registers[slot][d].shape == expected.shape, (expected, d)
                assert registers[slot][d].dtype == expected.numpy, (expected, d)
        self._block(self.program.body, registers, list(devices))
        return [[registers[s][d] for d in devices] for s in self.program.body.results]

    def _block(self, block: Block, registers: dict[Slot, Arrays], active: list[int]) -> None:
        pending: dict[int, tuple[Start, dict[int, list[np.ndarray]]]] = {}
        for instruction in block.instructions:
            self.counts[type(instruction).__name__] += 1
            match instruction:
                case Run():
                    self._run(instruction, registers, active)
                case Start():
                    collective = self.program.collectives[instruction.collective]
                    operands = {d: [registers[s][d] for s in instruction.inputs] for d in active}
                    results = self._collective(collective, operands)
                    if instruction.event in self._carrying:
                        assert instruction.event not in self._arriving, "not awaited"
                        for i, slot in enumerate(instruction.outputs):
                            registers[slot] = {d: results[d][i] for d in active}
                    else:
                        pending[instruction.event] = (instruction, results)
                case Wait() if instruction.event in self._carrying:
                    registers.update(self._arriving.pop(instruction.event))
                case Wait():
                    start, results = pending.pop(instruction.event)
                    for i, slot in enumerate(start.outputs):
                        registers[slot] = {d: results[d][i] for d in active}
                case Loop():
                    self._loop(instruction, registers, active)
                case Branch():
                    self._branch(instruction, registers, active)
                case Copy():
                    source = registers[instruction.input]
                    registers[instruction.output] = {d: source[d].copy() for d in active}
                case LogicalId():
                    n = self.program.num_partitions
                    ids = {d: d % n if instruction.kind == "partition" else d // n for d in active}
                    registers[instruction.output] = {d: np.uint32(ids[d]) for d in active}
                case Free():
                    for slot in instruction.slots:
                        del registers[slot]

    def _segment(self, index: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
        if index not in self._loaded:
            self._loaded[index] = compile_segment(self.program.segments[index])
        device = jax.devices("cpu")[0]
        arrays = [jax.device_put(np.array(x, copy=True), device) for x in inputs]
        return [np.array(r) for r in self._loaded[index].execute(arrays)]

    def _run(self, run: Run, registers: dict[Slot, Arrays], active: list[int]) -> None:
        results = {
            d: self._segment(run.segment, [registers[s][d] for s in run.inputs]) for d in active
        }
        for slot in run.donated:
            del registers[slot]
        for i, slot in enumerate(run.outputs):
            expected = self.program.slot_types[slot]
            registers[slot] = {d: results[d][i] for d in active}
            for d in active:
                assert results[d][i].shape == expected.shape
                assert results[d][i].dtype == expected.numpy

    def _loop(self, loop: Loop, registers: dict[Slot, Arrays], active: list[int]) -> None:
        carries = [dict(registers[s]) for s in loop.inputs]
        for slot in loop.donated:
            del registers[slot]
        inside = list(active)
        iteration = 0
        while inside:
            if loop.trip_count is not None:
                if iteration == loop.trip_count:
                    break
            else:
                for slot, carry in zip(loop.condition.parameters, carries, strict=True):
                    registers[slot] = {d: carry[d] for d in inside}
                self._block(loop.condition, registers, inside)
                goes_on = registers[loop.condition.results[0]]
                inside = [d for d in inside if goes_on[d]]
                if not inside:
                    break
            for slot, carry in zip(loop.body.parameters, carries, strict=True):
                registers[slot] = {d: carry[d] for d in inside}
            outer, self.iteration = self.iteration, iteration
            for carried in loop.carried:
                parameters = [loop.body.parameters[k] for _, k in carried.carries]
                self._carrying.add(carried.event)
                self._arriving[carried.event] = {p: registers.pop(p) for p in parameters}
            self._block(loop.body, registers, inside)
            self.iteration = outer
            for slot, carry in zip(loop.body.results, carries, strict=True):
                carry.update({d: registers[slot][d] for d in inside})
            iteration += 1
        for slot, carry in zip(loop.outputs, carries, strict=True):
            registers[slot] = carry

    def _branch(self, branch: Branch, registers: dict[Slot, Arrays], active: list[int]) -> None:
        chosen = {}
        for d in active:
            selector = registers[branch.selector][d]
            if selector.dtype == np.bool_:
                chosen[d] = 0 if selector else 1
            else:
                index = int(selector)
                last = len(branch.branches) - 1
                chosen[d] = index if 0 <= index <= last else last
        outputs: list[Arrays] = [{} for _ in branch.outputs]
        for index, (block, inputs) in enumerate(zip(branch.branches, branch.inputs, strict=True)):
            inside = [d for d in active if chosen[d] == index]
            if not inside:
                continue
            for slot, source in zip(block.parameters, inputs, strict=True):
                registers[slot] = {d: registers[source][d] for d in inside}
            self._block(block, registers, inside)
            for output, slot in zip(outputs, block.results, strict=True):
                output.update({d: registers[slot][d] for d in inside})
        for slot, output in zip(branch.outputs, outputs, strict=True):
            registers[slot] = output

    # Collectives.

    def _is_valid(self, c: Collective, pair: int) -> bool:
        if not c.valid_iterations:
            return True
        bounds = c.valid_iterations[pair]
        runs = zip(bounds[::2], bounds[1::2], strict=True)
        return any(low <= self.iteration <= high for low, high in runs)

    def _collective(
        self, c: Collective, operands: dict[int, list[np.ndarray]]
    ) -> dict[int, list[np.ndarray]]:
        if c.kind is Kind.SEND:
            self._sent = (c, operands)
            return {d: [] for d in operands}
        if c.kind in (Kind.PERMUTE, Kind.RECV):
            data = operands
            if c.kind is Kind.RECV:
                sender, data = self._sent
                assert sender.pairs == c.pairs
            results = {d: [np.zeros(t.shape, t.numpy) for t in c.results] for d in operands}
            for k, (source, target) in enumerate(c.pairs):
                if target not in results:
                    continue
                if self.skipped is not None and not self._is_valid(c, k):
                    results[target] = [np.full_like(x, self.skipped) for x in data[source]]
                    continue
                results[target] = [x.copy() for x in data[source]]
                self.messages[source, target] += source != target
            return results
        members = {d for group in c.groups for d in group}
        results = {
            d: [np.zeros(t.shape, t.numpy) for t in c.results] for d in operands if d not in members
        }
        for group in c.groups:
            if not all(d in operands for d in group):
                assert not any(d in operands for d in group), "only a part of a group is active"
                continue
            for rank, d in enumerate(group):
                results[d] = self._one(c, rank, [operands[m] for m in group])
        return results

    def _one(self, c: Collective, rank: int, all_: list[list[np.ndarray]]) -> list[np.ndarray]:
        size, axis = len(all_), c.dimension
        if c.kind is Kind.ALL_REDUCE:
            return self._reduced(c, all_)
        if c.kind is Kind.REDUCE_SCATTER:
            return [np.split(x, size, axis)[rank] for x in self._reduced(c, all_)]
        if c.kind is Kind.ALL_GATHER:
            return [np.concatenate(parts, axis) for parts in zip(*all_, strict=True)]
        if c.kind is Kind.ALL_TO_ALL:
            if c.tuple_form:
                return [all_[m][rank] for m in range(size)]
            pieces = [[np.split(x, size, axis)[rank] for x in member] for member in all_]
            return [np.concatenate(parts, axis) for parts in zip(*pieces, strict=True)]
        if c.kind is Kind.BROADCAST:
            root = int(all_[rank][-1]) if c.dynamic_root else 0
            return [x.copy() for x in all_[root][: len(c.results)]]
        assert c.kind is Kind.RAGGED_ALL_TO_ALL
        # Each member sends input[offset : offset + size] to where its own output offset says.
        result = all_[rank][1].copy()
        for data, _, input_offsets, send_sizes, output_offsets, _ in all_:
            per_peer = len(send_sizes) // size
            for k in range(rank * per_peer, (rank + 1) * per_peer):
                start, n, to = input_offsets[k], send_sizes[k], output_offsets[k]
                result[to : to + n] = data[start : start + n]
        return [result]

    def _reduced(self, c: Collective, all_: list[list[np.ndarray]]) -> list[np.ndarray]:
        total = all_[0]
        for other in all_[1:]:
            if c.reducer is not None:
                total = self._segment(c.reducer, [*total, *other])
            elif c.reduction in _COMBINE:
                total = [_COMBINE[c.reduction](a, b) for a, b in zip(total, other, strict=True)]
            else:
                bitwise, logical = _BITS[c.reduction]
                total = [
                    (logical if a.dtype == np.bool_ else bitwise)(a, b)
                    for a, b in zip(total, other, strict=True)
                ]
        return total
